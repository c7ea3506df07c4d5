"""Stop all ranks of one host after the same step, when a signal ends the job.

A signal reaches ranks some milliseconds apart, and a step may end in between: then one rank has made one step more. Its
gradients were exchanged with all ranks, so the others can make that step, too, without anything of a rank that waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.config import SessionSettings
from scarctl.errors import ScarError
from scarctl.store import Store

SECONDS = 0.2
"""Seconds for which a rank waits for another one's step to end."""
_PAUSE = 0.01


def another_is_ahead(store: Store, settings: SessionSettings, shards: Sequence[int], step: int) -> bool:
    """Return whether another rank on this host finishes the step after `step`, now or in a moment.

    shards: those of the other ranks. What cannot be read counts as not there.
    """
    with contextlib.ExitStack() as opened:
        arenas = []
        for shard in shards:
            with contextlib.suppress(ScarError, OSError):
                run_id = store.of_shard(shard).run_id
                arena = Arena.share(arena_folder(settings.arena_dir, run_id), run_id=run_id)
                if arena is not None:
                    opened.callback(arena.close)
                    arenas.append(arena)
        deadline = time.monotonic() + SECONDS
        while arenas and time.monotonic() < deadline:
            if any(arena.head_step == step + 1 for arena in arenas):
                return True
            time.sleep(_PAUSE)
    return False
