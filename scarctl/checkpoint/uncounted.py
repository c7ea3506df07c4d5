"""Find writes to parameters that torch does not count: through `.data`, or to a part of a sharded tensor.

Between the end of a step and the next step only the loop itself can change parameters. So right before the next step
the copies equal the live values, unless the loop had replaced the values when one was made.
"""

from __future__ import annotations

import logging
from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

from scarctl.checkpoint.live_state import LiveState
from scarctl.util.arrays import Ids

log = logging.getLogger("scarctl")

_PARTITIONS = 8
"""Most partitions that are compared until the first write is found."""
_BYTES = 1 << 20
"""Most bytes of these partitions. The first is always compared."""


class Uncounted:
    """Compares a few copies of each checkpoint; after the first write found, all of them."""

    def __init__(self) -> None:
        self._found = False

    def written(self, live: LiveState, ids: Ids, written: Set[int]) -> Set[int]:
        """Return groups whose parameter differs from the newest copies. ids: the partitions just copied, ascending.

        written: groups that are copied again anyway.
        """
        mine = ids[_are_parameters(live, ids, written)]
        looked_at = mine if self._found else _few(live, mine)
        differing = _differing(live, looked_at)
        if differing.size and not self._found:
            self._found = True
            log.warning(
                "%s was written between two steps through .data, which torch does not count: from now on every copy is "
                "compared before the next step, and repeated if it differs",
                live.layout.name(int(differing[0])),
            )
            differing = _differing(live, mine)
        return set(live.layout.group_of(differing).tolist())

    def misses(self, live: LiveState) -> bool:
        """Return whether a parameter differs from its newest copy. False until the first such write is found."""
        everything = np.arange(live.layout.partitions)
        return self._found and bool(
            _differing(live, everything[_are_parameters(live, everything, set())]).size
        )


def _are_parameters(live: LiveState, ids: Ids, but: Set[int]) -> NDArray[np.bool_]:
    wanted = live.parameters.copy()
    wanted[list(but)] = False
    taken: NDArray[np.bool_] = wanted[live.layout.group_of(ids)]
    return taken


def _differing(live: LiveState, ids: Ids) -> Ids:
    if live.equal(ids):
        return ids[:0]
    # NaN does not count as a difference: such values were left out of the copy, and counted.
    differing: Ids = ids[live.distances_at(ids) > 0]
    return differing


def _few(live: LiveState, ids: Ids) -> Ids:
    if ids.size > _PARTITIONS:
        ids = ids[np.linspace(0, ids.size - 1, _PARTITIONS).astype(np.int64)]
    total = np.cumsum(live.layout.partition_bytes[ids])
    few: Ids = ids[(total <= _BYTES) | (np.arange(ids.size) == 0)]
    return few
