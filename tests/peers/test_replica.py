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
from scarctl.arena.extras import read_extras
from scarctl.arena.header import EXTRAS, FILE
from scarctl.arena.owner import Owner, disown, read_owner
from scarctl.errors import Contention, Corruption, Fenced, ScarError, Unavailable
from scarctl.peers import follower as followers
from scarctl.peers.follower import Follower
from scarctl.peers.frames import Kind
from scarctl.peers.replica import SUCCESSOR, Replica
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import pack, step_of
from tests.daemon.rig import acknowledge, copy_into, small_layout, values
from tests.support.frames import deliver

pytestmark = pytest.mark.leaves_arena
RUN = "ab" * 16 + "-3"
LAYOUT = small_layout()
EVERYTHING = np.arange(LAYOUT.partitions)
NOT_EMPTY = np.flatnonzero(LAYOUT.partition_bytes)


class Run:
    """An owner's arena, its peer's replica, and the expected bytes of every state."""

    def __init__(self, folder: Path, start: str = "11" * 16, epoch: int = 1) -> None:
        self.start, self.host = start, folder / "west"
        place = folder / f"east{epoch}" / RUN
        place.parent.mkdir(parents=True)
        place.parent.chmod(0o700)
        self.host.mkdir(mode=0o700, exist_ok=True)
        self.arena = Arena.create(place, LAYOUT, run_id=RUN, epoch=epoch)
        self.arena.close()  # the lock, which no other process takes
        self.step = 0
        self.wholes: dict[str, bytes] = {}
        """Bytes of the named whole states."""
        self.hurried = False
        """Whether a round in another order was the newest that brought copies."""
        self.connect()

    def copy(self, ids: Any, *, flush: bool = True) -> bool:
        """Bring memory up to another step, in which these have changed, or all at first. Bytes show the step."""
        ids = ids if self.arena.intact().all() else EVERYTHING
        version, name = pack(self.arena.epoch, self.step + 1), uuid.uuid4().hex
        extras = {"step": self.step + 1}
        if not copy_into(self.arena, ids, version, self.step + 1, whole=name, extras=extras, flush=flush):
            return False
        self.step += 1
        self.wholes[name] = self.arena.slot.memory().tobytes()
        self.arena.reach(self.step)
        return True

    def connect(self, **options: int) -> None:
        owner = Owner("east", self.start, self.arena.base_epoch)
        self.replica = Replica.begin(self.host, RUN, self.arena.layout_json(), owner, self.arena.epoch, "")
        self.follower = Follower(self.arena, **options)
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
        assert self.follower.ended == (kind is Kind.MARK) or self.follower.rank is not None
        self.hurried &= not self.follower.ended
        return self.follower.ended

    def hurry(self, most: int = 1 << 30) -> bool:
        """Send a round like `send`, in another order, with few copies in a frame."""
        self.connect(most=64)
        self.follower.rank = EVERYTHING[::-1].copy()
        self.hurried = True
        return self.send(most)

    def seal(self) -> None:
        """Note that the store has everything."""
        arena = self.arena
        acknowledge(arena, EVERYTHING)
        arena.seal(arena.slot.head)
        arena.keep(arena.slot.moment)

    def there(self) -> Arena:
        """Return the arena that the peer would give back."""
        found = Arena.share(self.host / RUN, run_id=RUN)
        assert found is not None
        return found

    def take(self) -> Arena:
        """Open the replica as a process of the peer's host does."""
        found = Arena.open_existing(self.host / RUN, run_id=RUN)
        assert found is not None
        return found

    def check(self) -> None:
        """Check that recovery would find a true state."""
        if not (self.host / RUN / FILE).exists():
            return
        found = self.there()
        assert found.intact().all()
        for i in NOT_EMPTY.tolist():
            assert values(found, i) == {step_of(int(found.version[i])) % 251}
        assert (step_of(found.version) <= self.step).all()
        extras = read_extras(found)
        assert extras is not None
        assert extras.tree == {"step": step_of(extras.version)}
        if found.whole:
            assert found.slot.memory().tobytes() == self.wholes[found.whole], "it is called whole, and is not"
        assert found.whole or self.hurried, "it is of one state"
        older = found.spare
        assert not older.whole or older.memory().tobytes() == self.wholes[older.whole], "it is being written"
        found.close()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run whose peer has its first state."""
    made = Run(tmp_path)
    made.copy(EVERYTHING)
    assert made.send()
    return made


def equal(run: Run) -> bool:
    """Return whether the replica equals the owner's arena."""
    found, mine = run.there(), run.arena
    return (
        bool((found.moments == mine.moments).all() and (found.saved == mine.saved).all())
        and bool((found.version == mine.version).all() and (found.durable == mine.durable).all())
        and found.slot.memory().tobytes() == mine.slot.memory().tobytes()
        and (found.head_step, found.epoch, found.sealed, found.kept)
        == (mine.head_step, mine.epoch, mine.sealed, mine.kept)
        and (found.slot.moment, found.slot.head, found.whole)
        == (mine.slot.moment, mine.slot.head, mine.whole)
        and read_extras(found) == read_extras(mine)
    )


def test_a_round_brings_everything(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    run.arena.encoding_error[5] = 0.5  # of the owner's store, which the next owner reads itself
    assert not (run.host / RUN).exists()
    assert run.send()
    assert equal(run)
    assert (run.there().encoding_error == -1).all(), "its copies are exact"
    assert read_owner(run.host / RUN) == Owner("east", run.start, 1)
    run.copy(EVERYTHING[3:5])
    run.seal()
    assert run.send()
    assert equal(run)


IDS = st.sets(st.integers(0, LAYOUT.partitions - 1), min_size=1).map(sorted).map(np.array)
ACTIONS = st.one_of(
    st.tuples(st.just("copy"), IDS),
    st.tuples(st.just("seal"), st.none()),
    st.tuples(st.just("acknowledge"), IDS),
    st.tuples(st.just("send"), st.integers(0, 6)),
    st.tuples(st.just("send"), st.none()),
    st.tuples(st.just("hurry"), st.integers(0, 30)),
    st.tuples(st.just("send meanwhile"), st.tuples(IDS, st.booleans())),
    st.tuples(st.just("connect"), st.none()),
)


@given(actions=st.lists(ACTIONS, max_size=25))
def test_any_actions_cut_anywhere(
    actions: list[tuple[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = Run(tmp_path_factory.mktemp("run"))
    run.copy(EVERYTHING)
    for action, about in actions:
        if action == "copy":
            run.copy(about)
        elif action == "seal":
            run.seal()
        elif action == "acknowledge":
            acknowledge(run.arena, about)
        elif action == "connect":
            run.connect()
        elif action == "hurry":
            run.hurry(about)
            run.check()
            run.connect()
        elif action == "send meanwhile":
            ids, flush = about
            for _ in range(2):
                run.send(
                    meanwhile=lambda ids=ids, flush=flush: [run.copy(ids, flush=flush) for _ in range(2)]
                )
                run.check()
        elif about is None:
            assert run.send()
            assert equal(run)
        else:
            run.send(about)
            run.connect()  # undelivered frames mean a lost connection
        run.check()
    assert run.send()
    assert equal(run)


def test_a_slot_that_is_being_written_has_no_name(tmp_path: Path) -> None:
    """It has copies of several states, and stays so if this host dies before the mark."""
    run = Run(tmp_path)
    for step in range(3):
        assert run.copy(EVERYTHING[step:])
        if step < 2:
            assert run.send()
    assert run.replica.arena.spare.whole
    run.check()
    assert not run.send(most=1)
    assert not run.replica.arena.spare.whole
    run.check()


def test_a_flush_ends_a_round_without_a_mark(run: Run) -> None:
    """What was sent remains, and the next round sends the rest."""
    run.copy(EVERYTHING[2:4])
    assert not run.send(meanwhile=lambda: [run.copy(EVERYTHING[5:6]) for _ in range(2)])
    run.check()
    found = run.there()
    assert step_of(found.slot.head) == 1
    assert run.follower.changed().nonzero()[0].tolist() == [5]
    assert run.send()
    assert equal(run)


def test_in_another_order_each_frame_is_followed_by_a_mark(run: Run) -> None:
    run.copy(EVERYTHING)
    assert not run.hurry(most=4)
    found = run.there()
    assert set(step_of(found.version).tolist()) == {1, 2}
    assert not found.whole
    run.check()
    run.connect()
    assert run.send()
    assert equal(run)


@pytest.mark.parametrize("extras", ["own", "none", "withheld"])
@pytest.mark.parametrize("hurry", [True, False])
def test_a_state_never_has_the_extras_of_another(
    run: Run, extras: str, hurry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.copy(EVERYTHING)
    if extras == "none":
        (run.arena.folder / EXTRAS[run.arena.current]).unlink()
    elif extras == "withheld":
        monkeypatch.setattr(followers, "MAX_BODY", 100)
    assert run.hurry() if hurry else run.send()
    found = read_extras(run.replica.arena)
    assert found is not None
    assert (step_of(found.version), found.tree) == (2, {"step": 2} if extras == "own" else None)
    assert found.whole == ("" if extras == "withheld" else run.arena.whole)
    assert run.send()
    assert read_extras(run.replica.arena) == found, "nothing was new"


def test_an_older_slot_that_another_sender_holds_is_not_called_saved(tmp_path: Path) -> None:
    """The store has the newer state already. A replica that said so could not be opened."""
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    with run.arena.held(60):
        run.copy(EVERYTHING[:3], flush=False)
        run.seal()
        for frame in run.follower.round():
            deliver(run.replica, frame)
        assert not run.follower.ended, "memory has a newer state"
    found = run.take()
    assert (found.slot.moment, found.kept, found.lacking()) == (1, 0, True)
    found.close()
    assert run.send()
    assert equal(run)


def test_a_new_connection_sends_only_what_has_changed(run: Run) -> None:
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
    second.copy(EVERYTHING)
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


def test_what_a_process_of_this_host_has_taken_is_not_touched(run: Run) -> None:
    taken = run.take()
    disown(taken.folder)
    before = taken.slot.memory().tobytes()
    run.copy(EVERYTHING)
    with pytest.raises(Contention):
        run.send()
    taken.close()
    with pytest.raises(Fenced, match="taken"):
        run.send()
    with pytest.raises(Fenced, match="taken"):
        run.connect()
    assert taken.slot.memory().tobytes() == before
    assert taken.intact().all()


def test_a_replica_that_a_command_reads_is_continued_afterwards(run: Run) -> None:
    read = run.take()
    run.copy(EVERYTHING)
    with pytest.raises(Contention):
        run.send()
    read.close()
    run.connect()
    assert run.send()
    assert equal(run)


def test_a_sender_whose_place_was_taken_sends_no_more(run: Run) -> None:
    """The replica of the next start is in the place of its arena: extras there do not belong to its copies."""
    place = run.arena.folder
    place.rename(place.with_name("aside"))
    Arena.create(place, LAYOUT, run_id=RUN, epoch=2).close()
    with pytest.raises(Fenced, match="taken the place"):
        run.send()
    run.check()


def test_a_replica_whose_folder_was_removed_is_not_made_again(run: Run) -> None:
    taken = run.take()
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
    run.copy(EVERYTHING)

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
