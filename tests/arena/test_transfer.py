"""Test that an arena moves to another host completely, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.arena import folder as folders
from scarctl.arena.arena import Arena
from scarctl.arena.extras import read_extras
from scarctl.arena.folder import arena_folder
from scarctl.arena.header import FILE
from scarctl.arena.kinship import ASIDE, put_aside
from scarctl.arena.stale import reap
from scarctl.arena.transfer import INCOMING, Incoming, Outgoing, sweep_incoming
from scarctl.arena.view import ArenaView
from scarctl.errors import Contention, Corruption, Unavailable
from scarctl.state.version import pack, step_of
from scarctl.store import Store
from tests.daemon.rig import copy_into, small_layout
from tests.support.ranks import belong

pytestmark = pytest.mark.leaves_arena
LAYOUT = small_layout()
EVERYTHING = np.arange(LAYOUT.partitions)
NO_GAP = (0, 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.create(str(tmp_path / "store"), shards=2)
    yield store
    store.close()


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[str, str]:
    for name in ("east", "west"):
        (tmp_path / name).mkdir()
    return str(tmp_path / "east"), str(tmp_path / "west")


def leave(store: Store, host: str, step: int, *, before: int = 0) -> np.ndarray[Any, Any]:
    """Create the arena of a dead process with all of `step`; return the bytes of its first tensor.

    before: so many earlier steps were copied, too.
    """
    arena = Arena.create(arena_folder(host, store.run_id), LAYOUT, run_id=store.run_id, epoch=1)
    for past in range(step - before, step + 1):
        assert copy_into(arena, EVERYTHING, pack(1, past), past, extras={"step": past})
    belong(arena, store)
    rows = arena.rows(0, 0).copy()
    arena.close()
    return rows


def folder_of(store: Store, host: str) -> Path:
    return arena_folder(host, store.run_id)


def step_of_arena(store: Store, host: str, *, in_use: bool = False) -> int:
    """Return the step of all copies in the arena on a host. in_use: a process holds its lock."""
    folder = folder_of(store, host)
    find = Arena.share if in_use else Arena.open_existing
    arena = find(folder, run_id=store.run_id)
    assert arena is not None
    (version,) = set(arena.version.tolist())
    arena.close()
    return step_of(version)


def sending(store: Store, host: str) -> Outgoing:
    outgoing = Outgoing.open(store, host)
    assert outgoing is not None
    return outgoing


def arena_of(store: Store, host: str) -> Arena:
    """Open the arena on a host."""
    arena = Arena.open_existing(folder_of(store, host), run_id=store.run_id)
    assert arena is not None
    return arena


def receive(outgoing: Outgoing, store: Store, host: str) -> Incoming:
    """Begin to receive an arena, with its small files."""
    incoming = Incoming(store, host, outgoing.size, outgoing.files_size, outgoing.gap)
    files = list(outgoing.files())
    assert len(files) == outgoing.count
    for name, data in files:
        incoming.keep(name, data)
    return incoming


def move(
    outgoing: Outgoing, incoming: Incoming, *, damage: bool = False, chunk: int = 5000, **install: Any
) -> None:
    for at in range(0, outgoing.size, chunk):
        data = outgoing.read(at, min(chunk, outgoing.size - at))
        if damage and at:
            data[0] ^= 1
        incoming.write(at, data)
    incoming.install(outgoing.digest(), **install)


@contextlib.contextmanager
def transfer(
    store: Store, hosts: tuple[str, str], target: Store | None = None
) -> Iterator[tuple[Outgoing, Incoming]]:
    """Yield both ends of a transfer from East to West, which has received the small files."""
    outgoing = sending(store, hosts[0])
    incoming = receive(outgoing, target or store, hosts[1])
    yield outgoing, incoming
    outgoing.close()
    incoming.close()


@pytest.mark.parametrize("there", [False, True])
def test_it_arrives_as_it_was(store: Store, hosts: tuple[str, str], there: bool) -> None:
    east, west = hosts
    rows = leave(store, east, 7)
    if there:
        leave(store, west, 3)
    with transfer(store, hosts) as (outgoing, incoming):
        move(outgoing, incoming)
    folder, arena = folder_of(store, west), arena_of(store, west)
    assert set(arena.version) == {pack(1, 7)}
    assert arena.intact().all()
    np.testing.assert_array_equal(arena.rows(0, 0), rows)
    found = read_extras(arena)
    assert found is not None
    assert found.tree == {"step": 7}
    assert folder.with_name(folder.name + ASIDE).exists() == there
    arena.close()


@pytest.mark.parametrize("fault", ["damaged", "shorter", "another run"])
def test_what_did_not_arrive_whole_is_not_used(
    store: Store, hosts: tuple[str, str], fault: str, tmp_path: Path
) -> None:
    east, west = hosts
    leave(store, east, 7)
    target = Store.create(str(tmp_path / "other"), shards=2) if fault == "another run" else store
    with transfer(store, hosts, target) as (outgoing, incoming):
        if fault == "shorter":
            os.truncate(arena_folder(east, store.run_id) / FILE, outgoing.size // 2)
        with pytest.raises(Corruption):
            move(outgoing, incoming, damage=fault == "damaged")
    assert Arena.open_existing(arena_folder(west, target.run_id), run_id=target.run_id) is None
    if target is not store:
        target.close()


@pytest.mark.parametrize("current", [0, 1])
def test_only_the_current_slot_is_sent(store: Store, hosts: tuple[str, str], current: int) -> None:
    """The other one is blank on the other host: half of the bytes, which a restart waits for, are enough."""
    east, west = hosts
    rows = leave(store, east, 7, before=1 + current)
    there = arena_of(store, east)
    assert (there.current, step_of(int(there.spare.version[0]))) == (current, 6)
    state = there.slot.memory().tobytes()
    there.close()
    whole = (folder_of(store, east) / FILE).stat().st_size
    outgoing = sending(store, east)
    assert sum(name.startswith("extras") for name, _ in outgoing.files()) == 1
    outgoing.close()
    with transfer(store, hosts) as (outgoing, incoming):
        assert outgoing.size == whole - len(state)
        move(outgoing, incoming, chunk=997)
    arena = arena_of(store, west)
    assert (folder_of(store, west) / FILE).stat().st_size == whole
    assert arena.slot.memory().tobytes() == state
    np.testing.assert_array_equal(arena.rows(0, 0), rows)
    assert not arena.spare.intact().any()
    assert (arena.spare.moment, read_extras(arena, arena.spare.number)) == (0, None)
    assert copy_into(arena, EVERYTHING[:2], pack(1, 8), 8)
    assert arena.intact().all()
    arena.close()


def test_another_slot_than_announced_is_refused(store: Store, hosts: tuple[str, str]) -> None:
    leave(store, hosts[0], 7)
    outgoing = sending(store, hosts[0])
    at, size = outgoing.gap
    gap = at - size if at > outgoing.size - size else at + size, size
    incoming = Incoming(store, hosts[1], outgoing.size, outgoing.files_size, gap)
    for name, data in outgoing.files():
        incoming.keep(name, data)
    with pytest.raises(Corruption, match="another slot"):
        move(outgoing, incoming)
    outgoing.close()
    incoming.close()
    assert not folder_of(store, hosts[1]).exists()


@pytest.mark.parametrize("size", [1 << 50, 1 << 60, 1 << 62])
def test_more_than_there_is_room_for_is_refused_before_the_first_byte(
    store: Store, hosts: tuple[str, str], size: int
) -> None:
    leave(store, hosts[1], 3)
    for sizes in ((size, 0, NO_GAP), (1000, size, NO_GAP), (1000, 0, (500, size))):
        with pytest.raises(Unavailable, match=r"bytes in .*, .* are free") as caught:
            Incoming(store, hosts[1], *sizes)
        assert caught.value.kind == "arena-full"
    assert step_of_arena(store, hosts[1]) == 3
    assert [path.name for path in folder_of(store, hosts[1]).parent.iterdir()] == [store.run_id]


@pytest.mark.parametrize(
    ("name", "size"),
    [("../x", 1), ("arena", 1), ("owner", 1), ("extras-2.safetensors", 1), ("line", 101), ("line\n", 1)],
)
def test_other_files_than_those_of_an_arena_are_refused(
    store: Store, hosts: tuple[str, str], name: str, size: int
) -> None:
    incoming = Incoming(store, hosts[1], 1000, 100, NO_GAP)
    with pytest.raises(Corruption):
        incoming.keep(name, bytes(size))
    incoming.close()
    assert [path.name for path in folder_of(store, hosts[1]).parent.iterdir()] == []


def test_more_bytes_than_announced_are_refused(store: Store, hosts: tuple[str, str]) -> None:
    """The second piece would lie behind the file's end."""
    leave(store, hosts[0], 7)
    with transfer(store, hosts) as (outgoing, incoming):
        incoming.write(0, outgoing.read(0, outgoing.size))
        more = np.zeros(5, np.uint8)
        outgoing._digest.update(more)
        incoming.write(outgoing.size, more)
        with pytest.raises(Corruption):
            incoming.install(outgoing.digest())
    assert not folder_of(store, hosts[1]).exists()


def test_extras_that_are_too_large_are_left_out(
    store: Store, hosts: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    east, west = hosts
    leave(store, east, 7)
    arena = arena_of(store, east)
    outgoing = Outgoing(arena, most=100)
    assert len(outgoing.withheld) == 1
    assert "too large" in caplog.text
    incoming = receive(outgoing, store, west)
    move(outgoing, incoming)
    outgoing.close()
    incoming.close()
    arena.close()
    assert step_of_arena(store, west) == 7
    assert not list(folder_of(store, west).glob("extras-*"))


@pytest.mark.parametrize("fault", ["damaged", "cut", "refused", "versions"])
def test_the_older_arena_stays_until_the_new_one_is_verified(
    store: Store, hosts: tuple[str, str], fault: str
) -> None:
    """A transfer that fails leaves this host's own arena as it was, extras included."""
    east, west = hosts
    leave(store, east, 7)
    leave(store, west, 3)
    if fault == "versions":
        broken = arena_of(store, east)
        broken.durable[0] = -7
        broken.close()
    before = {path.name: path.read_bytes() for path in folder_of(store, west).iterdir()}
    with transfer(store, hosts) as (outgoing, incoming):
        if fault == "cut":
            incoming.write(0, outgoing.read(0, 5000))
        elif fault == "refused":
            with pytest.raises(Corruption, match="another one"):
                move(outgoing, incoming, check=_refuse)
        else:
            with pytest.raises(Corruption):
                move(outgoing, incoming, damage=fault == "damaged")
    assert {path.name: path.read_bytes() for path in folder_of(store, west).iterdir()} == before
    assert [path.name for path in folder_of(store, west).parent.iterdir()] == [store.run_id]
    assert step_of_arena(store, west) == 3


def _refuse(_: ArenaView) -> None:
    raise Corruption("it is another one")


@pytest.mark.parametrize("at_once", [True, False])
def test_the_older_arena_stays_if_the_new_one_cannot_take_its_place(
    store: Store, hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """at_once: whether the file system can exchange two folders."""
    if not at_once:
        monkeypatch.setattr("scarctl.util.exchange.exchange", lambda first, second: False)
    east, west = hosts
    leave(store, east, 7)
    leave(store, west, 3)
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if str(source).endswith(INCOMING):
            raise OSError(errno.EIO, "input/output error")
        rename(source, target)

    with transfer(store, hosts) as (outgoing, incoming):
        monkeypatch.setattr(os, "rename", fail)
        with pytest.raises(Unavailable):
            move(outgoing, incoming)
    assert step_of_arena(store, west) == 3
    assert [path.name for path in folder_of(store, west).parent.iterdir()] == [store.run_id]


@pytest.mark.parametrize("death", [1, 2])
def test_a_process_that_is_killed_leaves_an_arena_in_the_place(
    store: Store, hosts: tuple[str, str], death: int
) -> None:
    """It is killed right before each of its renames, or after the last."""
    east, west = hosts
    leave(store, east, 7)
    leave(store, west, 3)
    child = os.fork()
    if not child:
        try:
            outgoing = sending(store, east)
            incoming = receive(outgoing, store, west)
            rename, left = os.rename, [1 + death]  # the first one names the received file

            def dying(source: Path, target: Path) -> None:
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                rename(source, target)

            os.rename = dying  # type: ignore[assignment]
            move(outgoing, incoming)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    sweep_incoming(folder_of(store, west).parent)
    assert step_of_arena(store, west) == 7


def test_an_arena_that_was_set_aside_makes_room(
    store: Store, hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena in its place does not."""
    east, west = hosts
    leave(store, east, 7)
    leave(store, west, 2)
    aside = put_aside(folder_of(store, west))
    leave(store, west, 3)
    monkeypatch.setattr(folders, "_free_bytes", lambda _: 1 << 40 if not aside.exists() else 0)
    outgoing = sending(store, east)
    incoming = receive(outgoing, store, west)
    assert not aside.exists()
    assert step_of_arena(store, west, in_use=True) == 3
    monkeypatch.setattr(folders, "_free_bytes", lambda _: 0)
    incoming.close()
    with pytest.raises(Unavailable):
        receive(outgoing, store, west)
    assert step_of_arena(store, west) == 3
    outgoing.close()


def test_what_a_killed_process_was_receiving_is_swept(store: Store, hosts: tuple[str, str]) -> None:
    east, west = hosts
    leave(store, east, 7)
    outgoing = sending(store, east)
    place = folder_of(store, west)
    left = place.with_name(place.name + INCOMING)
    incoming = receive(outgoing, store, west)
    sweep_incoming(place.parent)
    assert left.exists()  # it is being received
    incoming.write(0, outgoing.read(0, 100))
    for fd in (incoming._lock, incoming._growing_lock, incoming._fd):
        os.close(fd)  # as the system does for a killed process
    again = receive(outgoing, store, west)
    assert sorted(path.name for path in left.iterdir()) == sorted(
        [".arena-received", *(name for name, _ in outgoing.files())]
    )
    again.close()
    left.mkdir(mode=0o700)
    (left / ".arena-received").write_bytes(b"x")
    assert reap(place.parent) == []
    assert not left.exists()
    outgoing.close()


def test_an_arena_in_use_is_neither_sent_nor_replaced(store: Store, hosts: tuple[str, str]) -> None:
    east, west = hosts
    leave(store, east, 7)
    outgoing = sending(store, east)
    with pytest.raises(Contention):
        Outgoing.open(store, east)
    with pytest.raises(Contention):
        Incoming(store, east, outgoing.size, outgoing.files_size, outgoing.gap)
    outgoing.close()
    assert Outgoing.open(store, west) is None
