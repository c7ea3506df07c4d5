"""The arena: what a killed process spoiled is known, and nothing but an arena of ours is ever mapped."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scarctl.arena import arena as module
from scarctl.arena import header
from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.errors import AccessDenied, Contention, Corruption, Unavailable, UsageError
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import NEVER, pack, step_of
from tests.daemon.rig import STORE_ID, fill, small_layout, values

LAYOUT = small_layout()
ALL = np.arange(LAYOUT.partitions)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "scarctl-0" / STORE_ID


def create(place: Path) -> Arena:
    return Arena.create(place, LAYOUT, run_id=STORE_ID, epoch=1)


def reopen(place: Path) -> Arena | None:
    return Arena.open_existing(place, run_id=STORE_ID)


def left_behind(place: Path) -> Path:
    """The file of an arena with content, whose process is gone."""
    arena = create(place)
    arena.begin(ALL)
    fill(arena, ALL, 9)
    arena.end(ALL, pack(1, 9))
    arena.close()
    return place / "arena"


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
            ids = ids[(arena.generation[ids] & 1) == 1]  # nobody ends what was not begun
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
    arena.remove()  # closed: it is another's by now
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
    """Its last owner removes it between our opening and our locking it: the lock would be of nothing."""
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


# -- hostile and foreign files -----------------------------------------------------------------------------------


def at(offset: int, form: str, *new: Any) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(form, data, offset, *new)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(at(0, "<8s", b"ELF"), "header is not valid", id="magic"),
        pytest.param(at(8, "<I", 2), "format 2", id="format"),
        pytest.param(at(12, "<I", 512), "header is not valid", id="header-size"),
        pytest.param(at(16, "<Q", 1 << 62), "size", id="file-size"),
        pytest.param(at(24, "<Q", 1 << 40), "does not fit", id="partitions"),
        pytest.param(at(32, "<Q", 0), "header is not valid", id="json-at"),
        pytest.param(at(40, "<Q", 1 << 62), "size", id="json-size"),
        pytest.param(at(40, "<Q", 10), "layout cannot be read", id="json-too-short"),
        pytest.param(at(48, "<Q", 0), "does not fit", id="arrays-at"),
        pytest.param(at(56, "<Q", 1 << 50), "does not fit", id="tensors-at"),
        pytest.param(at(64, "<32s", b"x" * 32), "does not fit", id="layout-digest"),
        pytest.param(at(96, "<16s", b"x" * 16), "another store", id="store"),
        pytest.param(at(256, "<q", 1 << 24), "numbers are impossible", id="epoch"),
        pytest.param(at(264, "<q", 1 << 40), "numbers are impossible", id="head-step"),
        pytest.param(at(272, "<q", 1 << 31), "numbers are impossible", id="process"),
        pytest.param(at(280, "<q", -2), "numbers are impossible", id="sealed"),
        pytest.param(at(296, "<q", -1), "numbers are impossible", id="base-epoch"),
        pytest.param(at(4096, "<4s", b"\0\0\0\0"), "layout cannot be read", id="json-zeros"),
        pytest.param(at(4096, "<6s", b"[[[[[["), "layout cannot be read", id="json-nested"),
        pytest.param(lambda data: data.__delitem__(slice(4000, None)), "size", id="truncated"),
        pytest.param(lambda data: data.__delitem__(slice(20, None)), "too short", id="cut-in-header"),
        pytest.param(lambda data: data.clear(), "too short", id="empty"),
        pytest.param(lambda data: data.extend(b"more"), "size", id="longer"),
    ],
)
def test_damaged_headers(place: Path, damage: Callable[[bytearray], None], message: str) -> None:
    file = left_behind(place)
    data = bytearray(file.read_bytes())
    damage(data)
    file.write_bytes(data)
    with pytest.raises(Corruption, match=message) as caught:
        reopen(place)
    assert str(file) in str(caught.value)
    with pytest.raises(Corruption):
        reopen(place)  # and not Contention: the lock was let go
    assert file.read_bytes() == bytes(data)


@settings(max_examples=80)
@given(flips=st.lists(st.tuples(st.integers(0, 128 + 700), st.integers(1, 255)), min_size=1, max_size=4))
def test_random_damage_is_found_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, flips: list[Any]
) -> None:
    place = tmp_path_factory.mktemp("damage") / "a" / STORE_ID
    file = left_behind(place)
    data = bytearray(file.read_bytes())
    for offset, mask in flips:
        data[offset if offset < 128 else 4096 + offset - 128] ^= mask
    file.write_bytes(data)
    arena = None
    with contextlib.suppress(Corruption):
        arena = reopen(place)
    if arena is not None:
        assert arena.layout == LAYOUT
        arena.remove()


def test_things_that_are_no_files(place: Path, tmp_path: Path) -> None:
    file = left_behind(place)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    with pytest.raises(Corruption):
        reopen(place)
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises((Corruption, AccessDenied)):
        reopen(place)  # and it does not wait for a writer
    file.unlink()
    file.mkdir()
    with pytest.raises((Corruption, AccessDenied)):
        reopen(place)


def test_a_file_that_others_may_write(place: Path) -> None:
    left_behind(place).chmod(0o606)
    with pytest.raises(AccessDenied, match="private"):
        reopen(place)


@pytest.mark.parametrize("level", [0, 1])
def test_a_folder_that_others_may_enter(place: Path, level: int) -> None:
    left_behind(place)
    (place if level == 0 else place.parent).chmod(0o755)
    for attempt in (reopen, create):
        with pytest.raises(AccessDenied, match="0700"):
            attempt(place)


@pytest.mark.parametrize("level", [0, 1])
def test_a_link_in_place_of_a_folder(place: Path, tmp_path: Path, level: int) -> None:
    left_behind(place)
    link = place if level == 0 else place.parent
    link.rename(tmp_path / "moved")
    link.symlink_to(tmp_path / "moved")
    for attempt in (reopen, create):
        with pytest.raises(AccessDenied):
            attempt(place)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to others")
@pytest.mark.parametrize("which", ["file", "folder", "parent"])
def test_what_belongs_to_somebody_else(place: Path, which: str) -> None:
    file = left_behind(place)
    os.chown({"file": file, "folder": place, "parent": place.parent}[which], 65534, 65534)
    with pytest.raises(AccessDenied):
        reopen(place)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_somebody_else_was_here_first(arena_dir: Path) -> None:
    """In a folder for all, another user takes the name that a victim's arena will have."""
    shared = arena_dir
    shared.chmod(0o1777)
    place = shared / f"scarctl-{os.getuid()}" / STORE_ID
    subprocess.run(["mkdir", "-p", "-m", "0777", place], check=True, user=65534, group=65534)
    for attempt in (reopen, create):
        with pytest.raises(AccessDenied):
            attempt(place)


def test_an_arena_from_before_the_machines_last_start(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a disk it survives, but pages were written back in any order: even generations prove nothing."""
    file = left_behind(place)
    (place / f"handover-{1:020d}.safetensors").touch()
    boot = tmp_path / "boot"
    boot.write_text("11111111-2222-3333-4444-555555555555\n")
    monkeypatch.setattr(header, "_BOOT_ID", boot)
    assert reopen(place) is None
    assert "last boot" in caplog.text
    assert not file.exists()
    assert list(place.iterdir()) == []
    create(place).remove()


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
