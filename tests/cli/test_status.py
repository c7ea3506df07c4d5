"""Test `scarctl status`: stores that are well, at risk, or losing, what a loss costs, and the exit codes."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scarctl
from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder, host_folder, note_site
from scarctl.arena.header import TOLD
from scarctl.arena.owner import Owner, write_owner
from scarctl.cli.status import repeat
from scarctl.cli.status_view import page
from scarctl.daemon.status import NO_HOST, RunStatus
from scarctl.errors import NoStore
from scarctl.ops.health import AT_RISK, LOSING, health_of, unreadable, worst_first
from scarctl.ops.known import daemon_here, runs_of
from scarctl.ops.survey import survey
from scarctl.state.version import pack
from scarctl.store import Store
from tests.cli.conftest import Model, Run
from tests.daemon.trainer import Trainer, stop
from tests.support.ranks import RankStore, arena_of


@pytest.fixture
def trainer(tmp_path: Path, arena_dir: Path):  # type: ignore[no-untyped-def]
    """Yield a training process's side of the daemon, in this process."""
    trainer = Trainer(tmp_path / "run", arena_dir)
    yield trainer
    stop(host_folder(str(arena_dir)))


def test_a_store_at_rest_is_well(run: Run, saved: Model) -> None:
    done = run("status", "ckpt")
    assert done.stdout.startswith("well: ckpt\n")
    assert "no run on this host" in done.stdout
    assert run("status", "--store", "ckpt").stdout.startswith("well: ckpt\n")
    fields = run("status", "ckpt", "--json").document
    assert fields["well"]
    (store,) = fields["stores"]
    assert (store["findings"], store["shards"]) == ([], [])
    assert (
        store["if_lost"]["store"]["partitions_without_copy"] == store["if_lost"]["store"]["total_partitions"]
    )


def test_without_a_store_that_is_known_here(run: Run) -> None:
    assert run("status", "--json", code=10).error["kind"] == "nothing-known"
    assert "scarctl status STORE" in run("status", code=10).stderr


def test_what_cannot_be_read_has_the_exit_code_of_its_error(run: Run, saved: Model) -> None:
    said = " ".join(run("status", "nowhere", code=10).stdout.split())
    assert "there is no store here (check the path" in said
    assert "$ " not in said
    assert "$ " not in run("status", "gopher://x/y", code=2).stdout, "no command can open it, either"
    next(Path("ckpt/layout").glob("[0-9a-f]*")).write_text("{")
    fields = run("status", "ckpt", "--json", code=13).document
    (finding,) = fields["stores"][0]["findings"]
    assert (finding["severity"], finding["command"]) == ("losing", "scarctl verify --store ckpt")


def test_an_empty_store_is_not_well(run: Run) -> None:
    Store.create("ckpt")
    assert "nothing is saved yet" in run("status", "ckpt", code=3).stdout


def test_a_live_run_and_what_each_loss_costs(
    run: Run, trainer: Trainer, tmp_path: Path, arena_dir: Path
) -> None:
    trainer.save_durably(1)
    (store,) = run("status", "--json").document["stores"]
    assert store["store"] == str(tmp_path / "run")
    assert store["run"]["alive"]
    assert {what: loss["steps"] for what, loss in store["if_lost"].items()} == {
        "process": 0,
        "host": 0,
        "store": 0,
    }
    # Pending copies in memory are lost with the host, not with the process.
    trainer.copy(trainer.everything, 5)
    process, host, left = health_of(survey(trainer.store, str(arena_dir)), []).losses.values()
    assert (process.steps, host.steps, left.steps) == (0, 4, 0)
    assert left.rework.iterations in (0, None)
    trainer.save(trainer.everything, 6)
    trainer.close()


@pytest.mark.leaves_arena
def test_a_process_that_has_died(run: Run, saved: Model, arena_dir: Path) -> None:
    """No daemon runs, so copies that are only in memory stay there."""
    store = Store.open("ckpt")
    arena = arena_of(store, arena_dir)
    newer = np.arange(2)
    arena.slot.end(newer, pack(1, 2), 1)
    arena.adopt_moment(1)
    arena.slot.stamp(1, pack(1, 2), "")
    arena.reach(2)
    arena.take_over(0x7FFFFFF0)  # an id that no process has
    arena.close()
    done = run("status", "ckpt", code=3)
    assert done.stdout.startswith("LOSING: ckpt\n")
    assert "has died; 2 partitions newer in this host's memory" in done.stdout.replace("\n    ", " ")
    assert "start it again with the command that started it, on this host" in done.stdout.replace(
        "\n    ", " "
    )
    # A line to copy would have to name that command.
    assert "$" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


@pytest.mark.leaves_arena
def test_a_store_that_is_gone_but_has_copies_here(run: Run, saved: Model, arena_dir: Path) -> None:
    store = Store.open("ckpt")
    arena_of(store, arena_dir, place=store.where).close()
    Path("ckpt").rename("elsewhere")
    said = " ".join(run("status", code=3).stdout.split())
    assert "there is no store here (a run has left copies for it in this host's memory: mount it" in said


@pytest.mark.leaves_arena
def test_a_store_that_was_deleted_is_listed_once(run: Run, saved: Model, arena_dir: Path) -> None:
    store = Store.open("ckpt")
    arena = arena_of(store, arena_dir, place=store.where)
    arena.take_over(0x7FFFFFF0)  # an id that no process has
    arena.close()
    note_site(arena.folder, store)
    Path("ckpt").rename("elsewhere")
    (shown,) = run("status", "--json", code=3).document["stores"]
    assert [(one["severity"], one["kind"]) for one in shown["findings"]] == [("at-risk", "gone")]
    assert run("status", "--json", code=10).error["kind"] == "nothing-known"
    (arena.folder / TOLD).unlink()
    assert " ".join(run("status", code=3).stdout.split()).startswith(f"AT RISK: {store.where} ")
    Path("elsewhere").rename("ckpt")
    assert run("status", code=3).stdout.startswith("AT RISK:")  # its process has died


def test_what_cannot_be_saved_is_not_asked_for(trainer: Trainer, arena_dir: Path) -> None:
    """Nothing to paste that would fail for the same reason."""
    trainer.save(trainer.everything[:1], 1)
    trainer.drained()
    (failing,) = runs_of(daemon_here(str(arena_dir)), trainer.store.run_id)
    view = survey(trainer.store, str(arena_dir))
    for error, command in ((None, True), ("no space left", False)):
        found = health_of(view, [{**failing, "last_error": error}]).findings
        assert bool(next(one for one in found if one.kind == "never-saved").command) is command
    trainer.close()


def test_partitions_that_were_never_saved(run: Run, trainer: Trainer, tmp_path: Path) -> None:
    trainer.save(trainer.everything[:1], 1)
    trainer.drained()
    done = run("status", "run", code=3).stdout
    assert done.startswith("AT RISK: run\n")
    assert f"no copy of {len(trainer.everything) - 1} of {len(trainer.everything)} partitions" in done
    assert "$ scarctl live checkpoint --full --store" in done
    trainer.close()


def test_what_the_daemon_cannot_save_is_the_worst(saved: Model) -> None:
    view = survey(Store.open("ckpt"), None)
    run: RunStatus = {
        "store": "ckpt", "id": view.url, "pid": 1, "phase": "attached", "open": True, "peers": [],
        "errors": 17, "last_error": "no space left", "stopped": False,
    }  # fmt: skip
    health = health_of(view, [run])
    assert (health.severity, health.well) == (LOSING, False)
    assert health.findings[0].message == "saving fails, and is retried: no space left (17 errors)"
    assert health_of(view, [{**run, "stopped": True, "errors": 1}]).findings[0].kind == "stopped"
    assert health_of(view, []).well


def test_stores_come_worst_first(saved: Model) -> None:
    well = health_of(survey(Store.open("ckpt"), None), [])
    Store.create("empty")
    risky = health_of(survey(Store.open("empty"), None), [])
    broken = unreadable("gone", NoStore("there is no store here", kind="no-store"))
    assert worst_first([well, broken, risky]) == [broken, risky, well]
    lines = page(worst_first([well, broken, risky]), 60)
    assert lines[0] == "3 stores, 2 with problems"
    assert [line.partition(":")[0] for line in lines if line[0] != " "][1:] == ["LOSING", "AT RISK", "well"]
    assert all(len(line) <= 60 or "$ " in line for line in lines)


def test_a_store_that_is_deleted_under_its_training_names_the_process() -> None:
    run: Any = {"store": "/gone", "id": "x", "pid": 71, "phase": "attached"}
    missing = NoStore("there is no store here", kind="no-store")
    (found,) = unreadable("/gone", missing, runs=[run]).findings
    assert "process 71 trains for it, and its state is in that process alone" in found.message
    (found,) = unreadable("/gone", missing, runs=[{**run, "phase": "orphaned"}]).findings
    assert "71" not in found.message


def test_watch_repeats_until_it_is_interrupted(saved: Model, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scarctl", "status", "ckpt", "--watch", "--every", "0.1", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    for _ in range(2):
        assert json.loads(process.stdout.readline())["well"]
    process.send_signal(signal.SIGINT)
    process.stdout.close()
    assert process.wait(20) == 128 + signal.SIGINT


def test_on_a_terminal_the_page_is_refreshed_in_place_and_ctrl_c_ends_it(saved: Model) -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "scarctl", "status", "ckpt", "--watch", "--every", "0.1"],
        stdout=terminal,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "60"},
    )
    os.close(terminal)
    shown = b""
    deadline = time.monotonic() + 30
    while shown.count(b"well: ckpt") < 3 and time.monotonic() < deadline:
        if select.select([controller], [], [], 0.1)[0]:
            shown += os.read(controller, 65536)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    os.close(controller)
    assert process.returncode == 130, errors
    assert shown.count(b"well: ckpt") >= 3
    assert b"Traceback" not in errors


def test_the_beat_does_not_drift() -> None:
    looks = []

    def slow_look() -> bool:
        looks.append(time.monotonic())
        time.sleep(0.05)
        return len(looks) == 5

    repeat(0.1, slow_look)
    assert len(looks) == 5
    assert looks[-1] - looks[0] >= 0.39


def test_ranks_are_one_run(run: Run, tmp_path: Path, arena_dir: Path) -> None:
    """Two of four ranks are on this host, one of them dead with copies that the store lacks."""
    made = RankStore(tmp_path / "ckpt", 4)
    made.save(3)
    made.close()
    well = run("status", "ckpt").stdout
    assert well.startswith("well: ckpt\n")
    assert "nothing, unless the run continues on another host" in well
    alive, dead = (made.arena(arena_dir, rank, 9) for rank in (0, 2))
    dead.take_over(0x7FFFFFF0)  # an id that no process has
    done = run("status", "ckpt", code=3).stdout
    assert done.startswith("LOSING: ckpt\n")
    assert "1 of 2 ranks on this host alive" in done
    assert "rank 2 of 4 died; " in done
    assert "$ scarctl inspect --store " in done
    alive.remove()
    dead.remove()


@pytest.mark.leaves_arena
def test_a_copy_for_another_host_is_no_rank_of_this_one(run: Run, tmp_path: Path, arena_dir: Path) -> None:
    """Each of two hosts keeps a copy of the other's memory. Its process is not on this host."""
    made = RankStore(tmp_path / "ckpt", 2)
    made.save(9)
    made.close()
    own, copy = made.arena(arena_dir, 0, 9), made.arena(arena_dir, 1, 12)
    copy.take_over(0)
    write_owner(copy.folder, Owner("east", "11" * 16, 1))
    waiting = int(own.pending().sum())
    for arena in (own, copy):
        arena.close()
    (store,) = run("status", "ckpt", "--json").document["stores"]
    assert store["findings"] == []
    assert store["run"]["pending_partitions"] == waiting
    assert "1 of 1 rank on this host alive" in run("status", "ckpt").stdout


@pytest.mark.parametrize("state", ["fenced", "lost, 4 behind"])
def test_a_copy_on_another_host_that_is_not_kept(saved: Model, state: str) -> None:
    view = survey(Store.open("ckpt"), None)
    run: Any = {
        "store": "ckpt", "id": view.url, "pid": 1, "phase": "attached", "open": True, "rank": 1, "head_step": 4,
        "durable_step": 4, "queued_bytes": 0, "bytes_per_second": 0, "errors": 0, "last_error": None, "stopped": False,
        "peers": ["a: following, up to date", f"lost: b: {state}", "c: behind, 9 behind", "d: full", "e: connecting"],
    }  # fmt: skip
    (finding,) = health_of(view, [run]).findings
    assert (finding.severity, finding.kind, finding.command) == (AT_RISK, "copy", "scarctl daemon status")
    assert finding.message.startswith(f"rank 1: the copy on lost: b: {state}: the loss of this host may lose")
    assert health_of(view, [{**run, "peers": run["peers"][:1]}]).well
    (finding,) = health_of(view, [{**run, "member": True, "peers": [NO_HOST]}]).findings
    assert finding.message.startswith(
        "member 1: no other host keeps a copy yet: the loss of this host may lose"
    )
    begun = {name: run[name] for name in ("store", "id", "pid", "phase", "peers")}
    assert health_of(view, [{**begun, "open": False}]).well  # type: ignore[list-item]


def test_a_rank_whose_copies_lack_is_listed_first(saved: Model) -> None:
    """Only complete copies that receive what changes count."""
    links = [
        ["a: following, up to date", "b: behind, 9 behind"],
        ["a: following, 1 behind", "b: full"],
        ["a: lost, 4 behind", "b: connecting"],
        ["a: following, up to date, without extras that are too large", NO_HOST],
    ]
    runs: list[Any] = [
        {
            "store": "ckpt", "id": "x", "pid": 1, "phase": "attached", "open": True, "peers": peers, "errors": 0,
            "last_error": None, "stopped": False, "rank": k, "head_step": 9, "durable_step": 9, "queued_bytes": 0,
            "bytes_per_second": 0,
        }
        for k, peers in enumerate(links)
    ]  # fmt: skip
    health = health_of(survey(Store.open("ckpt"), None), runs)
    fields = health.to_json()["saving"]
    assert [(one["copies"], one["copies_wanted"]) for one in fields] == [(2, 2), (1, 2), (0, 2), (1, 2)]
    lines = page([health], 100)
    start = next(k for k, line in enumerate(lines) if line.split()[:2] == ["saving", "step"])
    assert lines[start].endswith("on other hosts")
    assert [line.split()[1] for line in lines[start + 1 : start + 5]] == ["2", "1", "3", "0"]
    assert [line.split()[-3:] for line in lines[start + 1 : start + 3]] == [
        ["0", "of", "2"],
        ["1", "of", "2"],
    ]


@pytest.mark.leaves_arena
def test_a_process_that_has_ended_with_everything_saved(
    run: Run, trainer: Trainer, tmp_path: Path, arena_dir: Path
) -> None:
    """As after SIGTERM, the arena stays, and the store has all of it."""
    trainer.save_durably(4)
    trainer.die()
    stop(host_folder(str(arena_dir)))
    (store,) = run("status", tmp_path / "run", "--json", code=3).document["stores"]
    assert [finding["kind"] for finding in store["findings"]] == ["died"], (
        "no seal: the step may have begun to change"
    )
    again = Trainer(tmp_path / "run", arena_dir)
    again.save_durably(5, sealed=True)
    again.die()
    stop(host_folder(str(arena_dir)))
    (store,) = run("status", tmp_path / "run", "--json").document["stores"]
    (finding,) = store["findings"]
    assert (finding["severity"], finding["kind"]) == ("note", "ended")
    assert finding["message"].endswith("has ended; the store has all of step 5")
    assert finding["command"] is None


@pytest.mark.leaves_arena
def test_a_member_may_end_while_others_train(tmp_path: Path, arena_dir: Path) -> None:
    state = {"own": np.zeros(3)}
    with scarctl.attach(
        state, store=tmp_path / "s", member=(0, 2), settings=scarctl.Settings(daemon=False)
    ) as live:
        live.step()
        other = scarctl.attach(
            {"own": np.ones(3)}, store=tmp_path / "s", member=(1, 2), settings=scarctl.Settings(daemon=False)
        )
        other.step()
        other.checkpoint(full=True, wait=True)
        folder = arena_folder(str(arena_dir), other.store.run_id)
        kept = folder.with_name("kept")
        shutil.copytree(folder, kept)
        other.close(seal=False)
        kept.rename(folder)
        arena = Arena.open_existing(folder, run_id=other.store.run_id)
        assert arena is not None
        arena.take_over(0x7FFFFFF0)
        arena.close()
        view = survey(Store.open(tmp_path / "s"), str(arena_dir))
        assert [rank.alive for rank in view.ranks] == [True, False]
        assert view.ended == {1}
        assert not [finding for finding in health_of(view, []).findings if finding.kind == "rank-died"]
