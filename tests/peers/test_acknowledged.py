"""Test waiting for peers: the meaning of an acknowledgement by one host or by all, and a missing one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scarctl.arena.arena import Arena
from scarctl.config import SessionSettings
from scarctl.daemon.run import Run
from scarctl.errors import UsageError
from scarctl.peers import follower as followers
from scarctl.peers.host import Host
from scarctl.peers.link import State
from scarctl.peers.replica import Replica
from scarctl.peers.sender import Candidate, Sender
from scarctl.session.peers import check_wait
from scarctl.state.version import step_of
from scarctl.store import Store
from tests.daemon.rig import acknowledge
from tests.peers.test_host import EVERYTHING, LAYOUT, RUN, SECRET, START, STORE, save, source
from tests.support.waiting import wait_until

pytestmark = pytest.mark.leaves_arena


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Yield a run on another host, with an arena of one checkpoint."""
    (tmp_path / "east").mkdir(mode=0o700)
    arena = Arena.create(tmp_path / "east" / RUN, LAYOUT, run_id=RUN, epoch=1)
    arena.close()
    save(arena, 1)
    made = Run(Store.create(str(tmp_path / "store")), tmp_path / "east", 0, None)
    made.saver.arena = arena
    return made


@pytest.fixture
def arena(run: Run) -> Arena:
    assert run.saver.arena is not None
    return run.saver.arena


class Hosts:
    """Daemons that keep copies, without their sockets for sessions."""

    def __init__(self, folder: Path, count: int) -> None:
        self.hosts, self.candidates = [], []
        for n in range(count):
            home = folder / f"host{n}"
            home.mkdir(mode=0o700)
            self.hosts.append(Host(home))
            port = self.hosts[-1].admit(START, SECRET, STORE, "127.0.0.1", 0)
            self.candidates.append(Candidate(f"host{n}", "127.0.0.1", port))

    def step(self, n: int) -> int:
        """Return the step that a host would give back."""
        found = Arena.share(self.hosts[n]._folder / RUN, run_id=RUN)
        return -1 if found is None else found.head_step

    def state(self, n: int) -> int:
        """Return the step of the state that a host has; -1 without one."""
        found = Arena.share(self.hosts[n]._folder / RUN, run_id=RUN)
        return -1 if found is None else step_of(found.slot.head)


@pytest.fixture
def hosts(tmp_path: Path, run: Run) -> Iterator[Hosts]:
    made = Hosts(tmp_path, 2)
    run.send_to(source(), made.candidates, 2)
    yield made
    run._stop_senders(done=False, patience=30.0)
    for host in made.hosts:
        host.close()
    wait_until(lambda: not any(host.busy for host in made.hosts))
    run.store.close()


def test_what_is_acknowledged_is_on_the_other_hosts(run: Run, arena: Arena, hosts: Hosts) -> None:
    """The call waits for this moment's step, whichever it is, and for nothing else."""
    for step in range(2, 12):
        save(arena, step)
        have, links = run.await_peers(2, 30.0)
        assert [hosts.step(0), hosts.step(1)] == [step, step]
        assert have == 2
        assert [link.partition(":")[0] for link in links] == ["host0", "host1"]


def test_one_is_enough_for_next_and_not_for_all(
    run: Run, arena: Arena, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.await_peers(2, 30.0)[0] == 2
    stuck, original = threading.Event(), Replica.mark

    def held(self: Replica, mark: object) -> None:
        if self.owner.host == "east" and "host1" in str(self.arena.folder):
            assert stuck.wait(30.0)
        original(self, mark)  # type: ignore[arg-type]

    monkeypatch.setattr(Replica, "mark", held)
    try:
        save(arena, 2)
        assert run.await_peers(1, 30.0)[0] >= 1
        assert hosts.step(0) == 2
        began = time.monotonic()
        have, links = run.await_peers(2, 0.3)
        assert time.monotonic() - began >= 0.3
        assert have == 1
        assert "host1: following, 1 behind" in links
    finally:
        stuck.set()
    assert run.await_peers(2, 30.0)[0] == 2
    assert hosts.step(1) == 2


def test_a_peer_that_never_will_is_not_waited_for(run: Run, hosts: Hosts) -> None:
    assert run.await_peers(2, 30.0)[0] == 2
    run._senders[0].close(done=False, patience=30.0)
    wait_until(lambda: run._senders[0].state is State.CLOSED)
    began = time.monotonic()
    assert run.await_peers(2, 60.0)[0] < 2
    assert time.monotonic() - began < 30
    assert run.await_peers(1, 30.0)[0] == 1


def test_extras_that_are_too_large_are_not_acknowledged(
    run: Run, arena: Arena, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peers have the copies, but the other things that a resume needs only once the store has them."""
    assert run.await_peers(2, 30.0)[0] == 2
    monkeypatch.setattr(followers, "MAX_BODY", 100)
    save(arena, 2)
    asked = [sender.ask() for sender in run._senders]
    wait_until(lambda: all(map(Sender.has_ended, run._senders, asked)))
    have, links = run.await_peers(1, 0.3)
    assert have == 0
    assert "host0: following, 0 behind, without extras that are too large" in links
    assert [hosts.step(0), hosts.step(1)] == [2, 2]
    assert [sender.whole for sender in run._senders] == ["", ""]
    said = [run.events.get(timeout=30.0)["warn"] for _ in run._senders]
    text = "the copy of this process's memory on {} lacks extras, which are too large to be sent"
    assert sorted(said) == [text.format("host0"), text.format("host1")]
    begun = [sender._begun for sender in run._senders]
    time.sleep(0.5)
    assert [sender._begun for sender in run._senders] == begun, "it sends what there is once"
    monkeypatch.undo()
    save(arena, 3)
    assert run.await_peers(2, 30.0)[0] == 2
    assert [sender.whole for sender in run._senders] == [arena.whole] * 2
    assert run.events.empty(), "it is said once"


@pytest.mark.parametrize("waits", [True, False])
def test_a_replica_goes_with_its_run_only_if_the_store_has_all_of_it(
    run: Run, arena: Arena, hosts: Hosts, waits: bool
) -> None:
    """It may have all copies, and neither the extras nor the seal."""
    assert run.await_peers(2, 30.0)[0] == 2
    acknowledge(arena, EVERYTHING)
    if not waits:
        arena.keep(arena.slot.moment)
    run.closed = True
    run.end_sending()
    assert [hosts.step(0), hosts.step(1)] == ([1, 1] if waits else [-1, -1])


def test_a_state_that_another_reader_still_holds_answers_nothing(
    run: Run, arena: Arena, hosts: Hosts
) -> None:
    """The link sends the slot that the saver holds: memory has a newer state, which is what was asked for."""
    with arena.held(60):
        save(arena, 2, flush=False)
        assert run.await_peers(1, 1.0)[0] == 0
        wait_until(lambda: hosts.state(0) == 1)
    assert run.await_peers(1, 30.0)[0] >= 1
    assert 2 in (hosts.state(0), hosts.state(1))


def test_without_links_the_answer_comes_at_once(run: Run) -> None:
    assert run.await_peers(1, 60.0) == (0, [])
    run.store.close()


def test_who_asks_during_a_round_gets_the_next_one(run: Run, arena: Arena) -> None:
    """The current round may have read the arena before."""
    sender = Sender(source(), [], arena)
    first = sender.ask()
    sender._begun = 1  # a round begins
    assert (first, sender.ask(), sender.ask()) == (1, 2, 2)
    sender._acknowledged = 1
    assert sender.has_acknowledged(first)
    assert not sender.has_acknowledged(2)
    run.store.close()


def test_waiting_for_peers_needs_peers() -> None:
    with pytest.raises(UsageError, match="no other host keeps copies"):
        check_wait("peers", SessionSettings(store="x"))
    with pytest.raises(UsageError, match="wait is"):
        check_wait("all", SessionSettings(store="x", peers=1))
    for wait in (True, False, "peers"):
        check_wait(wait, SessionSettings(store="x", peers=1))
