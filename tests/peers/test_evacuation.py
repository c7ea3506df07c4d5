"""Test that a host that shuts down first sends its memory to another host: real arenas, ends of a link, and stores."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.peers.evacuation import PeerCopies
from scarctl.peers.follower import Follower
from scarctl.peers.frames import Kind, decode_batch
from scarctl.peers.handshake import SECRET_BYTES
from scarctl.peers.host import Host
from scarctl.peers.link import State
from scarctl.peers.replica import Replica
from scarctl.peers.sender import Candidate, Sender, Source
from scarctl.persist.thread import PersisterThread
from scarctl.state.caveats import Caveat
from scarctl.state.extras import Notes
from scarctl.state.version import step_of
from tests.persist.test_evacuation import RISING, ROW, ROWS, Slow
from tests.support.frames import joined
from tests.support.relay import Relay
from tests.support.waiting import wait_until

pytestmark = pytest.mark.leaves_arena
RUN = "ab" * 16 + "-0"
START, SECRET = "11" * 16, secrets.token_bytes(SECRET_BYTES)
SOME = 10
"""Number of partitions that pass before a link is cut."""


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    made = Slow(tmp_path / "store", tmp_path)
    yield made
    made.close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay() as made:
        yield made


@pytest.fixture
def sender(slow: Slow, relay: Relay, tmp_path: Path) -> Iterator[Sender]:
    """Yield a sender of the rig's arena to West over the relay; West has its newest step."""
    with sending(slow, relay, tmp_path, "west") as made:
        yield made


@contextlib.contextmanager
def sending(slow: Slow, relay: Relay, tmp_path: Path, name: str, *, started: bool = True) -> Iterator[Sender]:
    (tmp_path / name).mkdir(mode=0o700)
    host = Host(tmp_path / name)
    relay.target = host.admit(START, SECRET, "ab" * 16, "127.0.0.1", 0)
    source = Source(RUN, "", "east", START, SECRET, rate=None)
    made = Sender(source, [Candidate(name, "127.0.0.1", relay.port)], slow.arena)
    made._follower._buffer = made._follower._buffer[: 2 * ROW]  # two partitions in a frame
    if started:
        made.start()
        wait_until(lambda: made.current)
    yield made
    relay.close()
    made.close(done=False, patience=30.0)
    host.close()
    wait_until(lambda: not host.busy)


def at_west(tmp_path: Path) -> Any:
    """Return the step of every copy at West, -1 for a copy that is not complete."""
    found = Arena.share(tmp_path / "west" / RUN, run_id=RUN)
    assert found is not None
    return np.where(found.intact(), step_of(found.version), -1)


def hurried(slow: Slow, *senders: Sender) -> PeerCopies:
    """Take the newest step, and return its copies, which are sent with haste."""
    slow.flush(7, RISING)
    copies = PeerCopies(slow.arena, list(senders))
    copies.hurry()
    return copies


def cut_midway(slow: Slow, relay: Relay, sender: Sender) -> PeerCopies:
    """Return a host's copies of a part of the newest step, the most changed first, from before the link was cut."""
    copies = PeerCopies(slow.arena, [sender])
    relay.refuse()  # the order of sending does not change meanwhile
    wait_until(lambda: sender.state is State.LOST)
    slow.flush(7, RISING)
    relay.allow(SOME * ROW)
    copies.hurry()
    relay.accept()
    wait_until(lambda: relay.stuck and (copies.moments() == slow.arena.moments).any())
    return copies


def test_the_most_changed_is_sent_first_also_when_that_is_said_in_the_middle(slow: Slow) -> None:
    follower = Follower(slow.arena, most=4 * ROW)
    sent = []
    for frame in follower.round():
        if bytes(memoryview(frame[0])[:1]) == bytes([Kind.BATCH]):
            body = joined(frame[1:])
            ids = decode_batch({"count": 4}, np.frombuffer(body, np.uint8), ROWS).ids
            sent.append(ids.tolist())
            if len(sent) == 2:
                follower.rank = np.arange(ROWS)[::-1].copy()
        follower.confirm()
    assert sent[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sent[2:4] == [[60, 61, 62, 63], [56, 57, 58, 59]]
    assert sorted(one for ids in sent for one in ids) == list(range(ROWS))


def test_a_link_that_is_cut_leaves_the_most_changed_at_the_peer_and_only_that_counts(
    slow: Slow, relay: Relay, sender: Sender, tmp_path: Path
) -> None:
    copies = cut_midway(slow, relay, sender)
    found = slow.evacuate(0.0, copies=copies)
    there = np.flatnonzero(at_west(tmp_path) == 7)
    assert 0 < there.size < ROWS
    assert there.tolist() == list(range(ROWS - there.size, ROWS)), "the largest changes, and no gap"
    assert 0 < found.peer_partitions <= there.size, "not more than it has"
    assert found.peer_bytes == found.peer_partitions * ROW
    assert found.lost_partitions == ROWS - found.peer_partitions
    assert found.peers == ("west",)
    assert not found.safe
    assert not found.peer_sealed
    assert found.squared == pytest.approx(np.square(RISING[: ROWS - found.peer_partitions]).sum())


def test_of_two_hosts_that_have_a_part_only_what_both_have_counts(
    slow: Slow, relay: Relay, sender: Sender, tmp_path: Path
) -> None:
    """A recovery takes the replica of one of them. A host that has all of the memory is enough."""
    with Relay() as other, sending(slow, other, tmp_path, "north") as second:
        copies = PeerCopies(slow.arena, [sender, second])
        for one in (relay, other):
            one.refuse()
        wait_until(lambda: sender.state is second.state is State.LOST)
        slow.flush(7, RISING)
        relay.allow(3 * SOME * ROW)
        other.allow(SOME * ROW)
        copies.hurry()
        for one in (relay, other):
            one.accept()
        wait_until(lambda: relay.stuck and other.stuck and (second.moments() == slow.arena.moments).any())
        found = slow.evacuation(0.0, copies=copies).report()
        fewer = int((second.moments() == slow.arena.moments).sum())
        assert 0 < fewer < int((sender.moments() == slow.arena.moments).sum())
        assert found.peer_partitions == fewer
        assert set(found.peers) == {"west", "north"}
        relay.allow(1 << 30)
        copies.wait(1.0)
        wait_until(lambda: copies.complete())
        assert slow.evacuation(0.0, copies=copies).report().safe


def test_other_bytes_of_the_same_version_do_not_count(slow: Slow, relay: Relay, sender: Sender) -> None:
    """Weights were loaded without a step: the peer has copies of this version, but the old ones."""
    copies = PeerCopies(slow.arena, [sender])
    relay.refuse()
    wait_until(lambda: sender.state is State.LOST)
    slow.flush(1, RISING)
    relay.allow(SOME * ROW)
    copies.hurry()
    relay.accept()
    wait_until(lambda: relay.stuck and (copies.moments() > 0).any())
    found = slow.evacuation(0.0, copies=copies).report()
    assert 0 < found.peer_partitions <= SOME
    assert found.lost_partitions == ROWS - found.peer_partitions
    assert not found.safe


def test_extras_that_a_peer_has_not_acknowledged_are_lost(
    slow: Slow, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline comes between the copies and the extras."""
    stuck, keep = threading.Event(), Replica.keep

    def held(self: Replica, data: bytes) -> None:
        assert stuck.wait(60.0)
        keep(self, data)

    monkeypatch.setattr(Replica, "keep", held)
    copies = hurried(slow, sender)
    try:
        wait_until(lambda: (copies.moments() == slow.arena.moments).all())
        found = slow.evacuation(0.0, copies=copies).report()
        assert (found.lost_partitions, found.extras_lost, found.safe) == (0, True, False)
    finally:
        stuck.set()
    copies.wait(60.0)
    found = slow.evacuation(0.0, copies=copies).report()
    assert (found.extras_lost, found.safe, found.peer_sealed) == (False, True, True)


def test_the_store_begins_with_what_no_other_host_has(slow: Slow, relay: Relay, sender: Sender) -> None:
    copies = cut_midway(slow, relay, sender)
    lacking = np.flatnonzero(copies.moments() != slow.arena.moments)
    evacuation = slow.evacuation(12.0, copies=copies)
    evacuation.run()
    steps, _ = slow.stored()
    saved = np.flatnonzero(steps == 7)
    # Acknowledgements of what passed before the cut may arrive late, also during the evacuation.
    late = np.flatnonzero(copies.moments() != slow.arena.moments)
    lost = np.setdiff1d(late, saved)
    assert saved.size
    assert np.isin(saved, lacking).all()
    assert 0 <= lost[0] <= lost[-1] < saved[0], "the most changed of those"
    found = evacuation.report()
    assert found.lost_partitions == lost.size
    assert found.peer_partitions == ROWS - np.union1d(late, saved).size, "those that only the peer has"


def test_what_another_host_has_is_safe_while_the_store_hangs(
    slow: Slow, sender: Sender, tmp_path: Path
) -> None:
    copies = PeerCopies(slow.arena, [sender])
    slow.throttled.stuck.set()
    thread = PersisterThread(slow.persister)
    slow.flush(7, RISING, notes=Notes(caveats=(Caveat("ranks-differ", "ranks had other weights"),)))
    copies.hurry()
    copies.wait(60.0)
    found = thread.evacuate(1.0, copies)
    assert found.safe
    assert (found.step, found.lost_partitions, found.peer_partitions) == (7, 0, ROWS)
    assert found.peer_sealed
    assert not found.sealed, "the store has not"
    assert (found.consistent, found.label.of_one, found.reasons) == (
        False,
        True,
        ("ranks had other weights",),
    )
    assert set(at_west(tmp_path)) == {7}
    slow.arena.serve(slow.arena.asked)  # nothing is collected after it
    slow.throttled.stuck.clear()
    thread.close()
    copies.rest()


def test_a_store_that_fails_leaves_the_time_to_the_peers(slow: Slow, relay: Relay, sender: Sender) -> None:
    """Saving ends at once, and the peer continues for as long as the deadline allows."""
    relay.allow(0)
    copies = hurried(slow, sender)
    wait_until(lambda: relay.stuck)
    slow.blobs.break_down("writer", 13)
    thread = PersisterThread(slow.persister)
    threading.Timer(0.5, relay.allow, (1 << 40,)).start()
    found = thread.evacuate(60.0, copies)
    assert found.safe, found
    assert found.peer_partitions == ROWS
    thread.close()


def test_a_host_that_never_answered_has_nothing(slow: Slow) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # it accepts the connection, and stays silent
        port = listener.getsockname()[1]
        sender = Sender(
            Source(RUN, "", "east", START, SECRET, None), [Candidate("west", "127.0.0.1", port)], slow.arena
        )
        sender.start()
        copies = hurried(slow, sender)
        copies.wait(0.2)
        found = slow.evacuation(0.0, copies=copies).report()
        assert (found.peers, found.peer_partitions, found.lost_partitions) == ((), 0, ROWS)
    sender.close(done=False, patience=30.0)


def test_a_host_that_has_died_since_has_nothing(slow: Slow, relay: Relay, sender: Sender) -> None:
    """The peer had everything, and its end of the link is gone."""
    copies = hurried(slow, sender)
    copies.wait(60.0)
    assert slow.evacuation(0.0, copies=copies).report().safe
    relay.refuse()
    wait_until(lambda: sender.state is State.LOST)
    found = slow.evacuation(0.0, copies=copies).report()
    assert (found.peers, found.peer_partitions, found.lost_partitions) == ((), 0, ROWS)


def test_a_lost_link_is_tried_at_once_when_the_host_goes(
    slow: Slow, relay: Relay, sender: Sender, tmp_path: Path
) -> None:
    relay.refuse()
    wait_until(lambda: sender.state is State.LOST and sender.link.pause >= 4.0)
    relay.accept()
    began = time.monotonic()
    hurried(slow, sender)
    wait_until(lambda: sender.current)
    assert sender.link.pause < 4.0, "the pause of a link that was lost for long is over"
    assert set(at_west(tmp_path)) == {7}
    assert time.monotonic() - began < 60


def test_a_link_that_has_not_begun_yet_is_waited_for(slow: Slow, relay: Relay, tmp_path: Path) -> None:
    """On a busy host its thread runs late."""
    with sending(slow, relay, tmp_path, "west", started=False) as sender:
        copies = hurried(slow, sender)
        late = threading.Timer(0.5, sender.start)
        late.start()
        copies.head_start(60.0)
        found = slow.evacuation(0.0, copies=copies).report()
        late.join()
    assert found.safe, found.to_json()
    assert found.peer_sealed


def test_one_host_that_has_all_is_enough(slow: Slow, relay: Relay, sender: Sender, tmp_path: Path) -> None:
    """The other one is not reached any more, and is not waited for."""
    with Relay() as other, sending(slow, other, tmp_path, "north") as second:
        other.refuse()
        wait_until(lambda: second.state is State.LOST)
        slow.flush(7, RISING)
        slow.blobs.break_down("writer", 13)
        thread = PersisterThread(slow.persister)
        copies = PeerCopies(slow.arena, [sender, second])
        copies.hurry()
        found = thread.evacuate(600.0, copies)
        thread.close()
    assert found.safe, found.to_json()
    assert found.peers == ("west",)
