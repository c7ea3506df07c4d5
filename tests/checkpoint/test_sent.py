"""Test how far memory is known to be from the store, against true distances and through every fate of a request."""

from __future__ import annotations

import numpy as np
import torch

from scarctl.arena.arena import Arena
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.sent import _UNKNOWN, Sent
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import pack
from tests.daemon.rig import acknowledge

ROWS = 4
ALL = np.arange(ROWS + 1)


class Run:
    """A table and a scalar, a partition for each row, whose first whole state the store has."""

    def __init__(self, *, exact: bool = False) -> None:
        specs = (TensorSpec("", "F32", (ROWS, 2)), TensorSpec("m", "F32", (ROWS, 2)))
        layout = build_layout(
            [("w", "parameter", specs), ("s", "parameter", (TensorSpec("", "F32", ()),))], rows={"w": 1}
        )
        self.arena, self.step = Arena.anonymous(layout), 1
        self.w, self.slot, self.s = torch.zeros(ROWS, 2), torch.zeros(ROWS, 2), torch.zeros(())
        self.live = LiveState(layout, [[self.w, self.slot], [self.s]], self.arena)
        self.sent = Sent(self.arena, "l2", exact=exact)
        self.live.save(ALL, self.arena.slot, pack(1, 1), 1)
        self.sent.asked(ALL, pack(1, 1))
        self.saved(ALL)

    def move(self, *ids: int, by: float = 1.0) -> None:
        """Take a step that moves these partitions, and copy them into memory."""
        for i in ids:
            (self.w[i] if i < ROWS else self.s[...])[..., :1].add_(by) if i < ROWS else self.s.add_(by)
        self.step += 1
        moved = np.array(sorted(ids))
        self.sent.moved(moved, self.live.distances()[moved])
        self.live.save(moved, self.arena.slot, pack(1, self.step), self.step)

    def saved(self, ids: np.ndarray) -> None:
        """Note that the store has the copies of these partitions."""
        acknowledge(self.arena, ids)

    def distances(self) -> list[float]:
        return list(map(float, self.sent.distances(self.arena.slot)))

    def unsaved(self) -> list[float]:
        return list(map(float, self.sent.unsaved()))


def test_movements_add_up_until_the_store_gets_the_copy() -> None:
    run = Run()
    run.move(1, 4)
    run.move(1, by=-0.5)
    assert run.distances() == [0, 1.5, 0, 0, 1]
    run.sent.asked(np.array([1]))
    assert run.distances() == [0, 0, 0, 0, 1]
    run.move(1, by=2)
    assert run.distances() == [0, 2, 0, 0, 1]
    run.sent.asked(np.array([1, 4]), pack(1, run.step))
    assert run.distances() == [0] * 5
    assert set(run.sent.version.tolist()) == {pack(1, run.step)}, "of a whole state"


def test_exact_distances_are_those_of_what_was_asked_for() -> None:
    run = Run(exact=True)
    run.move(1, 4)
    run.move(1, by=-0.5)
    assert run.distances() == [0, 0.5, 0, 0, 1]
    run.sent.asked(np.array([1, 4]))
    run.move(1, by=-0.5)
    run.move(4, by=2)
    assert run.distances() == [0, 0.5, 0, 0, 2]
    run.sent.forget()
    assert run.distances() == [0, _UNKNOWN, 0, 0, _UNKNOWN]


def test_what_is_pending_at_the_beginning_is_unknown() -> None:
    run = Run()
    run.move(3)
    assert Sent(run.arena, "l2", exact=False).distances(run.arena.slot).tolist() == [0, 0, 0, _UNKNOWN, 0]


def test_what_waits_for_the_store_is_unsaved_until_it_is_durable() -> None:
    run = Run()
    run.move(1, by=3)
    run.sent.asked(np.array([1]))
    run.move(1)
    assert run.unsaved() == [0, 4, 0, 0, 0]
    run.saved(np.array([], np.int64))
    assert run.unsaved() == [0, 4, 0, 0, 0]
    run.sent.asked(np.array([1]))
    run.saved(np.array([1]))
    assert run.unsaved() == [0] * 5


def test_a_whole_state_that_is_durable_leaves_nothing_unsaved() -> None:
    """A copy is older than the state, because it has not changed since."""
    run = Run()
    run.move(1, by=3)
    run.move(2)
    run.sent.asked(np.array([1, 2]), pack(1, run.step))
    run.saved(np.array([1, 2]))
    assert run.unsaved() == [0] * 5
