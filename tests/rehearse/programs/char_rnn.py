"""Train a character model whose hidden state, a local variable, goes from each batch to the next."""

import sys
from typing import Any

import torch
from torch import nn

import scarctl

TEXT = "the quick brown fox jumps over the lazy dog and runs away " * 8
LENGTH = 8


class CharRNN(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(words, 8), nn.LSTM(8, 16, batch_first=True)
        self.out = nn.Linear(16, words)

    def forward(self, x: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        y, hidden = self.lstm(self.embed(x), hidden)
        return self.out(y), hidden


def chunks(data: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    starts = range(0, data.shape[1] - LENGTH - 1, LENGTH)
    return [(data[:, i : i + LENGTH], data[:, i + 1 : i + LENGTH + 1]) for i in starts]


def main(store: str) -> None:
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    data = torch.tensor([letters.index(letter) for letter in TEXT]).view(2, -1)
    model = CharRNN(len(letters))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = scarctl.attach(model, optimizer, store=store)
    session.resume()
    for epoch in session.epochs(20):
        hidden, total = None, 0.0
        for x, y in session.batches(chunks(data)):
            if hidden is not None:
                hidden = tuple(one.detach() for one in hidden)
            scores, hidden = model(x, hidden)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += loss.item()
        sys.stdout.write(f"epoch {epoch}: loss {total:.3f}\n")
    session.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
