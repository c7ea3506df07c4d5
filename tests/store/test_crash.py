"""Test a kill at every system call of a commit, and failing calls: the old state or the new one remains."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scarctl.errors import MissingGuarantee, ScarError, Unavailable
from scarctl.state.layout import Layout
from scarctl.store import Store, StoreWriter, open_writer, verify
from tests.store.helpers import Data, read_all, summary
from tests.support.failpoint import CALLS, Fault, in_child, kill_myself

pytestmark = pytest.mark.usefixtures("soon_full")


def _prepared(folder: Path, layout: Layout) -> tuple[Store, Data]:
    store = Store.create(folder / "run")
    data = Data(layout)
    with open_writer(store, layout=layout) as writer:
        ids = np.arange(layout.partitions)
        writer.commit(ids, data, step=0, sealed=True, extras={"n": 0})
    return store, data


def _contents(store: Store) -> tuple[dict[int, bytes], list[int], list[int], object]:
    """Return what a reader sees: copies, versions without epochs, seals."""
    state = store.state(0)
    found, bad = read_all(store, state)
    assert bad == {}
    extras = store.read_extras(state)
    assert verify(store, read_data=True).problems == []
    return (
        found,
        (state.version & 0xFFFF).tolist(),
        [seal.step for seal in state.sealed],
        extras and extras[1],
    )


def _work(store: Store, layout: Layout, data: Data) -> None:
    """Run one whole life of a writer: opening, a commit, a seal, closing."""
    ids = np.arange(layout.partitions)
    with open_writer(store, layout=layout) as writer:
        writer.commit(ids[::3], data, step=1, extras={"n": 1})
        writer.commit(ids[1::3], data, step=2, sealed=True)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_killed_at_calls_of_a_writers_life(memory_path: Path, layout: Layout, every: int) -> None:
    store, _ = _prepared(memory_path, layout)
    ids = np.arange(layout.partitions)
    changed = Data(layout, 1)
    run, saved = memory_path / "run", memory_path / "saved"
    shutil.copytree(run, saved)

    old = _contents(store)
    mixed = Data(layout)
    allowed = [old]
    for step, part in ((1, ids[::3]), (2, ids[1::3])):
        for i in part.tolist():
            _copy_partition(changed, mixed, i)
        versions = [0 if step == 1 else 2] * len(ids)
        if step == 1:
            versions[::3] = [1] * len(versions[::3])
        allowed.append((mixed.all(ids.tolist()), versions, [0] if step == 1 else [0, 2], {"n": 1}))
    seen = set()
    k = 0
    while True:
        k += every

        def work(k: int = k) -> None:
            with Fault(k, kill_myself):
                _work(store, layout, changed)

        status = in_child(work)
        contents = _contents(Store.open(run))
        assert contents in allowed, f"call {k}"
        seen.add(allowed.index(contents))
        # The next writer works, whatever files are left.
        if k % 7 == 0 or not os.WIFSIGNALED(status):
            _work(store, layout, changed)
            found, versions, seals, extras = _contents(store)
            assert (found, versions, seals[-1], extras) == (*allowed[2][:2], 2, allowed[2][3])
        if not os.WIFSIGNALED(status):
            assert status == 0
            break
        shutil.rmtree(run)
        shutil.copytree(saved, run)
    assert seen == {0, 1, 2}
    assert k > 35


def _copy_partition(source: Data, target: Data, i: int) -> None:
    from tests.store.helpers import place

    g, start, stop = place(source.layout, i)
    for t, array in enumerate(target.tensors[g]):
        array[start:stop] = source.tensors[g][t][start:stop]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_killed_at_calls_of_creation_and_roll_back(memory_path: Path, layout: Layout, every: int) -> None:
    data, newer_data = Data(layout), Data(layout, 1)
    ids = np.arange(layout.partitions)
    expected = data.all(ids.tolist())
    newer = {**expected, **newer_data.all(ids[:3].tolist())}
    k = 0
    while True:
        k += every
        folder = memory_path / str(k)

        def work(k: int = k, folder: Path = folder) -> None:
            with Fault(k, kill_myself):
                store = Store.create(folder / "a" / "run")
                with open_writer(store, layout=layout) as writer:
                    kept = writer.commit(ids, data, step=3)
                    writer.commit(ids[:3], newer_data, step=4)
                    writer.roll_back(kept.seq)

        status = in_child(work)
        store = Store.create(folder / "a" / "run")
        with open_writer(store, layout=layout) as writer:
            found, bad = read_all(store, writer.state)
            assert bad == {}
            assert verify(store, read_data=False).problems == []
            assert found in ({}, expected, newer)
        shutil.rmtree(folder)
        if not os.WIFSIGNALED(status):
            assert status == 0
            assert found == expected
            break
    assert k > 50


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_every_failing_call_of_a_commit_leaves_the_last_state(
    memory_path: Path, layout: Layout, code: int
) -> None:
    """Calls fail one at a time; the commit fails cleanly or succeeds, and the next one works."""
    store, data = _prepared(memory_path, layout)
    ids = np.arange(layout.partitions)
    with open_writer(store, layout=layout) as writer:
        messages: list[str] = []
        k = 0
        expected = data.all(ids.tolist())
        while True:
            k += 1
            part = ids[k % 3 :: 3]
            data.change(part.tolist(), k)
            in_doubt = False
            new = {**expected, **data.all(part.tolist())}
            with Fault(k, lambda: _raise(code), (*CALLS, "open")) as fault:
                try:
                    writer.commit(part, data, step=k, extras={"n": k})
                except Unavailable as error:
                    messages.append(str(error))
                    in_doubt = error.kind == "in-doubt"
                else:
                    expected = new
            after, bad = read_all(store, Store.open(store.url).state(0))
            assert bad == {}
            assert after == (new if in_doubt else expected)
            if not in_doubt:
                assert verify(store, read_data=False).orphans == []
            # The next commit works, and settles what was in doubt.
            writer.commit(part, data, step=k)
            expected = new
            assert summary(store.state(0)) == summary(writer.state)
            assert read_all(store, writer.state) == (new, {})
            if fault.count < k:
                break
        assert len(messages) >= 8
        assert all(str(memory_path) in m and "acknowledged commits are safe" in m for m in messages)
    report = verify(store, read_data=True)
    assert (report.problems, report.orphans) == ([], [])


def _raise(code: int) -> None:
    raise OSError(code, os.strerror(code))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(full_disk: Path, layout: Layout, data: Data) -> None:
    store = Store.create(full_disk / "run")
    with open_writer(store, layout=layout) as writer:
        every = writer.state.ids
        step = 0

        def fill() -> None:
            nonlocal step
            for step in range(1000):
                writer.commit(every, data, step=step)

        with pytest.raises(Unavailable) as info:
            fill()
        assert info.value.kind == "store-full"
        state = Store.open(store.url).state(0)
        assert state.step == step - 1 > 2
        assert read_all(store, state) == (data.all(every.tolist()), {})
        # With space available the same writer continues.
        for path in sorted(store.root.glob("lanes/0/seg/*"), key=lambda p: p.stat().st_mtime_ns)[1:4]:
            path.unlink()
        assert writer.commit(every, data, step=step).step == step


def test_a_write_that_stops_in_the_middle(
    store: Store, writer: StoreWriter, layout: Layout, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = writer.state.ids
    writer.commit(every, data, step=0)
    original, room = os.write, 5000

    def write(fd: int, buffer: memoryview) -> int:
        nonlocal room
        if room == 0:
            _raise(errno.ENOSPC)
        put = original(fd, buffer[: min(room, 700)])  # short writes too
        room -= put
        return put

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(Unavailable, match="No space") as info:
            writer.commit(every, data, step=1)
    assert "safe" in info.value.hint
    assert store.state(0).step == 0
    assert verify(store, read_data=True).orphans == []
    assert writer.commit(every, data, step=1).step == 1


def test_an_interrupt_between_link_and_return_is_settled(
    store: Store, writer: StoreWriter, layout: Layout, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.link

    def link(a: Path, b: Path) -> None:
        original(a, b)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        with pytest.raises(KeyboardInterrupt):
            writer.commit(np.arange(5), data, step=1)
    assert read_all(store, store.state(0)) == (data.all(range(5)), {})
    writer.commit(np.arange(5, 9), data, step=2)
    assert summary(store.state(0)) == summary(writer.state)
    assert read_all(store, writer.state)[0] == data.all(range(9))


def test_a_file_system_without_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", lambda *_: _raise(errno.EPERM))
    with pytest.raises(MissingGuarantee) as info:
        Store.create(tmp_path / "run")
    assert info.value.exit_code == 14


@pytest.mark.parametrize("gone", ["", "lanes", "lanes/0", "lanes/0/terms", "lanes/0/log", "lanes/0/seg"])
def test_a_folder_that_goes_is_not_made_again(
    store: Store, writer: StoreWriter, data: Data, gone: str
) -> None:
    """A record in a new folder would lack the earlier records. When the folder is back, so is everything."""
    everything = writer.state.ids
    writer.commit(everything, data, step=0)
    away = store.root.parent / "away"
    (store.root / gone).rename(away)
    with pytest.raises(Unavailable, match=r"the folder is gone|the store is missing"):
        writer.commit(everything[:1], data, step=1)
    away.rename(store.root / gone)
    writer.commit(everything[:1], data, step=2)
    assert read_all(store, store.state(0))[0].keys() == set(everything.tolist())
    assert verify(store, read_data=True).problems == []


def test_a_file_in_the_place_of_a_folder(store: Store, writer: StoreWriter, data: Data) -> None:
    shutil.rmtree(store.root / "lanes/0/seg")
    (store.root / "lanes/0/seg").write_text("")
    with pytest.raises(ScarError, match="seg"):
        writer.commit(np.array([0]), data, step=1)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_no_descriptor_stays_open(store: Store, layout: Layout, data: Data) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with open_writer(store, layout=layout) as writer:
        writer.commit(writer.state.ids, data, step=0, extras={"a": 1})
        with pytest.raises(ScarError):
            writer.commit(np.array([0]), lambda *_: b"", step=1)
        read_all(store, writer.state)
        store.read_extras(writer.state)
        verify(store, read_data=True)
    assert sorted(os.listdir("/proc/self/fd")) == before
