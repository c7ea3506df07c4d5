"""Read from a store at which step each partition was saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scarctl.state.version import step_of
from scarctl.store import Store, verify


def stored_steps(store: Path) -> NDArray[np.int64]:
    """Return the step of every partition's newest copy, -1 without one. The store must verify."""
    opened = Store.open(str(store))
    assert verify(opened, read_data=True).problems == []
    states = [opened.state(shard) for shard in opened.shards()]
    opened.close()
    steps = np.zeros(sum(len(state.ids) for state in states), dtype=np.int64)
    for state in states:
        steps[state.ids] = step_of(state.version)
    return steps
