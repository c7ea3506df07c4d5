"""Test `scarctl daemon`, `scarctl live`, and snapshots of a running session."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import scarctl
from scarctl.arena.stale import StaleArena
from scarctl.cli.daemon import _stale_line
from scarctl.errors import Unavailable
from scarctl.ops import live
from scarctl.state.label import Label
from scarctl.store import Store
from scarctl.store.snapshot import SealedSet, Snapshot
from tests.cli.conftest import Run
from tests.daemon.trainer import Trainer, assert_sound, status
from tests.support.waiting import wait_until


def test_start_status_stop(run: Run, folder: Path) -> None:
    started = run("daemon", "start", "--json").document
    assert started["command"] == "daemon"
    assert (started["folder"], started["already_running"]) == (str(folder), False)
    assert run("daemon", "start", "--json").document["already_running"]
    assert str(started["pid"]) in run("daemon", "start").stdout
    told = run("daemon", "status", "--json").document
    assert (told["running"], told["pid"], told["runs"], told["stale"]) == (True, started["pid"], [], [])
    assert 0 <= told["uptime_seconds"] < 60
    assert "0 runs" in run("daemon", "status").stdout
    done = run("daemon", "stop", "--all", "--json").document
    assert (done["pid"], done["live_runs"], done["reaped"], done["stale"]) == (started["pid"], 0, [], [])
    assert status(folder) is None


def test_without_a_daemon(run: Run, folder: Path) -> None:
    assert run("daemon", "stop", "--all", "--json", code=17).error["kind"] == "no-daemon"
    told = run("daemon", "status", "--json", code=17).document
    assert (told["running"], told["pid"], told["runs"], told["stale"]) == (False, None, [], [])
    assert told["error"]["kind"] == "no-daemon"
    assert told["error"]["exit_code"] == 17
    done = run("daemon", "status", code=17)
    assert done.stdout == ""
    assert "no daemon" in done.stderr
    assert run("daemon", "stop", "--all", "--reap", "--json").document["reaped"] == []


def test_status_shows_runs_and_shards(run: Run, folder: Path, arena_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "store", arena_dir)
    assert "store" in run("daemon", "status").stdout
    trainer.save_durably(3)
    trainer.saver.stop()
    trainer.save(trainer.everything[:2], 4)
    (shown,) = run("daemon", "status", "--json").document["runs"]
    assert shown["store"] == str(tmp_path / "store")
    assert (shown["pid"], shown["phase"], shown["head_step"]) == (os.getpid(), "attached", 4)
    assert (shown["durable_step"], shown["queued_partitions"]) == (3, 2)
    assert shown["queued_bytes"] == trainer.layout.partition_bytes[:2].sum()
    assert shown["bytes_per_second"] > 0
    assert (shown["errors"], shown["last_error"], shown["peers"]) == (0, None, [])
    assert len(shown["shards"]) == 3
    text = run("daemon", "status").stdout
    assert f"process {os.getpid()}, attached, step 4, durable 3" in text
    assert "by shard: 0: 3, 1: 3, 2: 3" in text
    trainer.saver.resume()
    trainer.close()


def test_stop_with_a_live_session_says_so(run: Run, folder: Path, arena_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "store", arena_dir)
    trainer.save(trainer.everything, 1)
    done = run("daemon", "stop", "--all")
    assert "1 live session will" in done.stderr
    wait_until(lambda: trainer.phases() == ["attached"])
    trainer.close()
    assert_sound(tmp_path / "store")


@pytest.mark.leaves_arena
def test_stop_ends_what_it_was_told_to_and_nothing_else(
    run: Run, folder: Path, arena_dir: Path, tmp_path: Path
) -> None:
    alive, dead = (Trainer(tmp_path / name, arena_dir) for name in ("alive", "dead"))
    pid = os.getpid()
    alive.save_durably(1)
    dead.save_durably(1)
    (tmp_path / "dead").rename(tmp_path / "away")  # so that the daemon goes on trying
    dead.save(dead.everything, 2)
    dead.die()
    error = run("daemon", "stop", "--json", code=2).error
    assert (
        f"2 runs here: {tmp_path}/alive: process {pid}, training; {tmp_path}/dead: process"
        in error["message"]
    )
    assert "--store URL" in error["hint"]
    assert "--all" in error["hint"]
    run("daemon", "stop", "--all", "--store", "dead", code=2)
    run("daemon", "stop", "--store", "neither", code=2)
    assert run("daemon", "stop", "--store", "alive", "--json", code=11).error["kind"] == "contention"
    assert run("daemon", "stop", "--store", "alive", "--dry-run", "--json", code=11).error
    for which, ids in (
        ("--all", {alive.store.run_id, dead.store.run_id}),
        ("--store dead", {dead.store.run_id}),
    ):
        told = run("daemon", "stop", *which.split(), "--reap", "--dry-run", "--json").document
        assert (told["dry_run"], {one["id"] for one in told["runs"]}) == (True, ids)
    assert (alive.phases(), dead.phases()) == (["attached"], ["orphaned"])
    before = status(folder)
    assert before is not None
    done = run("daemon", "stop", "--store", "dead")
    assert "ending saving for" in done.stderr
    assert f"saving has ended: {tmp_path}/dead: process" in done.stdout
    assert (alive.phases(), dead.phases()) == (["attached"], [])
    alive.save_durably(2)
    after = status(folder)
    assert after is not None
    assert after["pid"] == before["pid"]
    # What it had in memory is there for the next run.
    (tmp_path / "away").rename(tmp_path / "dead")
    again = Trainer(tmp_path / "dead", arena_dir)
    again.close()
    assert set(again.stored()[0]) == {2}
    alive.close()


@pytest.mark.leaves_arena
def test_the_memory_of_a_deleted_store_is_removed(
    run: Run, folder: Path, arena_dir: Path, tmp_path: Path
) -> None:
    gone, kept = (Trainer(tmp_path / name, arena_dir) for name in ("gone", "kept"))
    for trainer in (gone, kept):
        trainer.save_durably(1)
        trainer.die()
    wait_until(lambda: (status(folder) or {"runs": []})["runs"] == [])
    shutil.rmtree(tmp_path / "gone")
    told = run("daemon", "stop", "--store", "gone", "--reap", "--dry-run", "--json").document
    assert [one["gone"] for one in told["reaped"]] == ["it was deleted or moved"]
    assert gone.arena.folder.exists()
    assert "removed" in run("daemon", "stop", "--store", "gone", "--reap").stdout
    assert not gone.arena.folder.exists()
    assert kept.arena.folder.exists()


def test_stop_gives_up_waiting(run: Run, folder: Path) -> None:
    pid = run("daemon", "start", "--json").document["pid"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scarctl.cli.daemon._ask", lambda *_: {"pid": pid, "runs": []})
        error = run("daemon", "stop", "--all", "--timeout", 0.2, "--json", code=17).error
    assert error["kind"] == "daemon-busy"


def test_a_daemon_that_does_not_answer(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scarctl.cli.daemon._PATIENCE", 0.5)
    pid = run("daemon", "start", "--json").document["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        for action in (["start"], ["status"], ["stop", "--all"], ["stop", "--all", "--reap"], ["stop"]):
            error = run("daemon", *action, "--json", code=17).error
            assert error["kind"] == "daemon-silent"
            assert f"process {pid}, has not answered for 0.5 s" in error["message"]
        assert time.monotonic() - started < 10
        assert "has not answered" in run("daemon", "status", code=17).stderr
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.setattr("scarctl.cli.daemon._PATIENCE", 30.0)
    assert run("daemon", "stop", "--all", "--json").document["pid"] == pid


class Training:
    """A session in a thread of this process, with steps of 10 ms."""

    def __init__(self, *, change: bool = True, **more: np.ndarray[Any, Any]) -> None:
        self.state = {"w": np.zeros((64, 8), np.float32), "b": np.ones(16, np.float64), **more}
        self.session = scarctl.attach(
            self.state,
            store="ckpt",
            interval=1_000_000,
            partitioning=scarctl.Partitioning(shards=2, partition_bytes=256),
            settings=scarctl.Settings(daemon=True),
        )
        self.change = change
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()
        wait_until(lambda: self.session.head_step > 2)

    def loop(self) -> None:
        while not self.ended.is_set():
            if self.change:
                self.state["w"] += 1
            self.session.step()
            time.sleep(0.01)

    def end(self) -> None:
        self.ended.set()
        self.thread.join()
        self.session.close()


@pytest.fixture
def training(run: Run, folder: Path) -> Iterator[Training]:
    made = Training()
    yield made
    made.end()


class TestLive:
    def test_a_running_session_saves_now(self, run: Run, training: Training) -> None:
        before = training.session.head_step
        done = run("live", "checkpoint", "--store", "ckpt", "--json").document
        assert done["command"] == "live checkpoint"
        assert done["step"] > before
        assert (done["live"], done["full"], done["durable"], done["consistent"]) == (True, False, True, False)
        assert done["pid"] == os.getpid()
        assert 0 < done["saved_partitions"] < done["total_partitions"] == 9
        assert 0 < done["saved_bytes"] < done["total_bytes"] == 64 * 8 * 4 + 16 * 8
        text = run("live", "checkpoint", "--store", "ckpt").stdout
        assert f"process {os.getpid()} saved" in text

    def test_a_snapshot_of_a_running_session(
        self, run: Run, training: Training, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create, asked = live.create_snapshot, []

        def late_at_first(store: Store, name: str, sealed: SealedSet) -> Snapshot:
            asked.append(sealed.step)
            if len(asked) == 1:
                raise Unavailable("collected", kind="snapshot-late")
            return create(store, name, sealed)

        monkeypatch.setattr(live, "create_snapshot", late_at_first)
        arguments = ["snapshot", "create", "best", "--store", "ckpt", "--json"]
        done = run(*arguments).document
        assert done["command"] == "snapshot create"
        assert (done["snapshot"], done["consistent"]) == ("best", True)
        assert asked[0] < asked[1] == done["step"]
        assert run(*arguments, code=2).error["kind"] == "snapshot-exists"
        run("export", "--store", "ckpt", "out", "--snapshot", "best")
        w = load_file("out/model.safetensors")["w"]
        assert (w == w[0, 0]).all()

    def test_values_that_are_not_finite_cannot_be_whole(self, run: Run, training: Training) -> None:
        training.state["b"][:] = np.nan
        for command in (("live", "checkpoint", "--full"), ("snapshot", "create", "x")):
            done = run(*command, "--store", "ckpt", "--timeout", 2, code=17)
            assert "no newer checkpoint is durable" in done.stderr
        training.state["b"][:] = 1

    def test_nothing_new(self, run: Run, training: Training) -> None:
        training.change = False
        run("live", "checkpoint", "--full", "--store", "ckpt")
        error = run("live", "checkpoint", "--store", "ckpt", "--timeout", 0.5, "--json", code=17).error
        assert "no newer checkpoint" in error["message"]
        done = run("live", "checkpoint", "--full", "--store", "ckpt", "--json").document
        assert done["consistent"], "nothing to write, and yet the whole state is known to be of a newer step"

    def test_a_running_session_recovers_what_is_lost(self, run: Run, training: Training) -> None:
        done = run("live", "recover", "--lost", "all", "--store", "ckpt", "--json").document
        assert done["live"]
        assert done["pid"] == os.getpid()
        assert done["lost_partitions"] == done["restored_partitions"] > 0
        assert 0 < done["head_step"] <= training.session.head_step
        error = run("live", "recover", "--lost", "nowhere", "--store", "ckpt", "--json", code=2).error
        assert "nowhere" in error["message"]

    def test_a_state_that_is_mixed_after_a_recovery_is_said(
        self, run: Run, training: Training, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recover = live.recover_live
        for label, line in (
            (Label(7, 7), ""),
            (Label(7, 7, ("a",), ("b",)), "\nstep 7, mixed: a; b\n"),
            (Label(6, 7, ("a",)), "\nmixed, partitions of steps 6 to 7: a\n"),
        ):

            def labelled(*given: Any, label: Label = label, **more: Any) -> dict[str, Any]:
                answer = recover(*given, **more)
                return {**answer, "report": {**answer["report"], **label.to_json()}}

            monkeypatch.setattr(live, "recover_live", labelled)
            text = run("live", "recover", "--lost", "all", "--store", "ckpt").stdout
            assert line in text
            assert ("mixed" in text) is bool(line)

    def test_the_session_ends_meanwhile(
        self, run: Run, training: Training, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ask = live.ask

        def ending(*arguments: Any, **fields: Any) -> Any:
            answer = ask(*arguments, **fields)
            training.end()
            return answer

        monkeypatch.setattr(live, "ask", ending)
        done = run("live", "checkpoint", "--full", "--store", "ckpt", "--json").document
        assert (done["step"], done["consistent"]) == (training.session.head_step, True)
        assert run("live", "checkpoint", "--store", "ckpt", "--json", code=2).error["kind"] == "no-session"


def test_a_replica_without_a_daemon_is_a_copy_of_another_hosts_memory() -> None:
    """No process of this host left it, so none is named."""
    replica = StaleArena(
        "ab-1", "/s", "/m/ab-1", 2048, 1.0, 0, 619, 610, 4, False, False, False, None, "node1"
    )
    assert _stale_line(replica) == "/s: copy of the memory of node1, 2.0 KiB, step 619"
    own = replace(replica, owner=None, pid=812)
    assert _stale_line(replace(own, durable=True)).endswith(", step 610, completely in the store")
    assert "of a store that is gone: it was deleted" in _stale_line(replace(own, gone="it was deleted"))
    assert _stale_line(own).startswith(
        "/s: left by process 812, 2.0 KiB, step 619, 4 partitions not in the store"
    )
