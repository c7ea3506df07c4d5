"""Train as DCGAN's programs do: two optimizers, and fixed noise for the samples."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scarctl


def weights_init(module: nn.Module) -> None:
    if isinstance(module, nn.ConvTranspose2d | nn.Conv2d):
        nn.init.normal_(module.weight, 0.0, 0.02)


def main(store: str) -> None:
    torch.manual_seed(999)
    net_g = nn.Sequential(
        nn.ConvTranspose2d(8, 4, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 1, 2, 2)
    )
    net_d = nn.Sequential(nn.Conv2d(1, 4, 4, 2), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 3), nn.Sigmoid())
    net_g.apply(weights_init)
    net_d.apply(weights_init)
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(4, 8, 1, 1)
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    loader = DataLoader(TensorDataset(torch.rand(32, 1, 8, 8)), 4, shuffle=True)
    session = scarctl.attach(nn.ModuleList([net_d, net_g]), [optimizer_d, optimizer_g], store=store)
    session.resume()
    for _ in session.epochs(20):
        for (real,) in session.batches(loader):
            net_d.zero_grad()
            label = torch.ones(len(real))
            criterion(net_d(real).view(-1), label).backward()
            fake = net_g(torch.randn(len(real), 8, 1, 1))
            criterion(net_d(fake.detach()).view(-1), 0 * label).backward()
            optimizer_d.step()
            net_g.zero_grad()
            criterion(net_d(fake).view(-1), label).backward()
            optimizer_g.step()
        with torch.no_grad():
            net_g(fixed_noise)
    session.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
