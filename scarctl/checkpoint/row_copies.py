"""Copy rows between tensors: between two places on the host, or between a GPU and the host.

On the host a copy is cheap to start and takes as long as its bytes. To and from a GPU each call takes longer than the
bytes of a small partition. It waits for the interpreter's lock, and training waits for it. So there all rows of a
tensor are copied by a few calls, without waiting; `wait_for` waits once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.util.arrays import Ids, take_rows

_RUN_BYTES = 1 << 14
"""Mean length of a run of adjacent rows below which one gather is faster than one copy per run, on the host."""


def is_gpu(device: torch.device) -> bool:
    """Return whether copies to and from this device may be queued without waiting."""
    return device.type == "cuda"


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait for this thread's copies to and from the GPUs among these devices."""
    for device in devices:
        if is_gpu(device):
            torch.cuda.current_stream(device).synchronize()


def units_of(tensor: torch.Tensor, size: int) -> NDArray[np.void] | None:
    """Return each `size` rows of a tensor as one value: a view of shape (rows // size,). None if it has no such view.

    numpy gathers them several times faster than torch gathers rows. It also takes no threads from training: two teams
    of torch's threads on the same processors wait for each other.
    """
    count = tensor.shape[0] // size if tensor.dim() else 0
    nbytes = tensor.element_size() * (tensor[0].numel() if count else 0) * size
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not nbytes:
        return None
    # A contiguous tensor may have any stride in a dimension of size 1.
    flat = tensor.detach().as_strided((count * nbytes // tensor.element_size(),), (1,))
    return flat.view(torch.uint8).numpy().view(np.dtype((np.void, nbytes)))


def copy_rows(
    target: torch.Tensor, source: torch.Tensor, starts: Ids, stops: Ids, *, counted: bool = True
) -> None:
    """Assign target[rows] = source[rows] for the rows of all ranges, which ascend and do not overlap.

    counted: torch has to count the write in `target._version`.
    Between a GPU and the host it only queues the copies: see `wait_for`.
    """
    queued = is_gpu(target.device) != is_gpu(source.device)
    if not target.dim():
        target.copy_(source, non_blocking=queued)
        return
    if starts.size == 1:
        start, count = int(starts[0]), int(stops[0] - starts[0])
        if count == target.shape[0]:
            target.copy_(source, non_blocking=queued)
            return
        target.narrow(0, start, count).copy_(source.narrow(0, start, count), non_blocking=queued)
        return
    breaks = np.flatnonzero(starts[1:] != stops[:-1])
    run_starts = starts[np.concatenate(([0], breaks + 1))]
    run_stops = stops[np.append(breaks, starts.size - 1)]
    row_bytes = target.element_size() * (target.numel() // target.shape[0])
    long = int((stops - starts).sum()) * row_bytes >= run_starts.size * _RUN_BYTES or run_starts.size == 1
    if queued and long:
        copy_runs(target, source, run_starts, run_stops)
    elif long:
        for start, stop in zip(run_starts.tolist(), run_stops.tolist(), strict=True):
            target.narrow(0, start, stop - start).copy_(source.narrow(0, start, stop - start))
    elif counted or not _copy_units(target, source, starts, stops):
        rows = take_rows(starts, stops)
        assert not isinstance(rows, slice), "several runs"
        index = torch.from_numpy(rows)
        picked = source.index_select(0, index.to(source.device)).to(target.device)
        target.index_copy_(0, index.to(target.device), picked)


def _copy_units(target: torch.Tensor, source: torch.Tensor, starts: Ids, stops: Ids) -> bool:
    """Do the same for ranges of one length, at multiples of it. Return whether the tensors and ranges are such."""
    size = int(stops[0] - starts[0])
    into, units = units_of(target, size), units_of(source, size)
    at = starts // size
    if into is None or units is None or (stops - starts != size).any() or (at * size != starts).any():
        return False
    into[at] = units.take(at)
    return True


def copy_runs(target: torch.Tensor, source: torch.Tensor, starts: Ids, stops: Ids) -> None:
    """Queue target[start:stop] = source[start:stop] for several ranges, in three calls altogether."""
    bounds = np.stack([starts, stops], 1).reshape(-1)
    sizes = np.diff(bounds, prepend=0, append=target.shape[0]).tolist()
    torch._foreach_copy_(
        torch.split(target, sizes)[1::2], torch.split(source, sizes)[1::2], non_blocking=True
    )


def equal(live: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors on GPUs have the values of others on the host. NaN never does.

    One transfer for all, if they are of one dtype and on one GPU.
    """
    kinds = {(tensor.dtype, tensor.device) for tensor in live}
    if len(kinds) > 1:
        return all(equal([a], [b]) for a, b in zip(live, saved, strict=True))
    there = torch.cat([tensor.detach().reshape(-1) for tensor in live]).cpu()
    parts = torch.split(there, [tensor.numel() for tensor in live])
    return all(torch.equal(part, b.reshape(-1)) for part, b in zip(parts, saved, strict=True))
