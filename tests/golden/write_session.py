"""Write a small store with a session: `python -m tests.golden.write_session FOLDER ARENAS`.

It has eight shards. The state is a table whose rows change from step to step, so that the steps of the saved copies
show in their values. The store has a snapshot of step 3, and all of step 6, sealed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import scarctl

SHARDS = 8
ROWS = {"table": 2, "head": 1}
SNAPSHOT, NEWEST = 3, 6

State = dict[str, NDArray[np.float64]]


def state_of(step: int) -> State:
    """Return the state after `step` iterations."""
    state = {"table": np.zeros((32, 4)), "head": np.zeros((3, 2))}
    for one in range(step):
        advance(state, one)
    return state


def advance(state: State, step: int) -> None:
    """Change all of the head and a third of the table."""
    state["head"] += step + 1
    state["table"][step % 3 :: 3] += step + 1


def attach(state: State, folder: Path, arenas: Path) -> scarctl.Session:
    """Attach the session of this store."""
    arenas.mkdir(exist_ok=True)
    return scarctl.attach(
        state,
        store=folder,
        interval=1,
        partitioning=scarctl.Partitioning(shards=SHARDS, rows=ROWS),
        settings=scarctl.Settings(daemon=False, arena_dir=str(arenas)),
    )


def train(session: scarctl.Session, state: State, first: int, last: int) -> None:
    """Train iterations `first` to `last` - 1, each with a partial checkpoint."""
    for step in range(first, last):
        advance(state, step)
        session.step()
        session.checkpoint(wait=True)


def main(folder: Path, arenas: Path) -> None:
    """Write the store."""
    state = state_of(0)
    session = attach(state, folder, arenas)
    session.resume()
    train(session, state, 0, SNAPSHOT)
    session.snapshot("first")
    train(session, state, SNAPSHOT, NEWEST)
    session.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("arenas", type=Path)
    given = parser.parse_args()
    main(given.folder, given.arenas)
