"""Predict a sine as the time-sequence example does: LBFGS, whose closure is called several times a step."""

import math
import sys

import torch
from torch import nn

import scarctl


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTMCell(1, 8), nn.Linear(8, 1)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        h, c = torch.zeros(len(series), 8), torch.zeros(len(series), 8)
        outputs = []
        for value in series.split(1, dim=1):
            h, c = self.lstm(value, (h, c))
            outputs.append(self.linear(h))
        return torch.cat(outputs, dim=1)


def main(store: str) -> None:
    torch.manual_seed(0)
    shifts = torch.randint(-8, 8, (6, 1))
    data = ((torch.arange(12) + shifts) / 5.0 * math.pi / 3).sin()
    model = Sequence()
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
    session = scarctl.attach(model, optimizer, store=store)
    session.resume()
    for i in session.epochs(100):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = criterion(model(data[:, :-1]), data[:, 1:])
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        with torch.no_grad():
            model(data[:2])
        sys.stdout.write(f"step {i}: loss {float(loss):.5f}\n")
    session.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
