"""Test that a replica may be older than the store only by records of its own term, and belongs to no other history."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.arena.header import FILE
from scarctl.arena.kinship import ASIDE, view_of
from scarctl.arena.owner import Owner, read_owner, write_owner
from scarctl.arena.stale import DAY, reap, survey
from scarctl.state.version import pack, step_of
from scarctl.store import Store
from tests.arena.test_kinship import EVERYTHING, Host
from tests.daemon.rig import copy_into

pytestmark = pytest.mark.leaves_arena
OWNER = Owner("east", "11" * 16, 1)
HALF, REST = EVERYTHING[::2], EVERYTHING[1::2]


@pytest.fixture(autouse=True)
def hosts(tmp_path: Path) -> None:
    for name in ("east", "west", "north"):
        (tmp_path / name).mkdir()


def send(host: Host, base: Path, *, owner: Owner | None = OWNER) -> Path:
    """Send a host's memory to a peer, as it is at this moment."""
    place = arena_folder(str(base), host.store.run_id)
    place.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    shutil.copytree(host.folder, place)
    arena = Arena.share(place, run_id=host.store.run_id)
    assert arena is not None
    arena.take_over(0)
    if owner is not None:
        write_owner(place, owner)
    return place


def lose(host: Host) -> None:
    """Remove the host's memory."""
    shutil.rmtree(host.die())


def copy(host: Host, ids: np.ndarray, step: int, *, wait: bool) -> None:
    version = pack(host.arena.epoch, step)
    assert copy_into(host.arena, ids, version, step, extras={"step": step}, flush=True)
    host.arena.reach(step)
    host.arena.ask(ids=ids)
    if wait:
        host.saver.notify()
        assert host.saver.drain(20), host.saver.fault()


@pytest.mark.parametrize("starts", [0, 2])
def test_the_store_has_gone_on(tmp_path: Path, starts: int) -> None:
    """starts: of processes that began an epoch on a third host, and were lost with it before they saved."""
    host = Host(tmp_path / "store", tmp_path / "east")
    host.save(2)
    host.saver.stop()
    copy(host, HALF, 3, wait=False)
    place = send(host, tmp_path / "west")
    host.saver.resume()
    copy(host, REST, 4, wait=True)
    lose(host)
    for _ in range(starts):
        lose(Host(tmp_path / "store", tmp_path / "north"))
    with contextlib.closing(Store.open(str(tmp_path / "store"))) as store:
        seen = view_of(str(tmp_path / "west"), store)
        assert seen is not None
        assert seen.head_step == 3
    again = Host(tmp_path / "store", tmp_path / "west")
    assert again.arena.folder == place
    # Copies that are newer in the store do not count; the others are the newest that exist.
    intact = again.arena.intact()
    assert intact[HALF].all()
    assert (step_of(again.arena.version[HALF]) == 3).all()
    assert not intact[REST].any()
    assert read_owner(place) is None
    again.die()


def test_another_process_has_saved_since(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = Host(tmp_path / "store", tmp_path / "east")
    host.save(2)
    place = send(host, tmp_path / "west")
    host.save(3)
    lose(host)
    third = Host(tmp_path / "store", tmp_path / "north")
    third.save(1)
    lose(third)
    lose(Host(tmp_path / "store", tmp_path / "north"))  # begins an epoch, and changes nothing
    with contextlib.closing(Store.open(str(tmp_path / "store"))) as store:
        assert view_of(str(tmp_path / "west"), store) is None
    assert f"{tmp_path / 'store'}: the copy of east's memory on this host is not shown" in caplog.text
    again = Host(tmp_path / "store", tmp_path / "west")
    assert not (again.arena.version >= 0).any(), "an abandoned future came back"
    assert place.with_name(place.name + ASIDE).exists()
    again.die()


@pytest.mark.parametrize("how", ["rolled back", "an older backup", "an older copy of its own memory"])
def test_what_is_of_another_history_is_not_used(tmp_path: Path, how: str) -> None:
    host = Host(tmp_path / "store", tmp_path / "east")
    host.save(2)
    seq = host.store.state(0).seq
    if how == "an older copy of its own memory":
        send(host, tmp_path / "west", owner=None)
    shutil.copytree(tmp_path / "store", tmp_path / "backup")
    host.save(3)
    if how != "an older copy of its own memory":
        send(host, tmp_path / "west")
    if how == "rolled back":
        host.saver.stop()
        host.saver.roll_back(seq)
    lose(host)
    if how == "an older backup":
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "backup").rename(tmp_path / "store")
    again = Host(tmp_path / "store", tmp_path / "west")
    assert not (again.arena.version >= 0).any()
    again.die()


def test_a_replica_goes_a_day_after_its_last_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path / "store", tmp_path / "east")
    host.save(2)
    host.saver.stop()
    copy(host, HALF, 3, wait=False)
    place = send(host, tmp_path / "west")
    lose(host)
    (seen,) = survey(place.parent)
    assert (seen.owner, seen.expired, seen.durable) == ("east", False, False)
    assert reap(place.parent) == []
    now = os.stat(place).st_mtime
    monkeypatch.setattr("scarctl.arena.stale.time.time", lambda: now + DAY + 1)
    monkeypatch.setattr("scarctl.arena.stale._uptime", lambda: DAY + 1)
    assert [Path(arena.folder) for arena in reap(place.parent, older_than=DAY)] == [place]
    assert not place.exists()
    assert not (place / FILE).exists()
