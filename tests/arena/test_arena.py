"""Test the arena: copies, owners and space; a killed process leaves one whole state."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.arena import arena as module
from scarctl.arena.arena import Arena
from scarctl.arena.extras import read_extras
from scarctl.arena.folder import arena_folder
from scarctl.errors import Contention, Unavailable, UsageError
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import NEVER, pack, step_of
from tests.arena.arenas import ALL, LAYOUT, create, left_behind, reopen
from tests.daemon.rig import STORE_ID, acknowledge, copy_into, values

# -- copies ------------------------------------------------------------------------------------------------------


def test_a_new_arena_has_no_copies(place: Path) -> None:
    arena = create(place)
    assert not arena.intact().any()
    assert not arena.pending().any()
    assert (arena.version == NEVER).all()
    assert np.isnan(arena.distance).all()
    assert (arena.epoch, arena.pid) == (1, os.getpid())
    arena.remove()


def test_everything_is_found_again(place: Path) -> None:
    arena = create(place)
    assert copy_into(arena, ALL, pack(1, 5), 0)
    for g, group in enumerate(LAYOUT.groups):
        for t in range(len(group.tensors)):
            rows = arena.rows(g, t)
            rows[:] = np.arange(rows.size).reshape(rows.shape) % 256
    acknowledge(arena, ALL[:3])
    arena.distance[:] = 0.5
    arena.reach(8)
    arena.close()
    again = reopen(place)
    assert again is not None
    assert again.layout == LAYOUT
    assert again.head_step == 8
    assert again.intact().all()
    assert again.pending().tolist() == [False] * 3 + [True] * (LAYOUT.partitions - 3)
    assert (again.distance == 0.5).all()
    for g, group in enumerate(LAYOUT.groups):
        for t, spec in enumerate(group.tensors):
            rows = again.rows(g, t)
            assert rows.shape == (spec.rows, spec.row_bytes)
            assert (rows == np.arange(rows.size).reshape(rows.shape) % 256).all()
            assert rows.ctypes.data % 64 == 0
            if spec.rows >= 5:
                assert bytes(again.slot.source(g, t, 2, 5)) == rows[2:5].tobytes()
    again.remove()


def test_layouts_without_bytes() -> None:
    for specs in ([], [("e", "parameter", (TensorSpec("", "F32", (0, 4)),))]):
        arena = Arena.anonymous(build_layout(specs))
        assert arena.pending().shape == (0,)


# -- one owner ---------------------------------------------------------------------------------------------------


def test_one_owner_at_a_time(place: Path) -> None:
    arena = create(place)
    with pytest.raises(Contention, match="live process"):
        reopen(place)
    with pytest.raises(Contention):
        create(place)
    view = arena.rows(0, 0)  # keeps the map, and with it the file, open
    arena.close()
    again = reopen(place)
    assert again is not None
    with pytest.raises(Contention):
        reopen(place)
    assert view.shape
    arena.remove()  # closed: another process owns it by now
    assert (place / "arena").exists()
    again.remove()
    assert not place.exists()


def test_an_arena_that_nobody_uses_is_not_replaced(place: Path) -> None:
    left_behind(place)
    with pytest.raises(UsageError, match="already"):
        create(place)
    again = reopen(place)
    assert again is not None
    assert again.intact().all()
    again.remove()


def test_a_forked_child_does_not_keep_the_arena(place: Path) -> None:
    arena = create(place)
    view = arena.rows(0, 0)
    (ready, tell), (wait, end) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:  # a data loader's worker that outlives the training process
        arena.remove()
        os.write(tell, b".")
        os.close(end)
        os.read(wait, 1)
        os._exit(0 if view.shape else 1)
    try:
        os.read(ready, 1)
        assert (place / "arena").exists()
        arena.close()
        again = reopen(place)
        assert again is not None
        again.remove()
    finally:
        for fd in (ready, tell, wait, end):
            os.close(fd)
        os.waitpid(pid, 0)


def test_the_folder_may_vanish_before_it_is_locked(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last owner removes the folder between opening and locking it: the lock would protect nothing."""
    flock, calls = fcntl.flock, []

    def locked(fd: int, how: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            place.rmdir()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", locked)
    arena = create(place)
    assert len(calls) == 2
    assert (place / "arena").exists()
    arena.remove()


# -- making one --------------------------------------------------------------------------------------------------


def test_nobody_else_can_read_it(place: Path) -> None:
    old = os.umask(0)
    try:
        arena = create(place)
    finally:
        os.umask(old)
    assert (place / "arena").stat().st_mode & 0o777 == 0o600
    assert place.stat().st_mode & 0o777 == place.parent.stat().st_mode & 0o777 == 0o700
    arena.remove()


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_half_made_arena_is_never_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_header", interrupted)
        with pytest.raises(KeyboardInterrupt):
            create(place)
    assert reopen(place) is None
    (place / ".arena-new").write_bytes(b"left by a killed process")
    assert reopen(place) is None
    create(place).remove()


def test_files_without_their_arena_mean_nothing(place: Path) -> None:
    place.mkdir(parents=True, mode=0o700)
    place.parent.chmod(0o700)
    (place / "extras-0.safetensors").touch()
    arena = create(place)
    assert [p.name for p in place.iterdir()] == ["arena"]
    arena.remove()


def test_a_state_larger_than_the_disk(place: Path) -> None:
    huge = build_layout([("w", "parameter", (TensorSpec("", "F32", (1 << 38, 4)),))], by_layer=True)
    with pytest.raises(Unavailable, match=r"needs 8,796,093,\d+,\d+ bytes .* are free .*arena_dir") as caught:
        Arena.create(place, huge, run_id=STORE_ID, epoch=1)
    assert caught.value.kind == "arena-full"
    assert list(place.iterdir()) == []


def test_a_full_file_system(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Unavailable, match="arena_dir"):
        create(place)
    assert list(place.iterdir()) == []


def test_space_is_reserved_also_where_the_system_has_no_call_for_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    file = left_behind(place)
    assert file.stat().st_blocks * 512 >= file.stat().st_size
    again = reopen(place)
    assert again is not None
    again.remove()


# -- where it lies -----------------------------------------------------------------------------------------------


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    assert arena_folder(str(tmp_path), STORE_ID) == tmp_path / f"scarctl-{uid}" / STORE_ID
    if sys.platform == "linux":
        assert arena_folder(None, STORE_ID) == Path("/dev/shm") / f"scarctl-{uid}" / STORE_ID
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.warns(UserWarning, match="no shared memory"):
        assert arena_folder(None, STORE_ID).name == STORE_ID


def test_no_arena(tmp_path: Path, place: Path) -> None:
    assert reopen(place) is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Unavailable):
        create(tmp_path / "no" / "such" / "folder")


# -- a real kill -------------------------------------------------------------------------------------------------

COPIER = """
import sys, numpy as np
from pathlib import Path
from scarctl.arena.arena import Arena
from scarctl.state.version import pack
from tests.daemon.rig import STORE_ID, copy_into
from scarctl.state.layout import TensorSpec, build_layout
layout = build_layout([("w", "parameter", (TensorSpec("", "U8", (64, 1 << 15)),))], rows={"w": 2})
arena = Arena.create(Path(sys.argv[1]), layout, run_id=STORE_ID, epoch=1)
print("ready", flush=True)
step = 0
while True:
    step += 1
    ids = np.arange(layout.partitions) if step % 2 else np.arange(step % 8, layout.partitions, 8)
    copy_into(arena, ids, pack(1, step), step, extras={"step": step})
"""


def test_a_copier_that_is_killed_leaves_one_whole_state(tmp_path: Path) -> None:
    """What changed at the last step has its value, and the rest that of the step before."""
    torn = 0
    for round_ in range(6):
        place = tmp_path / str(round_) / "arena"
        place.parent.mkdir(mode=0o700)
        child = subprocess.Popen(
            [sys.executable, "-c", COPIER, place], stdout=subprocess.PIPE, cwd=os.getcwd()
        )
        assert child.stdout is not None
        with child:
            assert child.stdout.readline() == b"ready\n"
            time.sleep(0.05 + 0.013 * round_)
            child.send_signal(signal.SIGKILL)
        arena = reopen(place)
        assert arena is not None
        if not arena.slot.moment:
            arena.remove()
            continue
        step = step_of(arena.slot.head)
        found = read_extras(arena)
        assert found is not None
        assert (found.tree, found.version) == ({"step": step}, arena.slot.head)
        for i in range(arena.layout.partitions):
            new = bool(step % 2) or i % 8 == step % 8
            assert values(arena, i) == {(step if new else step - 1) % 251}
        torn += bool((arena.spare.moments != arena.moments).any() or not arena.spare.intact().all())
        arena.settle()
        assert (arena.spare.moments <= arena.slot.moment).all()
        arena.remove()
    assert torn, "no kill hit a copy: the test shows nothing"
