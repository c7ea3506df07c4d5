"""Test a session that resumes from fetched memory."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scarctl
from scarctl.arena.arena import Arena
from tests.peers.lending import MEMBER, sites
from tests.support.process import Forked

pytestmark = pytest.mark.leaves_arena
State = dict[str, np.ndarray[Any, Any]]


def attached(store: Path, base: str) -> tuple[scarctl.Session, State]:
    """Return a member's session and its state."""
    state = {"rows": np.zeros((25, 1024), np.float32), "bias": np.zeros(7)}
    settings = scarctl.Settings(arena_dir=base, daemon=False, timeout=30.0)
    member = (MEMBER, MEMBER + 1)
    return scarctl.attach(state, store=store, member=member, interval=5, settings=settings), state


def train(session: scarctl.Session, state: State, steps: int) -> None:
    """Add to each row another number in each step: which of them were added shows in the values."""
    for _ in range(steps):
        step = session.head_step
        for values in state.values():
            values += np.float32(1 + step % 7)
            values[step % len(values)] *= 0.5
        session.step()


def test_it_is_bit_for_bit(tmp_path: Path) -> None:
    """The store has step 5. Step 13 was flushed, and waits, and the process was killed. Nobody saves it."""
    with sites(tmp_path, "east", "west", "calm") as (east, west, calm):
        store, away = east.store, tmp_path / "away"

        def body(tell: Any) -> None:
            session, state = attached(store, east.base)
            session.resume()
            train(session, state, 5)
            session.checkpoint(full=True, wait=True)
            store.rename(away)
            train(session, state, 8)
            assert session.flush()
            tell("flushed")
            signal.pause()

        with Forked(body) as child:
            child.expect("flushed", 60.0)
            child.signal(signal.SIGKILL)
            child.wait()
        away.rename(store)
        arena = Arena.share(east.place, run_id=east.view().run_id)
        assert arena is not None
        assert arena.lacking()
        assert west.fetch(east.listen()) is not None
        session, state = attached(store, west.base)
        resumed = session.resume()
        assert (resumed.step, resumed.consistent, resumed.reasons) == (13, True, ())
        train(session, state, 4)
        session.close()
        session, expected = attached(tmp_path / "calm-store", calm.base)
        train(session, expected, 17)
        session.close()
        assert {name: array.tobytes() for name, array in state.items()} == {
            name: array.tobytes() for name, array in expected.items()
        }
