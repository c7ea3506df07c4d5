"""Provide runs whose values move as a test determines."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import scarctl
from scarctl.arena.folder import arena_folder
from scarctl.config import grouped
from scarctl.store import Store
from tests.support.process import Forked
from tests.support.training import drained

ROWS, INTERVAL = 32, 8
ROUNDING = 2.0**-8
"""Rounding of a movement in bfloat16."""


class Moving:
    """Values that move as a test determines, all saved in every eighth iteration by default."""

    def __init__(
        self, store: Path, law: Callable[[NDArray[Any], int], object], dtype: Any = np.float64, **options: Any
    ) -> None:
        self.law = law
        self.state = {"x": np.ones((ROWS, 4), dtype=dtype), "count": np.arange(6)}
        settings = {"interval": INTERVAL, "fraction": 1.0, "shards": 4, "rows": {"x": 1}, "extrapolate": True}
        self.session = scarctl.attach(self.state, store=store, **grouped(**(settings | options)))

    @property
    def x(self) -> NDArray[Any]:
        return self.state["x"]

    @property
    def factor(self) -> float:
        engine = self.session._engine
        assert engine is not None
        assert engine.trend is not None
        return float(engine.trend.fits.factor[0])

    def train(self, until: int) -> None:
        for step in range(self.session.head_step + 1, until + 1):
            self.law(self.x, step)
            self.session.step()
            self.session._finish()
            drained([self.session])

    def lost(self, *shards: int) -> NDArray[np.bool_]:
        """Return a mask of the rows in these shards."""
        engine = self.session._started()
        group = next(g for g, group in enumerate(engine.layout.groups) if group.name == "x")
        mine = slice(int(engine.layout.base[group]), int(engine.layout.base[group + 1]))
        return np.isin(engine.shard_of[mine], shards)


def drift(x: NDArray[Any], step: int) -> None:
    x += 1


def shrink(x: NDArray[Any], step: int) -> None:
    x *= 0.95


def swing(x: NDArray[Any], step: int) -> None:
    """Move there and back between two checkpoints."""
    x += 1.0 if step // INTERVAL % 2 else -1.0


def killed(store: Path, until: int) -> None:
    """Run until kill -9 some iterations after the last checkpoint, of which half is saved then."""

    def body(tell: Callable[[str], None]) -> None:
        run = Moving(store, drift, fraction=0.5, policy="round", flush_on_signal=False)
        run.train(until)
        tell("there")
        os.kill(os.getpid(), signal.SIGKILL)

    with Forked(body) as child:
        child.expect("there")
        assert child.wait() == -signal.SIGKILL


def folder_of(store: Path, arena_dir: Path) -> Path:
    return arena_folder(str(arena_dir), Store.open(store).run_id)
