"""Test that an arena moves to another host completely, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.arena.header import FILE
from scarctl.arena.kinship import ASIDE
from scarctl.arena.queue import HandOverQueue
from scarctl.arena.transfer import Incoming, Outgoing
from scarctl.errors import Contention, Corruption, ScarError
from scarctl.state.version import pack
from scarctl.store import Store
from tests.daemon.rig import fill, small_layout

pytestmark = pytest.mark.leaves_arena
LAYOUT = small_layout()
EVERYTHING = np.arange(LAYOUT.partitions)


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


def leave(store: Store, host: str, step: int) -> np.ndarray[Any, Any]:
    """Create the arena of a dead process that has handed over all of `step`; return the bytes of its first tensor."""
    arena = Arena.create(arena_folder(host, store.run_id), LAYOUT, run_id=store.run_id, epoch=1)
    arena.begin(EVERYTHING)
    fill(arena, EVERYTHING, step)
    arena.end(EVERYTHING, pack(1, step))
    arena.begin_lines(store.lines())
    HandOverQueue(arena.folder).put(version=pack(1, step), ids=EVERYTHING, extras={"step": step})
    rows = arena.rows(0, 0).copy()
    arena.close()
    return rows


def move(outgoing: Outgoing, incoming: Incoming, *, damage: bool = False, chunk: int = 5000) -> None:
    for at in range(0, outgoing.size, chunk):
        data = outgoing.read(at, min(chunk, outgoing.size - at))
        if damage and at:
            data[0] ^= 1
        incoming.write(at, data)
    incoming.install(outgoing.digest())


@pytest.mark.parametrize("there", [False, True])
def test_it_arrives_as_it_was(store: Store, hosts: tuple[str, str], there: bool) -> None:
    east, west = hosts
    rows = leave(store, east, 7)
    if there:
        leave(store, west, 3)
    outgoing = Outgoing.open(store, east)
    assert outgoing is not None
    incoming = Incoming(store, west, outgoing.head())
    move(outgoing, incoming)
    outgoing.close()
    incoming.close()
    folder = arena_folder(west, store.run_id)
    arena = Arena.open_existing(folder, run_id=store.run_id)
    assert arena is not None
    assert set(arena.version) == {pack(1, 7)}
    assert arena.intact().all()
    np.testing.assert_array_equal(arena.rows(0, 0), rows)
    assert [handover.extras for handover in HandOverQueue(folder).pending()] == [{"step": 7}]
    assert folder.with_name(folder.name + ASIDE).exists() == there
    arena.close()


@pytest.mark.parametrize("fault", ["damaged", "shorter", "another run"])
def test_what_did_not_arrive_whole_is_not_used(
    store: Store, hosts: tuple[str, str], fault: str, tmp_path: Path
) -> None:
    east, west = hosts
    leave(store, east, 7)
    outgoing = Outgoing.open(store, east)
    assert outgoing is not None
    target = Store.create(str(tmp_path / "other"), shards=2) if fault == "another run" else store
    incoming = Incoming(target, west, outgoing.head())
    if fault == "shorter":
        os.truncate(arena_folder(east, store.run_id) / FILE, outgoing.size // 2)
    with pytest.raises(Corruption):
        move(outgoing, incoming, damage=fault == "damaged")
    outgoing.close()
    incoming.close()
    assert Arena.open_existing(arena_folder(west, target.run_id), run_id=target.run_id) is None
    if target is not store:
        target.close()


@pytest.mark.parametrize(
    "head",
    [{}, {"size": -1}, {"size": 1 << 62}, {"size": True}, {"size": 9, "files": {"../x": b""}}],
    ids=str,
)
def test_what_is_no_arena_is_refused(store: Store, hosts: tuple[str, str], head: dict[str, Any]) -> None:
    with pytest.raises(ScarError):
        Incoming(store, hosts[1], head)
    assert not (arena_folder(hosts[1], store.run_id) / FILE).exists()


def test_an_arena_in_use_is_neither_sent_nor_replaced(store: Store, hosts: tuple[str, str]) -> None:
    east, west = hosts
    leave(store, east, 7)
    outgoing = Outgoing.open(store, east)
    assert outgoing is not None
    with pytest.raises(Contention):
        Outgoing.open(store, east)
    head = outgoing.head()
    with pytest.raises(Contention):
        Incoming(store, east, head)
    outgoing.close()
    assert Outgoing.open(store, west) is None
