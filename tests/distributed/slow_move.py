"""Train as `tests.distributed.jobs`, but move memory between hosts so slowly that it takes longer than ranks wait."""

from __future__ import annotations

import time
from typing import Any

from scarctl.arena.transfer import Outgoing
from scarctl.distributed import collectives, host_memory
from tests.distributed import jobs

PATIENCE = 15.0


def train(
    rank: int, world: int, kind: str, folder: str, steps: int, options: dict[str, Any]
) -> dict[str, Any]:
    """See `tests.distributed.jobs.train`. Each arena takes twice as long as ranks wait for each other."""
    collectives.PATIENCE = PATIENCE
    read = Outgoing.read

    def slowly(self: Outgoing, at: int, size: int) -> Any:
        time.sleep(2 * PATIENCE * size / self.size)
        return read(self, at, size)

    Outgoing.read = slowly  # type: ignore[method-assign]
    host_memory.PIECE = 4096
    host_memory._STRETCH = 2 * 4096
    return jobs.train(rank, world, kind, folder, steps, options)
