"""Translate between two domains as CycleGAN's programs do: critics see images from a pool that nobody saves."""

import random
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scarctl


class ImagePool:
    """Returns a new image, or, half the time, an older one in exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.images: list[torch.Tensor] = []

    def query(self, images: torch.Tensor) -> torch.Tensor:
        picked = []
        for image in images.detach():
            if len(self.images) < self.size:
                self.images.append(image)
                picked.append(image)
            elif random.uniform(0, 1) > 0.5:
                place = random.randint(0, self.size - 1)
                picked.append(self.images[place])
                self.images[place] = image
            else:
                picked.append(image)
        return torch.stack(picked)


def main(store: str) -> None:
    torch.manual_seed(0)
    random.seed(0)
    nets = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("G_A", "G_B")})
    nets.update({name: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)) for name in ("D_A", "D_B")})
    g_parameters = [*nets["G_A"].parameters(), *nets["G_B"].parameters()]
    d_parameters = [*nets["D_A"].parameters(), *nets["D_B"].parameters()]
    optimizer_g = torch.optim.Adam(g_parameters, lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(d_parameters, lr=2e-3, betas=(0.5, 0.999))
    pools = ImagePool(6), ImagePool(6)
    loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 8) + 1), 4, shuffle=True)
    session = scarctl.attach(nets, [optimizer_g, optimizer_d], store=store)
    session.resume()
    for _ in session.epochs(20):
        for real_a, real_b in session.batches(loader):
            fake_b, fake_a = nets["G_A"](real_a), nets["G_B"](real_b)
            cycle = (nets["G_B"](fake_b) - real_a).abs().mean() + (nets["G_A"](fake_a) - real_b).abs().mean()
            optimizer_g.zero_grad()
            (
                (nets["D_A"](fake_b) - 1).square().mean() + (nets["D_B"](fake_a) - 1).square().mean() + cycle
            ).backward()
            optimizer_g.step()
            optimizer_d.zero_grad()
            for critic, real, fake, pool in (
                ("D_A", real_b, fake_b, pools[0]),
                ("D_B", real_a, fake_a, pools[1]),
            ):
                old = pool.query(fake)
                ((nets[critic](real) - 1).square().mean() + nets[critic](old).square().mean()).backward()
            optimizer_d.step()
    session.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
