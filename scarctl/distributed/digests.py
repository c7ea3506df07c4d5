"""Digest the tensors that one rank has in common with others, which should hold the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import xxhash

from scarctl.adapter import StateGroup
from scarctl.checkpoint.live_state import is_placeholder
from scarctl.checkpoint.row_copies import is_gpu
from scarctl.distributed.ownership import Division
from scarctl.state.common import name_of
from scarctl.util.splitmix import splitmix64

_PIECE = 8 << 20
"""Bytes that are digested at once, and copied if they are not in a row."""
_WORD = 8


class Digests:
    """Digests one rank's copies of parameters, and of the optimizer's slots that ranks share.

    Buffers are left out: DistributedDataParallel replaces them by the first rank's before each forward pass, and until
    then they may differ. If nothing replaces them, each rank saves its own.
    """

    def __init__(self, division: Division, rank: int) -> None:
        found: dict[tuple[int, ...], list[tuple[str, int, bool]]] = {}
        for holders in {id(copy.holders): copy.holders for copy in division.copies}.values():
            number = holders.groups.get(rank)
            if number is None:
                continue
            found.setdefault(tuple(holders.groups), []).append((holders.name, number, False))
            if rank in holders.sharing and len(holders.sharing) > 1:
                found.setdefault(holders.sharing, []).append((holders.name, number, True))
        # The same parameter may have another number on another rank.
        self._parts = {name_of(ranks): sorted(parts) for ranks, parts in found.items()}

    def of(self, groups: Sequence[StateGroup]) -> Callable[[], dict[str, str]]:
        """Return a function that digests the present values of the groups, parallel to the rank's holdings.

        It returns a digest for each set of ranks, equal on those of them that have the same bytes. It may be called in
        any thread, and waits for a GPU.
        """

        def digests() -> dict[str, str]:
            listed = {ranks: list(_tensors(parts, groups)) for ranks, parts in self._parts.items()}
            return {ranks: digest_of(tensors) for ranks, tensors in listed.items() if tensors}

        return digests


def _tensors(
    parts: Sequence[tuple[str, int, bool]], groups: Sequence[StateGroup]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, number, slots in parts:
        group = groups[number]
        if group.kind != "parameter":
            continue
        for slot, tensor in sorted(group.tensors.items()):
            if bool(slot) is slots and not (slot and is_placeholder(tensor)):
                yield f"{name}/{slot} {tensor.dtype} {list(tensor.shape)}", tensor


@torch.no_grad()
def digest_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Return a digest of labelled tensors: 32 hex digits.

    The host reads them at memory speed. On a GPU they are added up there, and only the sums come to the host.
    """
    total, sums = xxhash.xxh3_128(), list[torch.Tensor]()
    weights: dict[torch.device, torch.Tensor] = {}
    for label, tensor in tensors:
        total.update(label.encode())
        for piece in _pieces(tensor):
            if not is_gpu(piece.device):
                total.update(memoryview(piece.cpu().numpy()))
                continue
            if piece.device not in weights:
                weights[piece.device] = _weights(piece.device)
            sums.append(_sum(piece, weights[piece.device]))
    if sums:
        # One device at a time: a transfer of each sum alone would wait hundreds of times.
        for device in weights:
            here = torch.stack([one for one in sums if one.device == device])
            total.update(here.cpu().numpy().tobytes())
    return total.hexdigest()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor's bytes in order: uint8 of one dimension, contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        yield from torch.split(tensor.reshape(-1).view(torch.uint8), _PIECE)
        return
    rows = max(1, _PIECE // max(1, tensor[:1].numel() * tensor.element_size()))
    for some in torch.split(tensor, rows):
        yield from torch.split(some.contiguous().reshape(-1).view(torch.uint8), _PIECE)


def _sum(piece: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of a piece's words, and of their upper halves, modulo 2**64: int64 of shape (2,).

    Weights are odd, so that the first sum changes with any single word. It has one bit of what differs in the highest
    bit alone, such as signs: two of them would cancel. Integers have the same sum in any order.
    """
    if piece.storage_offset() % _WORD or piece.numel() % _WORD:
        aligned = torch.zeros(-(-piece.numel() // _WORD) * _WORD, dtype=torch.uint8, device=piece.device)
        aligned[: piece.numel()] = piece
        piece = aligned
    words = piece.view(torch.int64)
    weights = weights[: words.numel()]
    return torch.stack([(words * weights).sum(), ((words >> 32) * weights).sum()])


def _weights(device: torch.device) -> torch.Tensor:
    """Return an odd number for each word of a piece, without a pattern: int64 of shape (words,)."""
    numbers = splitmix64(np.arange(1, _PIECE // _WORD + 1), 0) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)
