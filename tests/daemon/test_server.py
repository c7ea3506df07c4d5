"""Test the daemon in this process: every operation, in right and wrong order, and peers that send garbage."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.arena.folder import arena_folder, host_folder
from scarctl.daemon import client, protocol
from scarctl.daemon.server import Daemon
from scarctl.errors import Contention, NoStore, ScarError, Unavailable, UsageError
from scarctl.state.layout import build_layout
from scarctl.store import Store, open_writer
from scarctl.store.store import Part
from tests.daemon.trainer import Trainer, assert_sound, orphans, status, stop
from tests.support.waiting import wait_until

NO_PROCESS = 0x7FFFFFF0


@pytest.fixture
def base(arena_dir: Path) -> Path:
    return arena_dir


def refused(connection: socket.socket, op: str, error: type[ScarError] = UsageError, **fields: Any) -> str:
    """Return the kind of the error in the daemon's answer."""
    with pytest.raises(error) as caught:
        client.request(connection, op, **fields)
    return caught.value.kind


class TestOperations:
    def test_a_whole_run(self, daemon: Daemon, trainer: Trainer, tmp_path: Path) -> None:
        trainer.save_durably(1, sealed=True)
        trainer.save(trainer.everything[::2], 2)
        trainer.drained()
        steps, content = trainer.stored()
        assert set(steps[::2]) == {2} == set(content[::2])
        assert set(steps[1::2]) == {1} == set(content[1::2])
        told = status(daemon.folder)
        assert told is not None
        (run,) = told["runs"]
        assert (run["pid"], run["phase"], run["id"]) == (os.getpid(), "attached", trainer.store.run_id)
        assert (run["head_step"], run["durable_step"], run["oldest_durable_step"]) == (2, 2, 1)
        assert (run["queued_bytes"], run["errors"], run["peers"], run["last_error"]) == (0, 0, [], None)
        assert run["saved_bytes"] > trainer.layout.nbytes
        assert run["bytes_per_second"] > 0
        assert [s["shard"] for s in run["shards"]] == [0, 1, 2]
        assert {s["durable_step"] for s in run["shards"]} == {2}
        assert {s["oldest_durable_step"] for s in run["shards"]} == {1}
        trainer.close()
        assert status(daemon.folder)["runs"] == []  # type: ignore[index]
        with open_writer(Store.open(str(tmp_path / "store")), layout=trainer.layout):
            pass  # the store is free as soon as the run is closed

    def test_a_ranks_shard_is_shown_by_its_number(self, daemon: Daemon, base: Path, tmp_path: Path) -> None:
        trainer = Trainer(tmp_path / "store", base, shards=1, part=Part(5))
        trainer.save_durably(2)
        (run,) = status(daemon.folder)["runs"]  # type: ignore[index]
        assert run["shard"] == 5
        assert run["shards"] == [{"shard": 5, "durable_step": 2, "oldest_durable_step": 2}]
        trainer.close()

    def test_a_store_that_somebody_else_writes_to_is_refused(
        self, daemon: Daemon, base: Path, tmp_path: Path
    ) -> None:
        held = Store.create(tmp_path / "store", shards=3)
        held.lock()
        with pytest.raises(Contention):
            Trainer(tmp_path / "store", base)
        held.close()
        Trainer(tmp_path / "store", base).close()

    def test_wrong_orders_and_wrong_values_are_refused(
        self, daemon: Daemon, connection: socket.socket, tmp_path: Path
    ) -> None:
        for op in ("open", "drain", "pause", "resume", "roll_back", "close"):
            assert refused(connection, op, milliseconds=1, seq=1) == "not-claimed"
        assert refused(connection, "unheard-of") == "usage"
        assert refused(connection, "watch", run="x") == "not-claimed"
        assert refused(connection, "ask", store="x", request=None) == "usage"
        for store in ("", 7, None, [], str(tmp_path / "\0"), "s3://bucket/x?y"):
            assert refused(connection, "claim", store=store) == "usage"
        assert refused(connection, "claim", store="memory://x/y", options=[1]) == "usage"
        assert refused(connection, "claim", NoStore, store=str(tmp_path / "missing")) == "no-store"
        assert refused(connection, "claim", store="\ud800") == "usage", "half a character"
        for seconds in (-1, 1.5, "1", None, True, 1 << 60):
            assert refused(connection, "hold", seconds=seconds) == "usage"
        store = Store.create(tmp_path / "store")
        client.request(connection, "claim", store=str(store.root))
        assert refused(connection, "claim", store=str(store.root)) == "usage"
        assert refused(connection, "open", ScarError) == "corruption", "there is no arena"
        assert refused(connection, "drain", Unavailable, milliseconds=1) == "unavailable"
        for seq in (None, [], {"0": 1}, "1", True, 1.5, -1, 1 << 63):
            assert refused(connection, "roll_back", seq=seq) == "usage"
        assert refused(connection, "roll_back", seq=1) == "usage", "nothing is open"
        assert refused(connection, "resume") == "usage", "nothing is open"
        for version in (0, protocol.VERSION + 1, "1", None, 1e300, "x" * 10000):
            protocol.send(connection, {"v": version, "op": "status"})
            assert protocol.check_reply(protocol.receive(connection))["runs"][0]["store"] == str(store.root)
            protocol.send(connection, {"v": version, "op": "hold", "seconds": 1})
            with pytest.raises(UsageError) as caught:
                protocol.check_reply(protocol.receive(connection))
            assert caught.value.kind == "daemon-version"
        client.request(connection, "close")
        assert client.request(connection, "status")["runs"] == []

    def test_rolled_back_what_came_later_is_gone(
        self, daemon: Daemon, trainer: Trainer, tmp_path: Path
    ) -> None:
        trainer.save_durably(1, sealed=True)
        seq = trainer.store.state(0).seq
        trainer.save_durably(2)
        epoch = trainer.arena.epoch
        with pytest.raises(UsageError, match="pause"):
            trainer.saver.roll_back(seq)
        trainer.saver.stop()
        trainer.saver.roll_back(seq)
        assert trainer.arena.epoch > epoch
        assert set(trainer.stored()[0]) == {1}
        trainer.arena.durable[:] = trainer.arena.version
        trainer.saver.resume()
        trainer.close()
        assert_sound(tmp_path / "store")

    def test_a_failure_for_good_is_told_and_shown(
        self, daemon: Daemon, trainer: Trainer, tmp_path: Path
    ) -> None:
        trainer.save_durably(1)
        # Another host takes over, which this host's lock does not show.
        (tmp_path / "store" / ".lock").unlink(missing_ok=True)
        for path in (tmp_path / "store").iterdir():
            if path.is_file() and path.name != "scarctl.json":
                path.unlink()
        other = Store.open(str(tmp_path / "store"))
        with open_writer(other, layout=trainer.layout):
            trainer.save(trainer.everything, 2)
            failure = wait_until(lambda: trainer.saver.failure)
        assert failure.kind == "fenced"
        started = time.monotonic()
        assert not trainer.saver.drain(30)
        assert time.monotonic() - started < 25
        (run,) = status(daemon.folder)["runs"]  # type: ignore[index]
        assert run["stopped"]
        assert run["last_error"]
        trainer.close(durable=False)
        shutil.rmtree(trainer.arena.folder)


class TestDeath:
    @pytest.mark.leaves_arena
    def test_a_death_that_only_the_process_number_tells(self, daemon: Daemon, trainer: Trainer) -> None:
        trainer.save(trainer.everything, 1)
        run = daemon.runs.known(trainer.store.run_id)
        assert run is not None
        run.pid = NO_PROCESS  # a forked child keeps the connection open
        wait_until(lambda: status(daemon.folder)["runs"] == [])  # type: ignore[index]
        assert set(trainer.stored()[0]) == {1}
        trainer.die()

    @pytest.mark.leaves_arena
    def test_an_arena_that_vanishes_harms_nobody(self, daemon: Daemon, base: Path, tmp_path: Path) -> None:
        other = Trainer(tmp_path / "other", base)
        trainer = Trainer(tmp_path / "store", base)
        trainer.save_durably(1)
        trainer.saver.stop()
        for path in trainer.arena.folder.iterdir():
            path.unlink()
        trainer.arena.folder.rmdir()
        trainer.die()
        wait_until(lambda: len(status(daemon.folder)["runs"]) == 1)  # type: ignore[index]
        other.save(other.everything, 1)
        other.close()

    def test_the_arena_is_unmapped_when_its_run_is_closed(
        self, daemon: Daemon, base: Path, tmp_path: Path
    ) -> None:
        place = str(arena_folder(str(base), "x").parent)
        for number in range(3):
            trainer = Trainer(tmp_path / str(number), base)
            trainer.save(trainer.everything, 1)
            assert place in Path("/proc/self/maps").read_text()
            trainer.close()
            del trainer
            wait_until(lambda: place not in Path("/proc/self/maps").read_text())


class Gate(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        """Whether a commit is waiting."""


class TestSlowStores:
    """A store that hangs holds up no other store."""

    @pytest.fixture
    def gate(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
        """Yield the event for which commits to stores named "slow" wait."""
        from scarctl.store.writer import StoreWriter

        gate, commit = Gate(), StoreWriter.commit

        def waiting(self: StoreWriter, *arguments: Any, **options: Any) -> Any:
            if self.store.root.name == "slow":
                gate.reached.set()
                gate.wait(30)
            return commit(self, *arguments, **options)

        monkeypatch.setattr(StoreWriter, "commit", waiting)
        yield gate
        gate.set()

    @pytest.mark.leaves_arena
    def test_other_runs_go_on_and_stopping_waits(
        self, daemon: Daemon, base: Path, tmp_path: Path, gate: Gate
    ) -> None:
        slow, fast = Trainer(tmp_path / "slow", base), Trainer(tmp_path / "fast", base)
        slow.save(slow.everything, 1)
        assert gate.reached.wait(30)
        slow.die()
        with protocol.connect(daemon.folder, 10) as connection:
            # Another process takes over the run: releasing it takes as long as the write.
            protocol.send(connection, {"v": protocol.VERSION, "op": "claim", "store": str(slow.store.root)})
            wait_until(lambda: slow.phases() == ["closing"])
            fast.save_durably(1)
            fast.close()
            assert not protocol.readable(connection)
            gate.set()
            assert protocol.check_reply(protocol.receive(connection))
        wait_until(lambda: status(daemon.folder)["runs"] == [])  # type: ignore[index]
        assert set(slow.stored()[0]) == {1}


class TestTheEnd:
    @pytest.mark.leaves_arena
    def test_stop_answers_finishes_and_leaves_the_rest_queued(
        self, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = host_folder(str(base))
        folder.mkdir(mode=0o700)
        daemon = Daemon(folder)
        thread = threading.Thread(target=daemon.serve)
        thread.start()

        def no_start(*_: object) -> None:
            raise Unavailable("the session shall not start another")

        monkeypatch.setattr(client, "start", no_start)
        trainer = Trainer(tmp_path / "store", base)
        for step in range(1, 10):
            trainer.save(trainer.everything, step)
        assert client.ask(folder, "stop")["pid"] == os.getpid()
        thread.join(20)
        assert not thread.is_alive()
        assert status(folder) is None
        assert not (folder / protocol.SOCKET).exists()
        assert_sound(tmp_path / "store")
        assert orphans(tmp_path / "store") == 0
        trainer.saver._closing = True
        trainer.saver.close()
        trainer.die()

    def test_nobody_attaches_to_a_daemon_that_ends(
        self, daemon: Daemon, connection: socket.socket, tmp_path: Path
    ) -> None:
        store = Store.create(tmp_path / "store")
        with daemon.runs.changed:
            daemon.runs.life.stopping = True
        assert refused(connection, "claim", ScarError, store=str(store.root)) == "daemon-ending"
        store.lock()  # it has not kept it
        store.close()
        with daemon.runs.changed:
            daemon.runs.life.stopping = False


def test_a_run_without_partitions(daemon: Daemon, base: Path, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "store", base, layout=build_layout([]))
    assert np.array_equal(trainer.everything, [])
    (run,) = status(daemon.folder)["runs"]  # type: ignore[index]
    assert (run["durable_step"], run["oldest_durable_step"], run["queued_bytes"]) == (-1, -1, 0)
    trainer.close()
    stop(base / "nothing")
