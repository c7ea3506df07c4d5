"""Test the queue of hand-overs: it outlives its processes, and only complete hand-overs are found in it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.arena.queue import NEWEST, HandOverQueue
from scarctl.arena.staged import Staged
from scarctl.errors import AccessDenied, Corruption, Unavailable
from scarctl.state.version import pack

IDS = np.array([0, 3, 9])
VERSION = pack(2, 17)


def put(queue: HandOverQueue, **changes: Any) -> int:
    return queue.put(**{"version": VERSION, "ids": IDS, "extras": {"rng": [1, 2]}, **changes})


@pytest.mark.parametrize("whole", ["", "0f" * 16])
@pytest.mark.parametrize(
    "extras",
    [None, {}, {"x": (1, {2: b"z"})}, {"a": np.arange(6.0).reshape(2, 3), "nan": float("inf")}],
    ids=str,
)
@pytest.mark.parametrize("ids", [IDS, IDS[:0]], ids=len)
def test_comes_back_as_it_was_put(tmp_path: Path, ids: Any, extras: Any, whole: str) -> None:
    queue = HandOverQueue(tmp_path)
    number = put(queue, ids=ids, extras=extras, whole=whole)
    (found,) = HandOverQueue(tmp_path).pending()
    assert (found.number, found.version, found.whole, found.sealed) == (number, VERSION, whole, bool(whole))
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_equal(found.extras, extras)


def staged(folder: Path, content: bytes = b"rows") -> Staged:
    """Return rows that were copied out."""
    path = folder / f".rows-{len(os.listdir(folder))}"
    path.write_bytes(content)
    return Staged(IDS, np.array([VERSION, VERSION - 1, VERSION]), np.array([2, 4, 6], np.uint64), path)


def test_rows_of_its_own_come_and_go_with_a_hand_over(tmp_path: Path) -> None:
    queue = HandOverQueue(tmp_path)
    first, second = put(queue, staged=staged(tmp_path, b"a")), put(queue, staged=staged(tmp_path, b"b"))
    third = put(queue)
    assert HandOverQueue(tmp_path).numbers() == [first, second, third]
    one, two, other = HandOverQueue(tmp_path).pending()
    assert (other.staged, queue.has(first)) == (None, True)
    for found, content in ((one, b"a"), (two, b"b")):
        assert found.staged is not None
        assert found.staged.path.read_bytes() == content
        assert found.staged.versions.tolist() == [VERSION, VERSION - 1, VERSION]
        assert found.staged.generation.tolist() == [2, 4, 6]
    queue.remove(first)
    queue.set_aside(second)
    assert not queue.has(first)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bad", ".safetensors"]
    queue.clear()
    assert list(tmp_path.iterdir()) == []


def test_the_newest_moment_is_no_hand_over(tmp_path: Path) -> None:
    queue = HandOverQueue(tmp_path)
    assert queue.moment() is None
    for step in (5, 7):
        queue.note(version=pack(2, step), whole="0f" * 16, extras={"step": step})
    assert (queue.numbers(), queue.pending()) == ([], [])
    found = HandOverQueue(tmp_path).moment()
    assert found is not None
    assert (found.number, found.version, found.ids.size, found.sealed) == (NEWEST, pack(2, 7), 0, True)
    assert found.extras == {"step": 7}
    queue.remove(NEWEST)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_moment_is_left_out_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    queue = HandOverQueue(tmp_path)
    queue.note(version=VERSION, whole="", extras={})
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert queue.moment() is queue.moment() is None
    assert caplog.text.count("cannot be read") == 1
    queue.note(version=VERSION, whole="", extras={})
    assert queue.moment() is not None


def test_only_hand_overs_without_rows_and_the_moment_leave_the_host(tmp_path: Path) -> None:
    queue = HandOverQueue(tmp_path)
    put(queue, staged=staged(tmp_path))
    assert queue.small() == []
    number = put(queue)
    queue.note(version=VERSION, whole="", extras={})
    assert queue.small() == [NEWEST, number]
    files = [queue.file(number) for number in queue.small()]
    other = HandOverQueue(tmp_path / "other")
    assert other.small() == []
    (tmp_path / "other").mkdir()
    for n, data in zip(queue.small(), files, strict=True):
        assert data is not None
        (tmp_path / "file").write_bytes(data)
        other.take(n, tmp_path / "file")
    assert [found.number for found in other.pending()] == [number]
    assert other.moment() is not None


def test_no_seal_waits_any_more_but_those_with_rows_of_their_own(tmp_path: Path) -> None:
    queue, whole = HandOverQueue(tmp_path), "0f" * 16
    put(queue, whole=whole, staged=staged(tmp_path))
    put(queue, whole=whole)
    queue.note(version=VERSION, whole=whole, extras={"x": 1})
    queue.unseal()
    assert [found.whole for found in queue.pending()] == [whole, ""]
    assert queue.pending()[1].extras == {"rng": [1, 2]}
    moment = queue.moment()
    assert moment is not None
    assert (moment.whole, moment.extras) == ("", {"x": 1})


def test_order_and_numbers_outlive_the_process(tmp_path: Path) -> None:
    queue = HandOverQueue(tmp_path)
    first, second = put(queue), put(queue)
    queue.remove(first)
    again = HandOverQueue(tmp_path)
    third = put(again)
    assert again.numbers() == [second, third]
    assert not again.has(first)
    assert again.has(second)
    assert first < second < third
    again.remove(first)  # queueing twice counts once


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        put(HandOverQueue(tmp_path))
    finally:
        os.umask(old)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    """A flipped bit in `sealed` or `version` does as much harm as one in the ids."""
    queue = HandOverQueue(tmp_path)
    number = put(queue, extras={"x": np.arange(3)})
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(Corruption):
            queue.read(number)


@given(data=st.binary(max_size=400))
def test_anything_else_is_corruption(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("queue")
    queue = HandOverQueue(folder)
    Path(queue._path(1)).write_bytes(data)
    with pytest.raises(Corruption):
        queue.read(1)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, -1])
def test_a_truncated_file_is_left_out_and_the_others_stay(
    tmp_path: Path, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    queue = HandOverQueue(tmp_path)
    bad, good = put(queue), put(queue)
    path = Path(queue._path(bad))
    path.write_bytes(path.read_bytes()[:length])
    assert [[h.number for h in queue.pending()] for _ in range(2)] == [[good]] * 2
    assert caplog.text.count("cannot be read") == 1
    # The persister has to find it: only then it counts as not saved.
    assert queue.numbers() == [bad, good]
    queue.set_aside(bad)
    assert [p.suffix for p in sorted(tmp_path.iterdir())] == [".bad", ".safetensors"]
    queue.clear()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ids", [[-1, 3], [3, 3], [4, 3], [(1 << 63) - 1, -(1 << 63) + 3]], ids=str)
def test_impossible_ids(tmp_path: Path, ids: list[int]) -> None:
    queue = HandOverQueue(tmp_path)
    number = put(queue, ids=np.array(ids))
    with pytest.raises(Corruption, match="impossible"):
        queue.read(number)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    queue = HandOverQueue(tmp_path)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    Path(queue._path(1)).symlink_to(secret)
    with pytest.raises(Corruption):
        queue.read(1)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "sparse"])
def test_what_is_no_plain_file_is_left_out_and_can_be_set_aside(tmp_path: Path, kind: str) -> None:
    queue = HandOverQueue(tmp_path)
    path = Path(queue._path(1))
    if kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 43)
    good = put(queue)
    assert [h.number for h in queue.pending()] == [good]
    assert os.path.lexists(path)
    queue.set_aside(1)
    assert os.path.lexists(path.with_suffix(".bad"))


def test_a_full_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = HandOverQueue(tmp_path)
    link = os.link

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    for rows in (None, staged(tmp_path)):
        with pytest.raises(Unavailable, match="No space left"):
            put(queue, staged=rows)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(Unavailable, match="No space left"):
        queue.note(version=VERSION, whole="", extras={})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "link", link)
    assert queue.numbers() == []
    put(queue)
    assert len(queue.pending()) == 1


def test_an_interrupt_while_writing_does_not_block_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = HandOverQueue(tmp_path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(queue)
    put(queue)
    assert len(queue.pending()) == 1


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    queue = HandOverQueue(folder)
    folder.rmdir()
    with pytest.raises((Unavailable, AccessDenied)):
        put(queue)


def test_two_processes_that_put_at_once_lose_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from scarctl.arena.queue import HandOverQueue\n"
        "queue, mine = HandOverQueue(Path(sys.argv[1])), int(sys.argv[2])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "for i in range(100):\n"
        "    queue.put(version=(1 << 40) | 7, ids=np.array([mine]), extras={'i': i})\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    children = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path, str(n)], **pipes)  # type: ignore[call-overload]
        for n in range(2)
    ]
    for child in children:
        child.stdout.readline()
    for child in children:
        child.communicate(b"go\n")
        assert child.returncode == 0
    found = HandOverQueue(tmp_path).pending()
    for n in range(2):
        assert [h.extras["i"] for h in found if h.ids[0] == n] == list(range(100))


def test_what_a_killed_process_had_not_queued_is_swept_away(tmp_path: Path) -> None:
    queue = HandOverQueue(tmp_path)
    number = put(queue, staged=staged(tmp_path))
    queue.note(version=VERSION, whole="", extras={})
    kept = [*tmp_path.iterdir(), tmp_path / ".handover-new"]
    old = [tmp_path / name for name in (".handover-old", ".rows-0", f"rows-{number + 1:020d}")]
    for path in (kept[-1], *old):
        path.touch()
    for path in (*kept[:-1], old[0]):
        os.utime(path, (1, 1))
    queue.sweep()
    assert sorted(tmp_path.iterdir()) == sorted(kept)


WRITER = """
import sys, numpy as np
from pathlib import Path
from scarctl.arena.queue import HandOverQueue
queue = HandOverQueue(Path(sys.argv[1]))
print("ready", flush=True)
step = 0
while True:
    step += 1
    queue.put(version=(1 << 40) | step, ids=np.arange(step % 5000), extras={"step": step})
"""


def test_a_writer_that_is_killed_leaves_whole_hand_overs(tmp_path: Path) -> None:
    for round_ in range(3):
        folder = tmp_path / str(round_)
        folder.mkdir()
        child = subprocess.Popen([sys.executable, "-c", WRITER, folder], stdout=subprocess.PIPE)
        assert child.stdout is not None
        with child:
            child.stdout.readline()
            while len(os.listdir(folder)) < 5 + 7 * round_:
                pass
            child.send_signal(signal.SIGKILL)
        queue = HandOverQueue(folder)
        found = queue.pending()
        assert len(found) == len(queue.numbers()) >= 4
        assert [h.number for h in found] == list(range(1, len(found) + 1))
        assert all(h.extras == {"step": h.number} and h.ids.size == h.number for h in found)
        put(queue)  # the killed process's unfinished file is not in the way
        queue.clear()
        assert list(folder.iterdir()) == []
