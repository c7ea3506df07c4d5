"""Run a member of a store that is to be killed, with a daemon that lends its memory, as a program:

    python -m tests.peers.fetched_member STORE BASE MIB STEPS START SECRET

It trains, brings its step into memory, prints the daemon's port, and waits.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import scarctl
from scarctl.daemon.saver import DaemonSaver

MEMBER = (1, 3)


def state_of(mib: float) -> dict[str, np.ndarray[Any, Any]]:
    """Return a state of so many MiB."""
    return {"rows": np.zeros((max(1, int(mib * 256)), 1024), np.float32), "bias": np.zeros(7)}


def attached(store: Path | str, base: str, state: Any, *, daemon: bool) -> scarctl.Session:
    return scarctl.attach(
        state,
        store=store,
        member=MEMBER,
        interval=5,
        settings=scarctl.Settings(arena_dir=base, daemon=daemon, timeout=30.0),
    )


def train(session: scarctl.Session, state: dict[str, np.ndarray[Any, Any]], steps: int) -> None:
    """Add to each row another number in each step: which of them were added shows in the values."""
    for _ in range(steps):
        step = session.head_step
        for values in state.values():
            values += np.float32(1 + step % 7)
            values[step % len(values)] *= 0.5
        session.step()


def main(store: str, base: str, mib: str, steps: str, start: str, secret: str) -> None:
    state = state_of(float(mib))
    session = attached(store, base, state, daemon=True)
    session.resume()
    train(session, state, int(steps))
    assert session.flush()
    engine = session._engine
    assert engine is not None
    assert isinstance(engine.saver, DaemonSaver)
    print(engine.saver.admit(start, secret, "127.0.0.1", None), flush=True)  # noqa: T201
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
