"""Test which hosts a run's links lead to: spare ones, new ones, and those that an evacuation names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.arena import Arena
from scarctl.daemon.run import Run
from scarctl.errors import Contention, UsageError
from scarctl.peers.host import Host
from scarctl.peers.sender import Candidate, Sender
from tests.peers.test_host import RUN, SECRET, START, STORE, arena, no_room, senders, source
from tests.support.waiting import wait_until

__all__ = ["arena", "senders"]
pytestmark = pytest.mark.leaves_arena


def test_two_copies_never_share_a_host_and_each_may_move_to_the_only_spare_one(
    arena: Arena, senders: list[Sender], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three other hosts the second one is full: the third one takes its copy, not the first, which has one."""
    hosts, candidates = [], []
    for n in range(3):
        (tmp_path / f"host{n}").mkdir(mode=0o700)
        hosts.append(Host(tmp_path / f"host{n}"))
        port = hosts[n].admit(START, SECRET, STORE, "127.0.0.1", 0)
        candidates.append(Candidate(f"host{n}", "127.0.0.1", port))
    monkeypatch.setattr(hosts[1], "_begin", no_room)
    run = Run(_StoreOfRank(), tmp_path / "east" / RUN, 0, _Owner())  # type: ignore[arg-type]
    run.saver.arena = arena
    try:
        run.send_to(source(), candidates, 2)
        wait_until(lambda: [one["host"] for one in hosts[2].status()] == ["east"])
        said = [f"host{n}: following, up to date" for n in (0, 2)]
        wait_until(lambda: [sender.describe() for sender in run._senders] == said)
        assert not hosts[1].status()
    finally:
        run._stop_senders(done=False, patience=30.0)
        for host in hosts:
            host.close()
            wait_until(lambda host=host: not host.busy)


def test_a_host_that_joins_can_be_named_and_complete_copies_stay(arena: Arena, tmp_path: Path) -> None:
    """Without a complete copy, the links begin again, with the new host in reserve."""
    (tmp_path / "west").mkdir(mode=0o700)
    west = Host(tmp_path / "west")
    candidates = [Candidate("west", "127.0.0.1", west.admit(START, SECRET, STORE, "127.0.0.1", 0))]
    run = Run(_StoreOfRank(), tmp_path / "east" / RUN, 0, _Owner())  # type: ignore[arg-type]
    run.saver.arena = arena
    try:
        run.send_to(source(), candidates, 1)
        (link,) = run._senders
        wait_until(lambda: link.current)
        candidates.append(Candidate("north", "127.0.0.1", 1))
        run.send_to(source(), candidates, 1)
        assert run._senders == [link]
        assert run._senders_to("north")[0].host.host == "north"
        assert run._senders_to("west") == [link]
        run.send_to(source(), candidates[::-1], 1)
        assert link not in run._senders, "another choice"
        (link,) = run._senders
        run.send_to(source(), [*candidates[::-1], Candidate("south", "127.0.0.1", 2)], 1)
        assert link not in run._senders
    finally:
        run._stop_senders(done=False, patience=30.0)
        west.close()
        wait_until(lambda: not west.busy)


def test_links_stay_during_an_evacuation_that_has_some(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without any, of a daemon that has just replaced another, does not keep the session from asking for them."""
    run = Run(_StoreOfRank(), tmp_path / "east" / RUN, 0, _Owner())  # type: ignore[arg-type]
    run.saver.arena = arena
    candidates = [Candidate("west", "127.0.0.1", 1), Candidate("north", "127.0.0.1", 2)]

    def asked(seconds: float, copies: object) -> Any:
        run.send_to(source(), candidates, 1)
        return None

    monkeypatch.setattr(run.saver, "save_in_time", asked)
    try:
        run.evacuate(1.0, None)
        (link,) = run._senders
        with pytest.raises(Contention, match="its memory is evacuated"):
            run.evacuate(1.0, None)
        assert run._senders == [link]
    finally:
        run._stop_senders(done=False, patience=30.0)


class _StoreOfRank:
    run_id, url, part = RUN, "", None


class _Owner:
    def hung_up(self) -> bool:
        return False


def test_a_host_that_two_share_the_name_of_has_to_be_named_by_its_address(
    arena: Arena, tmp_path: Path
) -> None:
    run = Run(_StoreOfRank(), tmp_path / "east" / RUN, 0, _Owner())  # type: ignore[arg-type]
    run.saver.arena = arena
    same = [
        Candidate("node", "127.0.0.1", 1),
        Candidate("node", "127.0.0.2", 1),
        Candidate("node", "127.0.0.2", 2),
    ]
    try:
        run.send_to(source(), [*same, Candidate("other", "127.0.0.3", 1)], 1)
        for name, known in (("node", 4), ("127.0.0.2", 2)):
            with pytest.raises(UsageError) as caught:
                run._senders_to(name)
            assert caught.value.kind == "unknown-host"
            assert len(caught.value.hint.split(",")) == known
        for name, address, port in (
            ("node (127.0.0.1)", "127.0.0.1", 1),
            ("127.0.0.1", "127.0.0.1", 1),
            ("127.0.0.2:2", "127.0.0.2", 2),
            ("node (127.0.0.2:1)", "127.0.0.2", 1),
            ("other", "127.0.0.3", 1),
        ):
            (sender,) = run._senders_to(name)
            assert (sender.host.address, sender.host.port) == (address, port)
            assert run._senders_to(name) == [sender], "one host has one copy"
    finally:
        run._stop_senders(done=False, patience=30.0)
