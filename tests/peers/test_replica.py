"""Test that a replica is a state of its owner's arena at any moment: after any frame, cut or death."""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.arena.arena import Arena
from scarctl.arena.header import FILE
from scarctl.arena.owner import Owner, disown, read_owner
from scarctl.arena.queue import HandOverQueue
from scarctl.errors import Contention, Corruption, Fenced, ScarError, Unavailable
from scarctl.peers import follower as followers
from scarctl.peers.follower import Follower
from scarctl.peers.frames import Kind
from scarctl.peers.replica import SUCCESSOR, Replica
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import pack, step_of
from tests.daemon.rig import fill, small_layout, values
from tests.support.frames import deliver

pytestmark = pytest.mark.leaves_arena
RUN = "ab" * 16 + "-3"
LAYOUT = small_layout()
EVERYTHING = np.arange(LAYOUT.partitions)
NOT_EMPTY = np.flatnonzero(LAYOUT.partition_bytes)


class Run:
    """An owner's arena, its peer's replica, and the expected bytes of every copy."""

    def __init__(self, folder: Path, start: str = "11" * 16, epoch: int = 1) -> None:
        self.start, self.host = start, folder / "west"
        place = folder / f"east{epoch}" / RUN
        place.parent.mkdir(parents=True)
        place.parent.chmod(0o700)
        self.host.mkdir(mode=0o700, exist_ok=True)
        self.arena = Arena.create(place, LAYOUT, run_id=RUN, epoch=epoch)
        self.arena.close()  # the lock, which no other process takes
        self.queue = HandOverQueue(place)
        self.step = 0
        self.wholes: dict[str, bytes] = {}
        """Bytes of the named whole states."""
        self.moments: dict[int, Any] = {}
        """The version of each copy at every complete memory checkpoint, by its version."""
        self.connect()

    def copy(self, ids: Any, *, finish: bool = True) -> None:
        """Take one step, and make these copies at its end. Their bytes show the step."""
        self.step += 1
        self.arena.begin(ids)
        fill(self.arena, ids, self.step)
        if finish:
            self.arena.end(ids, pack(self.arena.epoch, self.step))
        self.arena.reach(self.step)

    def hand_over(self, ids: Any, *, whole: bool = False) -> None:
        name = uuid.uuid4().hex if whole else ""
        if whole:
            self.arena.name_whole(name)
            self.wholes[name] = self.arena.memory().tobytes()
        self.queue.put(
            version=pack(self.arena.epoch, self.step), ids=ids, whole=name, extras={"step": self.step}
        )

    def moment(self, ids: Any) -> None:
        """Bring memory up to a step as a whole, which only `ids` have changed, or all if a copy is missing."""
        self.copy(ids if self.arena.intact().all() else EVERYTHING)
        name, version = uuid.uuid4().hex, pack(self.arena.epoch, self.step)
        self.queue.note(version=version, whole=name, extras={"step": self.step})
        self.arena.name_whole(name)
        self.wholes[name] = self.arena.memory().tobytes()
        self.moments[version] = self.arena.version.copy()
        self.arena.note_moment(version)

    def connect(self) -> None:
        owner = Owner("east", self.start, self.arena.base_epoch)
        self.replica = Replica.begin(self.host, RUN, self.arena.layout_json(), owner, self.arena.epoch, "")
        self.follower = Follower(self.arena)
        self.follower.has(self.replica.have())

    def send(self, most: int = 1 << 30, meanwhile: Callable[[], object] | None = None) -> bool:
        """Send a round, or its first frames. Return whether it ended with a mark. meanwhile: after the first frame."""
        kind = None
        for n, frame in enumerate(self.follower.round()):
            if n >= most:
                return False
            kind = deliver(self.replica, frame)
            if n == 0 and meanwhile is not None:
                meanwhile()
        return kind is Kind.MARK

    def seal(self) -> None:
        """Commit the whole state, durable at once."""
        self.copy(EVERYTHING)
        self.hand_over(EVERYTHING, whole=True)
        self.arena.seal(pack(1, self.step))

    def name_again(self) -> None:
        """Give the state another name: it was saved again, mostly without a change."""
        ids = EVERYTHING[:2] if self.arena.intact().all() else EVERYTHING
        self.copy(ids)
        self.hand_over(ids, whole=True)

    def moment_meanwhile(self) -> None:
        self.moment(EVERYTHING[1:3])

    def check(self) -> None:
        """Check that recovery would find a true state."""
        place = self.host / RUN
        if not (place / FILE).exists():
            return
        found = Arena.share(place, run_id=RUN)
        assert found is not None
        intact = found.intact()
        for i in NOT_EMPTY.tolist():
            if intact[i]:
                assert values(found, i) == {step_of(int(found.version[i])) % 251}
        assert (step_of(found.version) <= self.step).all()
        handovers = HandOverQueue(place).pending()
        for handover in handovers:
            assert handover.extras == {"step": step_of(handover.version)}
            assert (found.version[handover.ids] >= handover.version).all(), (
                "a hand-over is there before its copies"
            )
        if found.whole:
            assert intact.all()
            assert found.memory().tobytes() == self.wholes[found.whole], "a state is called whole, and is not"
        assert (found.version >= found.sealed).all(), "a copy from before a seal counts as one of the seal"
        if found.moment >= 0:
            then = self.moments[found.moment]
            older = found.version <= found.moment
            assert (found.version[older] == then[older]).all(), (
                "a copy from before a moment counts as one of it"
            )
        noted = HandOverQueue(place).moment()
        assert noted is None or noted.extras == {"step": step_of(noted.version)}
        if noted is not None and noted.whole and noted.whole == found.whole:
            assert (step_of(found.version) <= step_of(noted.version)).all()


def equal(run: Run) -> bool:
    """Return whether the replica equals the owner's arena."""
    place = run.host / RUN
    found = Arena.share(place, run_id=RUN)
    assert found is not None
    return (
        bool((found.version == run.arena.version).all() and (found.durable == run.arena.durable).all())
        and found.memory().tobytes() == run.arena.memory().tobytes()
        and (found.head_step, found.epoch, found.sealed, found.moment)
        == (run.arena.head_step, run.arena.epoch, run.arena.sealed, run.arena.moment)
        and found.whole == run.arena.whole
        and HandOverQueue(place).small() == run.queue.small()
    )


def test_a_round_brings_everything(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    run.hand_over(EVERYTHING, whole=True)
    assert not (run.host / RUN).exists()
    assert run.send()
    assert equal(run)
    assert read_owner(run.host / RUN) == Owner("east", run.start, 1)
    run.copy(EVERYTHING[3:5])
    run.hand_over(EVERYTHING[3:5])
    run.queue.remove(1)
    run.arena.acknowledge(EVERYTHING, pack(1, 1))
    assert run.send()
    assert equal(run)


IDS = st.sets(st.integers(0, LAYOUT.partitions - 1), min_size=1).map(sorted).map(np.array)
ACTIONS = st.one_of(
    st.tuples(st.just("copy"), IDS),
    st.tuples(st.just("copy and hand over"), IDS),
    st.tuples(st.just("seal"), st.none()),
    st.tuples(st.just("moment"), IDS),
    st.tuples(st.just("acknowledge"), IDS),
    st.tuples(st.just("send"), st.integers(0, 6)),
    st.tuples(st.just("send"), st.none()),
    st.tuples(st.just("send meanwhile"), st.sampled_from(["seal", "name_again", "moment_meanwhile"])),
    st.tuples(st.just("connect"), st.none()),
    st.tuples(st.just("persisted"), st.none()),
)


@given(actions=st.lists(ACTIONS, max_size=25))
def test_any_actions_cut_anywhere(
    actions: list[tuple[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = Run(tmp_path_factory.mktemp("run"))
    for action, about in actions:
        if action == "copy":
            run.copy(about)
        elif action == "copy and hand over":
            run.copy(about)
            run.hand_over(about)
        elif action == "seal":
            run.seal()
        elif action == "moment":
            run.moment(about)
        elif action == "acknowledge":
            ids = about[run.arena.version[about] >= 0]
            run.arena.durable[ids] = run.arena.version[ids]
        elif action == "persisted":
            for number in run.queue.numbers()[:1]:
                run.queue.remove(number)
        elif action == "connect":
            run.connect()
        elif action == "send meanwhile":
            run.send(meanwhile=getattr(run, about))
        elif about is None:
            assert run.send()
            assert equal(run)
        else:
            run.send(about)
            run.connect()  # undelivered frames mean a lost connection
        run.check()
    assert run.send()
    assert equal(run)


def test_copies_under_way_are_not_sent_and_no_mark_speaks_of_them(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    assert run.send()
    run.copy(EVERYTHING[2:4], finish=False)
    run.arena.seal(pack(1, run.step))
    run.follower._clock = iter(range(1000)).__next__  # type: ignore[assignment]
    assert not run.send()
    found = Arena.share(run.host / RUN, run_id=RUN)
    assert found is not None
    assert found.intact().all()
    assert found.sealed < pack(1, run.step)
    run.check()
    run.arena.end(EVERYTHING[2:4], pack(1, run.step))
    assert run.send()
    assert equal(run)


@pytest.mark.parametrize("finish", [True, False])
def test_copies_that_change_while_they_are_read_are_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finish: bool
) -> None:
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    run.hand_over(EVERYTHING, whole=True)
    real, first = followers.read_rows, [EVERYTHING[2:4]]

    def read_rows(*arguments: Any) -> Any:
        if first:
            run.copy(first.pop(), finish=finish)
        return real(*arguments)

    monkeypatch.setattr(followers, "read_rows", read_rows)
    run.follower._clock = iter(range(1000)).__next__  # type: ignore[assignment]
    assert run.send() == finish
    run.check()
    if not finish:
        run.arena.end(EVERYTHING[2:4], pack(1, run.step))
    assert run.send()
    run.check()
    assert equal(run)


def test_a_new_connection_sends_only_what_has_changed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    run.send()
    run.copy(EVERYTHING[5:7])
    run.connect()
    assert run.follower.changed().nonzero()[0].tolist() == [5, 6]
    run.send()
    assert equal(run)


def test_the_older_replica_stays_until_its_successor_is_complete(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.copy(EVERYTHING)
    first.send()
    second = Run(tmp_path, start="22" * 16, epoch=2)
    second.copy(EVERYTHING[:4])
    second.send(most=1)
    assert equal(first)
    assert (second.host / (RUN + SUCCESSOR)).exists()
    second.send()
    assert equal(second)
    assert sorted(path.name for path in second.host.iterdir()) == [RUN]
    with pytest.raises(Fenced, match="epoch 2"):
        first.connect()
    first.copy(EVERYTHING)
    with pytest.raises(Fenced):
        first.send()
    assert equal(second)


def test_what_a_process_of_this_host_has_taken_is_not_touched(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    run.send()
    taken = Arena.open_existing(run.host / RUN, run_id=RUN)
    assert taken is not None
    disown(taken.folder)
    before = taken.memory().tobytes()
    run.copy(EVERYTHING)
    with pytest.raises(Contention):
        run.send()
    taken.close()
    with pytest.raises(Fenced, match="taken"):
        run.send()
    with pytest.raises(Fenced, match="taken"):
        run.connect()
    assert taken.memory().tobytes() == before
    assert taken.intact().all()


def test_a_replica_that_a_command_reads_is_continued_afterwards(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    run.send()
    read = Arena.open_existing(run.host / RUN, run_id=RUN)
    assert read is not None
    run.copy(EVERYTHING)
    with pytest.raises(Contention):
        run.send()
    read.close()
    run.connect()
    assert run.send()
    assert equal(run)


def test_a_sender_whose_place_was_taken_sends_no_more(tmp_path: Path) -> None:
    """The replica of the next start is in the place of its arena: hand-overs there do not belong to its copies."""
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    assert run.send()
    place = run.arena.folder
    place.rename(place.with_name("aside"))
    Arena.create(place, LAYOUT, run_id=RUN, epoch=2).close()
    HandOverQueue(place).put(version=pack(2, 9), ids=EVERYTHING, whole="", extras={"step": 9})
    with pytest.raises(Fenced, match="taken the place"):
        run.send()
    run.check()
    assert HandOverQueue(run.host / RUN).numbers() == []


def test_a_replica_whose_folder_was_removed_is_not_made_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    run.send()
    taken = Arena.open_existing(run.host / RUN, run_id=RUN)
    assert taken is not None
    taken.remove()
    run.copy(EVERYTHING)
    with pytest.raises(Fenced):
        run.send()
    assert not (run.host / RUN).exists()


def test_without_room_nothing_is_taken(tmp_path: Path) -> None:
    huge = build_layout([("a", "parameter", (TensorSpec("", "F32", (1 << 44, 4)),))], rows={"a": 1 << 40})
    host = tmp_path / "west"
    host.mkdir(mode=0o700)
    text = json.dumps(huge.to_json(), separators=(",", ":")).encode()
    with pytest.raises(Unavailable) as caught:
        Replica.begin(host, RUN, text, Owner("east", "11" * 16, 1), 1, "")
    assert caught.value.kind == "arena-full"
    assert [path for path in host.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_room_that_others_take_meanwhile_is_said_and_given_back(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first copies, or at the end, for rows that nothing was written to."""
    run = Run(tmp_path)
    run.copy(EVERYTHING[:-2])

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(Unavailable, match=r"No space|are free") as caught:
            run.send()
    assert caught.value.kind == "arena-full"
    assert [path for path in run.host.rglob("*") if path.is_file()] == []
    run.connect()
    assert run.send()
    assert equal(run)


@pytest.mark.parametrize("run", ["../x-1", "ab" * 16, "ab" * 16 + ".aside-1", "", "ab" * 16 + "-1/../../x"])
def test_only_runs_of_ranks_have_replicas(tmp_path: Path, run: str) -> None:
    with pytest.raises(Corruption):
        Replica.begin(tmp_path, run, b"{}", Owner("east", "11" * 16, 1), 1, "")
    assert list(tmp_path.iterdir()) == []


@given(st.binary(max_size=200))
def test_a_layout_that_is_none_is_refused(
    data: bytes,
) -> None:
    with pytest.raises(ScarError):
        Replica.begin(Path("/nonexistent"), RUN, data, Owner("east", "11" * 16, 1), 1, "")
