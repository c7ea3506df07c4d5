"""Train a Transformer as the annotated ones do: a wrapper of the optimizer counts its steps for the learning rate."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scarctl


class ScheduledOptim:
    """Warms the learning rate up, then lets it fall."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float, width: int, warmup: int) -> None:
        self._optimizer, self.factor, self.width, self.warmup = optimizer, factor, width, warmup
        self.n_steps = 0

    def step_and_update_lr(self) -> None:
        self.n_steps += 1
        scale = min(self.n_steps**-0.5, self.n_steps * self.warmup**-1.5)
        for group in self._optimizer.param_groups:
            group["lr"] = self.factor * self.width**-0.5 * scale
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


class Copier(nn.Module):
    def __init__(self, words: int = 11, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.out = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.layer(self.embed(x)))
        return scores


def main(store: str) -> None:
    torch.manual_seed(0)
    model = Copier()
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    optimizer = ScheduledOptim(adam, 0.5, 16, 8)
    loader = DataLoader(TensorDataset(torch.randint(1, 11, (40, 6))), 4, shuffle=True)
    session = scarctl.attach(model, adam, store=store)
    session.resume()
    for _ in session.epochs(20):
        for (tokens,) in session.batches(loader):
            optimizer.zero_grad()
            scores = model(tokens)
            nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()).backward()
            optimizer.step_and_update_lr()
    session.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
