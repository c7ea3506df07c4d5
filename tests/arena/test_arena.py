"""Test the arena: copies, generations, owners and space; torn copies of a killed process are recognised."""

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
from hypothesis import given
from hypothesis import strategies as st

from scarctl.arena import arena as module
from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.errors import Contention, Unavailable, UsageError
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import NEVER, pack, step_of
from tests.arena.arenas import ALL, LAYOUT, create, left_behind, reopen
from tests.daemon.rig import STORE_ID, values

# -- copies ------------------------------------------------------------------------------------------------------


def test_a_new_arena_has_no_copies(place: Path) -> None:
    arena = create(place)
    assert not arena.intact().any()
    assert not arena.pending().any()
    assert (arena.version == NEVER).all()
    assert np.isnan(arena.distance).all()
    assert (arena.epoch, arena.pid) == (1, os.getpid())
    arena.remove()


def test_copies_that_a_moment_has_found_unchanged_are_of_its_step(place: Path) -> None:
    arena = create(place)
    arena.begin(ALL[1:])
    arena.end(ALL[1:], pack(1, 5))
    arena.acknowledge(ALL[1:2], pack(1, 5))
    arena.note_moment(pack(1, 8))
    arena.end(ALL[-1:], pack(1, 9))
    steps = [NEVER, *[8] * (ALL.size - 2), 9]
    assert step_of(arena.newest()).tolist() == step_of(np.array([NEVER])).tolist() + steps[1:]
    arena.unseal()
    assert arena.moment == NEVER
    assert step_of(arena.version[1:]).tolist() == steps[1:]
    assert np.flatnonzero(arena.pending()).tolist() == ALL[2:].tolist()
    arena.remove()


def test_everything_is_found_again(place: Path) -> None:
    arena = create(place)
    arena.begin(ALL)
    for g, group in enumerate(LAYOUT.groups):
        for t in range(len(group.tensors)):
            rows = arena.rows(g, t)
            rows[:] = np.arange(rows.size).reshape(rows.shape) % 256
    arena.end(ALL, pack(1, 5))
    arena.acknowledge(ALL[:3], pack(1, 5))
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
                assert bytes(again.source(g, t, 2, 5)) == rows[2:5].tobytes()
    again.remove()


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["begin", "end", "ack"]), st.sets(st.integers(0, 18)), st.integers(1, 3)),
        max_size=25,
    )
)
def test_generations_against_a_model(steps: list[tuple[str, set[int], int]]) -> None:
    arena = Arena.anonymous(LAYOUT)
    torn, version, durable = [False] * 19, [NEVER] * 19, [NEVER] * 19
    for what, chosen, step in steps:
        ids, v = np.array(sorted(chosen), dtype=np.int64), pack(1, step)
        if what == "ack":
            ids = ids[(arena.version[ids] == v) & arena.intact()[ids]]
            arena.acknowledge(ids, v, arena.generation[ids].copy())
        elif what == "begin":
            arena.begin(ids)
        else:
            ids = ids[(arena.generation[ids] & 1) == 1]  # what was not begun is not ended
            arena.end(ids, v)
        for i in ids.tolist():
            if what == "begin":
                torn[i] = True
            elif what == "end":
                torn[i], version[i] = False, v
                durable[i] = NEVER if durable[i] == v else durable[i]
            else:
                durable[i] = v
    assert arena.intact().tolist() == [not t and v >= 0 for t, v in zip(torn, version, strict=True)]
    assert arena.pending().tolist() == [v >= 0 and v != d for v, d in zip(version, durable, strict=True)]


def test_a_copy_that_was_never_ended_stays_torn_until_the_next_one_is(place: Path) -> None:
    arena = create(place)
    arena.begin(ALL[:1])
    arena.close()
    again = reopen(place)
    assert again is not None
    assert not again.intact()[0]
    again.begin(ALL[:1])
    assert not again.intact()[0]
    again.end(ALL[:1], pack(1, 1))
    assert again.intact()[0]
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


def test_hand_overs_without_their_arena_mean_nothing(place: Path) -> None:
    place.mkdir(parents=True, mode=0o700)
    place.parent.chmod(0o700)
    (place / f"handover-{1:020d}.safetensors").touch()
    arena = create(place)
    assert [p.name for p in place.iterdir()] == ["arena"]
    arena.remove()


def test_a_state_larger_than_the_disk(place: Path) -> None:
    huge = build_layout([("w", "parameter", (TensorSpec("", "F32", (1 << 38, 4)),))], by_layer=True)
    with pytest.raises(Unavailable, match=r"needs 4,398,046,\d+,\d+ bytes .* are free .*arena_dir") as caught:
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
from tests.daemon.rig import STORE_ID, fill
from scarctl.state.layout import TensorSpec, build_layout
layout = build_layout([("w", "parameter", (TensorSpec("", "U8", (64, 1 << 15)),))], rows={"w": 2})
arena = Arena.create(Path(sys.argv[1]), layout, run_id=STORE_ID, epoch=1)
print("ready", flush=True)
step = 0
while True:
    step += 1
    for first in range(0, layout.partitions, 8):
        ids = np.arange(first, first + 8)
        arena.begin(ids)
        fill(arena, ids, step)
        arena.end(ids, pack(1, step))
"""


def test_a_copier_that_is_killed_spoils_only_what_it_was_copying(tmp_path: Path) -> None:
    torn = 0
    for round_ in range(5):
        place = tmp_path / str(round_) / "arena"
        place.parent.mkdir(mode=0o700)
        child = subprocess.Popen(
            [sys.executable, "-c", COPIER, place], stdout=subprocess.PIPE, cwd=os.getcwd()
        )
        assert child.stdout is not None
        with child:
            child.stdout.readline()
            time.sleep(0.02 + 0.013 * round_)
            child.send_signal(signal.SIGKILL)
        arena = reopen(place)
        assert arena is not None
        intact = arena.intact()
        for i in np.flatnonzero(intact).tolist():
            assert values(arena, i) == {step_of(int(arena.version[i])) % 251}
        spoiled = np.flatnonzero(~intact & (arena.generation > 0))
        assert spoiled.size <= 8
        torn += int(spoiled.size)
        arena.remove()
    assert torn, "no kill hit a copy: the test shows nothing"
