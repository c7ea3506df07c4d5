"""Define a mixture of experts that reads bytes and predicts the next one. Every rank has some of the experts."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd as exchange

BYTES = 256


class Dense(nn.Module):
    """The layers that are the same on all ranks: input, router, gate and output."""

    def __init__(self, length: int, width: int, experts: int) -> None:
        super().__init__()
        self.bytes, self.mix = nn.Embedding(BYTES, 32), nn.Linear(32 * length, width)
        self.router, self.gate = nn.Linear(width, experts, bias=False), nn.Linear(width, 1)
        self.logits = nn.Linear(width, BYTES)


class Mixture(nn.Module):
    """Each byte's expert is the one that the router likes best; what is to be read goes to the rank that has it."""

    def __init__(self, length: int, rank: int, world: int, experts: int = 8, width: int = 96) -> None:
        super().__init__()
        self.experts, self.world = experts, world
        torch.manual_seed(0)
        self.dense = Dense(length, width, experts)
        self.mine = nn.ModuleDict()
        for number in range(rank * experts // world, (rank + 1) * experts // world):
            torch.manual_seed(1 + number)
            # Its number is part of its name: no other rank has parameters of this name.
            self.mine[str(number)] = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )

    def forward(self, text: torch.Tensor) -> tuple[torch.Tensor, dict[str, int]]:
        """Logits, float32 of shape (batch, 256), for bytes, int64 of shape (batch, length); and each expert's work."""
        x = self.dense.mix(self.dense.bytes(text).flatten(1)).relu()
        liking, chosen = self.dense.router(x).softmax(1).max(1)
        order = chosen.argsort(stable=True)
        sent = chosen.bincount(minlength=self.experts).view(self.world, -1)
        came = torch.empty_like(sent)  # by rank that sent, and expert
        dist.all_to_all_single(came, sent)
        there, here = sent.sum(1).tolist(), came.sum(1).tolist()
        rows = exchange(x[order], here, there, dist.group.WORLD)
        read = self._read(rows.split(came.flatten().tolist()))
        back = exchange(read, there, here, dist.group.WORLD)
        found = torch.empty_like(x).index_copy(0, order, back) * liking[:, None]
        logits: torch.Tensor = self.dense.logits(x + self.dense.gate(x).sigmoid() * found)
        return logits, dict(zip(self.mine, came.sum(0).tolist(), strict=True))

    def _read(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Pass every part through its expert. Parts are in the order of sending ranks, then of experts."""
        read = list(parts)
        for place, expert in enumerate(self.mine.values()):
            mine = parts[place :: len(self.mine)]
            read[place :: len(self.mine)] = expert(torch.cat(mine)).split([len(part) for part in mine])
        return torch.cat(read)
