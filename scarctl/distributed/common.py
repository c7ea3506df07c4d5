"""Sample the parameters that all ranks hold in common, so that ranks notice if theirs differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from scarctl.adapter import StateGroup
from scarctl.distributed.ownership import Division

_MOST = 64
"""Largest number of parameters of one sample: it bounds the cost, which does not depend on their sizes."""
_TURN, _BITS = 2654435761, 32
"""2**32 divided by the golden ratio: such turns spread samples evenly over a parameter."""


class Common:
    """Samples one rank's parameters of which every rank has the same part."""

    def __init__(self, division: Division, rank: int, groups: Callable[[], Sequence[StateGroup]]) -> None:
        """groups: returns the rank's groups, parallel to its holdings; () while they are unknown."""
        world = len(division.owned)
        everywhere = {
            c.holders.name: c.holders.groups[rank] for c in division.copies if len(c.holders.groups) == world
        }
        self._numbers = [number for _, number in sorted(everywhere.items())]
        self._groups = groups

    @property
    def turns(self) -> int:
        """Number of samples in a row that have a value of each parameter."""
        return -(-len(self._numbers) // _MOST)

    @torch.no_grad()
    def sample(self, number: int) -> torch.Tensor | None:
        """Return single values, float64 of shape (values,), equal on ranks that agree; None without any.

        number: counts the samples, so that each parameter has its turn, whatever the interval. Called when the loop is
        done with the step. On a GPU nothing waits for the values here.
        """
        groups, count = self._groups(), len(self._numbers)
        # In the order of names: the same parameter may have another number on another rank.
        most = min(_MOST, count) if groups else 0
        numbers = [self._numbers[(number * _MOST + k) % count] for k in range(most)]
        found = [groups[n].tensors[""] for n in numbers if groups[n].kind == "parameter"]
        values = [_value(tensor, number) for tensor in found if tensor.numel() and not tensor.is_complex()]
        if not values:
            return None
        # NaN has many patterns of bits.
        return torch.stack([value.to(values[0].device) for value in values]).nan_to_num(nan=0.5)


def digest_of(sample: torch.Tensor | None) -> int:
    """Return a digest of a sample, 1 to 2**62; 0 without one. Waits for a GPU."""
    if sample is None:
        return 0
    data = sample.cpu().numpy().tobytes()
    return 1 + int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") % (1 << 62)


def _value(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Return one value of a tensor, float64 of shape ()."""
    at = (number * _TURN % (1 << _BITS)) * tensor.numel() >> _BITS
    for size in reversed(tensor.shape):
        at, place = divmod(at, size)
        tensor = tensor.select(-1, place)
    return tensor.double()
