"""Classify the nodes of a graph as GCN's programs do: one batch, and one step an epoch."""

import sys

import torch
from torch import nn

import scarctl


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.5, self.training)
        x = (adjacency @ self.conv1(x)).relu()
        x = nn.functional.dropout(x, 0.5, self.training)
        scores: torch.Tensor = adjacency @ self.conv2(x)
        return scores


def main(store: str) -> None:
    torch.manual_seed(42)
    features, labels = torch.randn(30, 8), torch.randint(3, (30,))
    adjacency = (torch.rand(30, 30) < 0.1).float() + torch.eye(30)
    adjacency /= adjacency.sum(1, keepdim=True)
    train_mask = torch.rand(30) < 0.7
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    session = scarctl.attach(model, optimizer, store=store)
    session.resume()
    best = 0.0
    for epoch in session.epochs(200):
        model.train()
        optimizer.zero_grad()
        out = model(features, adjacency)
        nn.functional.cross_entropy(out[train_mask], labels[train_mask]).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = model(features, adjacency).argmax(1) == labels
        best = max(best, right[~train_mask].float().mean().item())
        sys.stdout.write(f"epoch {epoch}: best {best:.3f}\n")
    session.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
