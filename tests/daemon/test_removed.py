"""Test dead runs whose store is removed: their saver ends and says why, and a new store has nothing of them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from scarctl.arena.stale import survey
from scarctl.daemon.server import Daemon
from scarctl.store import Store
from tests.daemon.trainer import Trainer, assert_sound, idle, orphans
from tests.support.waiting import wait_until

pytestmark = pytest.mark.leaves_arena


@pytest.fixture
def dead(daemon: Daemon, arena_dir: Path, tmp_path: Path) -> Trainer:
    """Return a dead run whose newest copies wait for its store, which is away."""
    trainer = Trainer(tmp_path / "store", arena_dir)
    trainer.save_durably(1)
    (tmp_path / "store").rename(tmp_path / "away")
    trainer.save(trainer.everything, 2)
    trainer.die()
    return trainer


def test_made_again(dead: Trainer, arena_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Store.create(str(tmp_path / "new"), shards=3).close()
    (tmp_path / "new").rename(tmp_path / "store")
    shutil.rmtree(tmp_path / "away")
    wait_until(lambda: dead.phases() == [])
    trainer = Trainer(tmp_path / "store", arena_dir)
    trainer.save_durably(1)
    assert "another store was made in the place of the one" in caplog.text
    assert "the memory of its dead run was removed" in caplog.text
    assert not (dead.folder / dead.store.run_id).exists()
    trainer.save_durably(2)
    assert trainer.saver.failure is None
    trainer.close()
    assert set(trainer.stored()[0]) == {2}
    assert_sound(tmp_path / "store")
    assert orphans(tmp_path / "store") == 0


def test_deleted(dead: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its memory stays for a day, in case a copy of the store is put back."""
    shutil.rmtree(tmp_path / "away")
    wait_until(lambda: idle(dead.folder))
    assert "the store was deleted" in caplog.text
    (left,) = survey(dead.folder)
    assert left.pending_partitions == dead.layout.partitions


def test_away(dead: Trainer, tmp_path: Path) -> None:
    """A store that was moved, or is not mounted, is waited for."""
    (tmp_path / "store").mkdir()
    time.sleep(1.0)
    assert dead.phases() == ["orphaned"]
    (left,) = survey(dead.folder)
    assert left.gone is None
    (tmp_path / "store").rmdir()
    (tmp_path / "away").rename(tmp_path / "store")
    wait_until(lambda: idle(dead.folder))
    assert set(dead.stored()[0]) == {2}
    assert_sound(tmp_path / "store")
