"""Test an evacuation whose processes die, or are released by the daemon, between its questions."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.kinship import ASIDE
from scarctl.arena.owner import Owner, write_owner
from scarctl.daemon import client
from scarctl.daemon.client import ask_status
from scarctl.errors import NoStore, ScarError, UsageError
from scarctl.ops import evacuate
from scarctl.state.version import pack
from scarctl.store import Store
from scarctl.store.backends.address import Address
from tests.daemon.rig import acknowledge, copy_into, small_layout
from tests.support import stepper
from tests.support.process import Forked
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.leaves_arena, pytest.mark.usefixtures("warm_torch", "daemon_folder")]


STORE = "/s"
RUN = f"{'ab' * 16}.{Address.parse(STORE).digest}"
LAYOUT = small_layout()
VERSION = pack(1, 1)


def in_memory(folder: Path, name: str, *, pid: int, pending: bool = True) -> Path:
    """Create the arena of a process that saved to a store, with copies that the store has or lacks."""
    folder.mkdir(mode=0o700, exist_ok=True)
    arena = Arena.create(folder / name, LAYOUT, run_id=name, epoch=1)
    everything = np.arange(LAYOUT.partitions)
    assert copy_into(arena, everything, VERSION, 1, whole="ef" * 16, extras={"step": 1})
    if not pending:
        acknowledge(arena, everything)
        arena.keep(arena.slot.moment)
    arena.take_over(pid)
    arena.close()
    return folder / name


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Forked]:
    with Forked(lambda tell: stepper.trains(tmp_path / "store", tell)) as child:
        child.expect("ready")
        yield child


def kill(child: Forked) -> None:
    child.signal(signal.SIGKILL)
    child.wait()


def phases(folder: Path) -> list[str]:
    """Return the phases of the runs that the daemon has."""
    answer = ask_status(folder, patience=30.0)
    return [] if answer is None else [run["phase"] for run in answer["runs"]]


def after(name: str, then: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have something happen right after the evacuation's step of that name."""
    step = getattr(evacuate, name)

    def both(*args: Any) -> Any:
        found = step(*args)
        then()
        return found

    monkeypatch.setattr(evacuate, name, both)


def test_a_process_about_which_nothing_could_be_found_out_is_not_called_safe(
    child: Forked, daemon_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not count as one that the daemon has released."""

    def runs_out(*args: object, **options: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(client, "evacuate", runs_out)
    host = evacuate.evacuate_host(60.0, arena_dir=str(daemon_folder.parent))
    assert not host.safe
    ((process,),) = (store.processes for store in host.stores)
    assert os.strerror(errno.EMFILE) in str(process.error)
    assert "evacuating failed unexpectedly" in caplog.text


def test_a_process_dies_before_it_is_asked_to_flush(
    child: Forked, daemon_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first check finds the process alive. Its memory is as safe as that of a process that died before."""

    def dies() -> None:
        kill(child)
        wait_until(lambda: "attached" not in phases(daemon_folder))

    after("runs_at", dies, monkeypatch)
    host = evacuate.evacuate_host(60.0, arena_dir=str(daemon_folder.parent))
    assert host.safe, host


def test_a_run_is_released_before_it_is_evacuated(
    child: Forked, daemon_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon has saved everything meanwhile, and no longer knows the run."""

    def dies() -> None:
        kill(child)
        wait_until(lambda: not phases(daemon_folder))

    after("_flush", dies, monkeypatch)
    began = time.monotonic()
    host = evacuate.evacuate_host(60.0, arena_dir=str(daemon_folder.parent))
    assert host.safe, host
    assert time.monotonic() < began + 50, "it does not wait for a run that has ended"


def test_a_process_that_lives_is_waited_for(
    child: Forked, daemon_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its daemon is killed between the questions, and the session starts another one."""

    def daemon_dies() -> None:
        answer = ask_status(daemon_folder, patience=30.0)
        assert answer is not None
        os.kill(answer["pid"], signal.SIGKILL)

    after("_flush", daemon_dies, monkeypatch)
    host = evacuate.evacuate_host(60.0, arena_dir=str(daemon_folder.parent))
    assert [process.safe for store in host.stores for process in store.processes] == [True], host


def test_a_daemon_that_is_late_is_asked_again(
    child: Forked, daemon_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon is stopped until the command gave up waiting, as on an overloaded host."""
    late: list[ScarError] = []
    ask = client.ask

    def in_vain(folder: Path, op: str, **fields: Any) -> dict[str, Any]:
        try:
            return ask(folder, op, **fields)
        except ScarError as error:
            late.append(error)
            monkeypatch.setattr(evacuate, "_PATIENCE", 5.0)
            os.kill(pids[0], signal.SIGCONT)
            raise

    pids: list[int] = []

    def is_late() -> None:
        answer = ask_status(daemon_folder, patience=30.0)
        assert answer is not None
        pids.append(answer["pid"])
        os.kill(pids[0], signal.SIGSTOP)
        monkeypatch.setattr(evacuate, "_PATIENCE", 0.3)
        monkeypatch.setattr(client, "ask", in_vain)

    after("runs_at", is_late, monkeypatch)
    host = evacuate.evacuate_host(60.0, arena_dir=str(daemon_folder.parent))
    assert late
    assert host.safe, host


def test_a_daemon_that_does_not_answer_in_time(
    child: Forked, daemon_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then this host's memory says what the store has."""
    pids: list[int] = []

    def stops() -> None:
        answer = ask_status(daemon_folder, patience=30.0)
        assert answer is not None
        pids.append(answer["pid"])
        os.kill(pids[0], signal.SIGSTOP)

    after("_flush", stops, monkeypatch)
    try:
        host = evacuate.evacuate_host(3.0, arena_dir=str(daemon_folder.parent))
    finally:
        os.kill(pids[0], signal.SIGCONT)
    (process,) = host.stores[0].processes
    assert process.error == f"the daemon in {daemon_folder} did not answer before the deadline"
    assert process.found is not None
    assert process.found.step >= 0
    assert process.found.total_partitions > 0


@pytest.mark.parametrize("lives", [True, False])
def test_copies_of_a_run_that_was_released_are_not_safe(daemon_folder: Path, lives: bool) -> None:
    """A session could not save its last copies in time and was closed; its process may do something else now."""
    folder = in_memory(daemon_folder, RUN, pid=os.getpid() if lives else 0)
    host = evacuate.evacuate_host(1.0, arena_dir=str(daemon_folder.parent))
    assert (host.safe, host.in_memory) == (False, (str(folder),))


def test_a_released_rank_of_the_store_that_is_asked_for_is_not_safe(
    daemon_folder: Path, tmp_path: Path
) -> None:
    """Its saving had failed permanently, and only the other ranks' runs remain."""
    base = str(daemon_folder.parent)
    folder = in_memory(daemon_folder, f"{RUN}-1", pid=0)
    assert evacuate.evacuate_host(1.0, arena_dir=base, store=STORE).in_memory == (str(folder),)
    other = str(tmp_path / "other")
    for attempt in (evacuate.evacuate_host, lambda _, arena_dir, store: evacuate.evacuees(arena_dir, store)):
        with pytest.raises(NoStore, match="there is no store here"):
            attempt(1.0, arena_dir=base, store=other)
    Store.create(other)
    with pytest.raises(UsageError) as caught:
        evacuate.evacuate_host(1.0, arena_dir=base, store=other)
    assert caught.value.kind == "no-session"


def test_extras_that_wait_alone_are_not_safe(daemon_folder: Path) -> None:
    """The store has the copies, but neither the seal nor the other things that a resume needs."""
    folder = in_memory(daemon_folder, RUN, pid=0, pending=False)
    base = str(daemon_folder.parent)
    assert evacuate.evacuate_host(1.0, arena_dir=base).safe
    arena = Arena.open_existing(folder, run_id=RUN)
    assert arena is not None
    arena.keep(0)
    arena.close()
    assert evacuate.evacuate_host(1.0, arena_dir=base).in_memory == (str(folder),)


def test_copies_that_are_elsewhere_or_of_no_use_are_no_alarm(daemon_folder: Path) -> None:
    """A replica's owner has the copies, and no session uses an arena that was set aside."""
    replica = in_memory(daemon_folder, RUN, pid=0)
    write_owner(replica, Owner("east", "11" * 16, 1))
    in_memory(daemon_folder, f"{RUN}-2", pid=0).rename(daemon_folder / f"{RUN}-2{ASIDE}")
    assert evacuate.evacuate_host(1.0, arena_dir=str(daemon_folder.parent)).safe


@pytest.mark.parametrize("pending", [True, False])
def test_a_run_that_is_being_released_is_asked_too(
    daemon_folder: Path, monkeypatch: pytest.MonkeyPatch, pending: bool
) -> None:
    """Its store hangs in its last write, and the daemon ends before the answer."""
    in_memory(daemon_folder, RUN, pid=os.getpid(), pending=pending)
    run = {"id": RUN, "store": STORE, "pid": os.getpid(), "phase": "closing", "open": True, "peers": []}
    monkeypatch.setattr(client, "ask_status", lambda *_, **__: {"runs": [run]})
    host = evacuate.evacuate_host(1.0, arena_dir=str(daemon_folder.parent))
    assert host.safe is not pending
    errors = [process.error for store in host.stores for process in store.processes]
    assert errors == (["no daemon is running on this host"] if pending else [])
