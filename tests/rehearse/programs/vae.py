"""Train a VAE in epochs, each with an evaluation and a sample."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scarctl


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.decode = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 12), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = self.fc1(x).relu()
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decode(z), mu, logvar


def loss_function(
    recon: torch.Tensor, x: torch.Tensor, mu: torch.Tensor, logvar: torch.Tensor
) -> torch.Tensor:
    bce = nn.functional.binary_cross_entropy(recon, x, reduction="sum")
    return bce - 0.5 * (1 + logvar - mu.square() - logvar.exp()).sum()


def main(store: str) -> None:
    torch.manual_seed(1)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_loader = DataLoader(TensorDataset(torch.rand(28, 12)), 4, shuffle=True)
    test_loader = DataLoader(TensorDataset(torch.rand(8, 12)), 4, shuffle=True)
    session = scarctl.attach(model, optimizer, store=store)
    session.resume()
    for epoch in session.epochs(20):
        model.train()
        for (data,) in session.batches(train_loader):
            optimizer.zero_grad()
            loss = loss_function(model(data)[0], data, *model(data)[1:])
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            test_loss = sum(loss_function(model(x)[0], x, *model(x)[1:]).item() for (x,) in test_loader)
            sys.stdout.write(f"epoch {epoch}: test loss {test_loss / 8:.4f}\n")
            model.decode(torch.randn(4, 3))
    session.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
