"""Test training processes that die at unfavourable moments, and their successors: nothing is lost, no wait is long."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from scarctl.daemon import client, protocol
from scarctl.daemon import runs as runs_module
from scarctl.daemon.server import Daemon
from scarctl.errors import Contention
from tests.daemon.trainer import Trainer, assert_sound, many_tensors, orphans, status, wide_layout
from tests.support.waiting import wait_until

QUICK = 30.0
"""Seconds; less than the slow commits below take."""


class TestALongWrite:
    """A commit of minutes is put off for a process that needs the store now, and repeated later."""

    def test_a_new_process_does_not_wait_for_it(
        self, daemon: Daemon, arena_dir: Path, tmp_path: Path, slow: threading.Event
    ) -> None:
        trainer = Trainer(tmp_path / "store", arena_dir, shards=1, layout=many_tensors())
        trainer.save(trainer.everything, 1)
        time.sleep(0.3)
        trainer.die()
        started = time.monotonic()
        again = Trainer(tmp_path / "store", arena_dir, shards=1, layout=many_tensors())
        assert time.monotonic() - started < QUICK
        assert again.arena.pending().all()
        slow.set()
        again.drained()
        assert set(again.stored()[0]) == {1}
        again.close()
        assert_sound(tmp_path / "store")
        assert orphans(tmp_path / "store") == 0

    def test_a_large_tensor_is_put_off_in_the_middle(
        self, daemon: Daemon, arena_dir: Path, tmp_path: Path, slow: threading.Event
    ) -> None:
        layout = wide_layout(2048)  # 64 MiB in one run
        trainer = Trainer(tmp_path / "store", arena_dir, shards=1, layout=layout)
        trainer.save(trainer.everything, 1)
        time.sleep(0.3)
        started = time.monotonic()
        trainer.saver.stop()
        assert time.monotonic() - started < QUICK
        assert trainer.arena.pending().all()
        slow.set()
        trainer.saver.resume()
        trainer.drained()
        trainer.close()


@pytest.mark.leaves_arena
class TestDeath:
    def test_what_was_put_but_not_announced_becomes_durable(
        self, daemon: Daemon, arena_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The process was killed between the two, and the daemon has not yet looked on its own."""
        monkeypatch.setattr(runs_module, "_LOOK_SECONDS", 3600.0)
        trainer = Trainer(tmp_path / "store", arena_dir)
        trainer.save_durably(1)
        trainer.saver.notify = lambda: None  # type: ignore[method-assign]
        trainer.save(trainer.everything, 2, sealed=True)
        trainer.die()
        wait_until(lambda: status(daemon.folder)["runs"] == [])  # type: ignore[index]
        assert set(trainer.stored()[0]) == {2}
        assert not trainer.arena.waits

    def test_what_an_earlier_process_left_becomes_durable_when_the_next_dies_at_its_start(
        self, daemon: Daemon, trainer: Trainer
    ) -> None:
        trainer.save_durably(1)
        trainer.saver.stop()
        trainer.save(trainer.everything, 2, sealed=True)
        trainer.saver.close()
        trainer.arena.close()
        trainer.store.close()
        assert status(daemon.folder)["runs"] == []  # type: ignore[index]
        assert set(trainer.stored()[0]) == {1}
        with protocol.connect(daemon.folder, 10) as connection:
            client.request(connection, "claim", store=str(trainer.store.root))
        wait_until(lambda: status(daemon.folder)["runs"] == [])  # type: ignore[index]
        assert set(trainer.stored()[0]) == {2}
        assert not trainer.arena.waits


@pytest.mark.leaves_arena
def test_the_next_session_of_a_living_process_does_not_wait_for_the_farewell_to_be_read(
    daemon: Daemon, arena_dir: Path, tmp_path: Path, slow: threading.Event
) -> None:
    """The daemon is busy with a request of the previous session, which has closed its connection meanwhile."""
    trainer = Trainer(tmp_path / "store", arena_dir, shards=1, layout=many_tensors())
    trainer.save(trainer.everything, 1, sealed=True)
    control = trainer.saver._control
    assert control is not None
    protocol.send(control, {"v": protocol.VERSION, "op": "drain", "milliseconds": 60_000})
    trainer.saver.abandon()
    trainer.arena.close()
    trainer.store.close()
    assert trainer.phases() == ["attached"], "the request keeps the daemon from noticing"
    again = Trainer(tmp_path / "store", arena_dir, shards=1, layout=many_tensors())
    assert again.arena.pending().all(), "the write is put off"
    with pytest.raises(Contention, match="is saving to this store"):
        Trainer(tmp_path / "store", arena_dir, shards=1, layout=many_tensors())
    slow.set()
    again.drained()
    assert set(again.stored()[0]) == {1}
    again.close()
    assert_sound(tmp_path / "store")
