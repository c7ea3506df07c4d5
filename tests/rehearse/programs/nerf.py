"""Fit a scene as NeRF's programs do: `global_step`, a local variable, sets the learning rate after each step."""

import sys

import torch
from torch import nn

import scarctl

LRATE, DECAY = 5e-3, 25


def create_nerf() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4), nn.Sigmoid())


def sample_rays(images: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    picked = torch.randint(0, len(images), (count,))
    directions = torch.rand(count, 3)
    return torch.cat([directions, images[picked, :3]], dim=1), images[picked]


def main(store: str) -> None:
    model = create_nerf()
    optimizer = torch.optim.Adam(model.parameters(), lr=LRATE, betas=(0.9, 0.999))
    images = torch.rand(64, 4)
    session = scarctl.attach(model, optimizer, store=store)
    start = session.resume().step
    global_step = 0
    for i in range(start, 2000):
        rays, target = sample_rays(images, 16)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(rays), target)
        loss.backward()
        optimizer.step()
        new_lrate = LRATE * 0.1 ** (global_step / DECAY)
        for group in optimizer.param_groups:
            group["lr"] = new_lrate
        if i % 100 == 0:
            sys.stdout.write(f"iteration {i}: loss {loss.item():.4f}\n")
        global_step += 1  # noqa: SIM113


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
