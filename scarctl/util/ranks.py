"""Ask torch whether this process is one of several ranks, without the code for several ranks."""

from __future__ import annotations

from torch import distributed as dist


def is_rank() -> bool:
    """Return whether this process has joined a process group, perhaps as its only rank."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Return the number of ranks that train together; 1 without `torch.distributed`."""
    return dist.get_world_size() if is_rank() else 1
