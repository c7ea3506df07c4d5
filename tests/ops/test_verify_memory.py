"""Test comparing copies in memory with the store while their writer continues: only damage is called damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.cli.checkpoints import memory_lines
from scarctl.ops import verify_memory as module
from scarctl.ops.verify_memory import MemoryCheck, verify_memory
from scarctl.store import Store
from tests.daemon.rig import Rig, fill

FEW = np.arange(3)


@pytest.fixture
def rig(tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Yield a run whose every partition is in memory and, in the same version, in the store."""
    made = Rig(tmp_path / "store", arena_dir)
    monkeypatch.setattr(module, "arena_folder", lambda base, run: made.arena.folder)
    made.persist(made.save(made.everything, 1))
    yield made
    made.close()


def check(rig: Rig) -> MemoryCheck:
    (found,) = verify_memory(Store.open(str(rig.store.root)), None)
    return found


def meanwhile(monkeypatch: pytest.MonkeyPatch, what: str, change: Callable[[], Any]) -> None:
    """Make `change` once, when the check first calls `what`."""
    real, left = getattr(module, what), [change]

    def changing(*arguments: Any) -> Any:
        if left:
            left.pop()()
        return real(*arguments)

    monkeypatch.setattr(module, what, changing)


def test_changed_bytes_are_damage(rig: Rig) -> None:
    assert (check(rig).compared, check(rig).damaged) == (rig.layout.partitions, 0)
    rig.arena.rows(0, 0)[0] ^= 1
    found = check(rig)
    assert (found.compared, found.damaged, found.names) == (rig.layout.partitions, 1, (rig.layout.name(0),))


@pytest.mark.parametrize("moment", ["pieces", "checksums"])
def test_a_copy_that_is_under_way_is_no_damage(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def begin() -> None:
        rig.arena.slot.begin(FEW)
        fill(rig.arena, FEW, 2)

    meanwhile(monkeypatch, moment, begin)
    found = check(rig)
    rig.arena.slot.end(FEW, rig.version(2), 9)
    assert (found.damaged, found.compared) == (0, rig.layout.partitions - len(FEW))


def test_the_same_version_copied_again_is_no_damage(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, "pieces", lambda: [rig.copy(FEW, 1, value=2) for _ in range(2)])
    assert check(rig).damaged == 0


def test_a_record_that_comes_while_older_ones_are_read_is_no_damage(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is the same, with other values: the read copies have the checksums of the earlier record."""
    number = rig.save(FEW, 1, value=2)
    real = Store.state

    def state(self: Store, *arguments: Any, **options: Any) -> Any:
        found = real(self, *arguments, **options)
        rig.persist(number)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Store, "state", state)
        found = check(rig)
    assert (found.damaged, found.compared) == (0, rig.layout.partitions - len(FEW))
    assert (check(rig).damaged, check(rig).compared) == (0, rig.layout.partitions)


def test_nothing_compared_is_not_called_intact(rig: Rig) -> None:
    assert memory_lines([check(rig)])[0].endswith("compared: intact")
    rig.persist(rig.save(rig.everything, 2))
    rig.copy(rig.everything, 3)
    (line,) = memory_lines([check(rig)])
    assert line.endswith(
        f"0 partitions compared, {rig.layout.partitions} newer than the store: nothing to compare"
    )
