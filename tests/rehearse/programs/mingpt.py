"""Train as minGPT's trainer does: an iterator over the loader that StopIteration restarts."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import scarctl


class SortDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(3, (6,))
        return tokens, tokens.sort().values


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(3, 16), nn.Parameter(torch.zeros(6, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 3, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.block(self.embed(x) + self.place))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, model: GPT, dataset: SortDataset, store: str) -> None:
        self.model, self.dataset = model, dataset
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
        self.session = scarctl.attach(model, self.optimizer, store=store)

    def run(self, max_iters: int) -> None:
        loader = DataLoader(self.dataset, batch_size=8, shuffle=True)
        self.iter_num = self.session.resume().step
        data_iter = iter(self.session.batches(loader))
        while self.iter_num < max_iters:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(self.session.batches(loader))
                batch = next(data_iter)
            _, loss = self.model(*batch)
            self.model.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.iter_num += 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(3407)
    Trainer(GPT(), SortDataset(), sys.argv[1]).run(1000)
