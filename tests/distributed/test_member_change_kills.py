"""Test a new member killed at every point of taking over: no saved state is lost, and the member starts again."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from scarctl.state.version import step_of
from scarctl.store import Store, newest_topology, verify
from tests.support.divided import run_member, start

pytestmark = [pytest.mark.slow, pytest.mark.leaves_arena]

POINTS = [
    ("scarctl.store.members.create_topology", "before"),
    ("scarctl.store.members.create_topology", "after"),
    ("scarctl.distributed.heir.fence", "before"),
    ("scarctl.distributed.heir.fence", "after"),
    ("scarctl.recovery.reshard.Parts.copy_into", "before"),
    ("scarctl.recovery.reshard.Parts.copy_into", "after"),
    ("scarctl.checkpoint.engine.Engine.start", "before"),
    ("scarctl.checkpoint.engine.Engine.start", "after"),
    ("scarctl.session.saving.Saving.seal", "before"),
    ("scarctl.session.saving.Saving.seal", "after"),
]
ROWS = [3] * 12 + [4] * 12


def prepared(store: Path | str, **options: Any) -> None:
    for number in range(2):
        run_member(store, number, 2, 3 + number, **options)


def killed(store: Path | str, number: int, count: int, folder: Path, **options: Any) -> None:
    program = start(store, number, count, 0, folder / "err", **options)
    assert program.wait(120) == -signal.SIGKILL, (folder / "err").read_text()


def all_rows(store: Path | str, count: int, **options: Any) -> list[int]:
    """Start all members, and return the step of every row."""
    return [step for number in range(count) for step in run_member(store, number, count, 0, **options)[1]]


@pytest.mark.parametrize(
    ("kill", "when"),
    [
        pytest.param(*point, marks=[pytest.mark.long] * (number % 4 != 1))
        for number, point in enumerate(POINTS)
    ],
)
def test_it_starts_again(kill: str, when: str, tmp_path: Path) -> None:
    """Member 1 of 3 takes over from both of the two, and is killed twice at the same point."""
    store = tmp_path / "s"
    prepared(store)
    for _ in range(2):
        killed(store, 1, 3, tmp_path, replaces=2, kill=kill, when=when)
        if when == "after" and kill.endswith(("create_topology", "Engine.start", "Saving.seal")):
            break  # it does not reach that point again
    found = [run_member(store, number, 3, 2, replaces=2)[1] for number in (1, 2, 0)]
    assert found == [ROWS[8:16], ROWS[16:], ROWS[:8]]
    assert [run_member(store, number, 3, 0)[1] for number in range(3)] == [
        [5] * 8,
        [5] * 4 + [6] * 4,
        [6] * 8,
    ]
    assert verify(Store.open(store), read_data=True).problems == []


@pytest.mark.parametrize(("kill", "when"), POINTS[1::2])
@pytest.mark.long
def test_the_members_before_can_come_back(kill: str, when: str, tmp_path: Path) -> None:
    store = tmp_path / "s"
    prepared(store)
    killed(store, 1, 3, tmp_path, replaces=2, kill=kill, when=when)
    assert all_rows(store, 2, replaces=3, after=2) == ROWS
    topology = newest_topology(Store.open(store))
    assert topology is not None
    assert (topology.world, topology.epoch) == (2, 3)


def test_an_old_one_is_killed_and_its_memory_on_this_host_is_taken_over(tmp_path: Path) -> None:
    """Its newest steps are in shared memory only."""
    point = "scarctl.store.writer.StoreWriter.commit"
    for attempt in range(5):
        store = tmp_path / str(attempt)
        prepared(store)
        program = start(store, 1, 2, 9, tmp_path / "err", kill=point, fraction=1.0, daemon=False)
        assert program.wait(120) == -signal.SIGKILL, (tmp_path / "err").read_text()
        assert step_of(Store.open(store).state(1).version).max() == 4
        # The first member of the new number that starts on this host brings them into the store.
        assert run_member(store, 0, 3, 0, replaces=2)[1] == ROWS[:8]
        found = all_rows(store, 3)
        assert found[:12] == ROWS[:12]
        if max(found[12:]) > 4:
            return
        # A copy under way when it died is torn: its rows are as the store had them. On a busy machine that may be all.
    pytest.fail("memory never had a newer row")


@pytest.mark.parametrize("lost", [True, False])
def test_a_rollback_takes_over_what_was_sealed(tmp_path: Path, arena_dir: Path, lost: bool) -> None:
    """Or what memory has as a whole, which is sealed first. lost: memory goes with its process."""
    store = tmp_path / "s"
    prepared(store)
    # In memory all of its twelve rows are of two more steps; in the store perhaps some.
    point = "scarctl.session.ending.LastState.save"
    program = start(store, 1, 2, 2, tmp_path / "err", kill=point, fraction=1 / 12, daemon=False)
    assert program.wait(120) == -signal.SIGKILL, (tmp_path / "err").read_text()
    if lost:
        for folder in filter(Path.is_dir, arena_dir.glob("scarctl-*/*")):
            shutil.rmtree(folder)
    options: dict[str, Any] = {"replaces": 2, "daemon": False}
    sealed = ROWS if lost else ROWS[:12] + [6] * 12
    assert all_rows(store, 3, mode="rollback", **options) == sealed
    assert lost or step_of(Store.open(store).state(1).version).max() > 4, "there were newer copies"
    assert all_rows(store, 2, replaces=3, after=2, daemon=False) == sealed
