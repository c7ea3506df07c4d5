"""Test creating, opening, locking and fencing a store."""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from scarctl.errors import (
    AccessDenied,
    Contention,
    Corruption,
    NoStore,
    SettingsConflict,
    UsageError,
)
from scarctl.state.layout import Layout
from scarctl.store import Store, StoreWriter, open_writer, verify
from scarctl.store.backends.base import Buffer
from scarctl.store.backends.local import LocalBlobs
from scarctl.store.doctor import diagnose
from scarctl.store.foreign import near
from scarctl.store.lock import StoreLock
from scarctl.store.term import Term
from tests.store.helpers import Data, files, read_all


def test_settings_are_fixed_when_the_store_is_created(tmp_path: Path) -> None:
    created = Store.create(
        tmp_path / "run", shards=3, seed=5, partition_bytes=4096, rows={"b.*": 1, "a.*": 2}
    )
    opened = Store.open(tmp_path / "run")
    assert (opened.id, opened.settings) == (created.id, created.settings)
    assert opened.settings.rows == (("b.*", 1), ("a.*", 2))
    assert Store.create(tmp_path / "run").settings == created.settings
    assert Store.create(tmp_path / "run", shards=3, rows={"b.*": 1, "a.*": 2}).id == created.id
    for bad in (
        {"shards": 1},
        {"seed": 0},
        {"partition_bytes": 8192},
        {"by_layer": True},
        {"rows": {"a.*": 2, "b.*": 1}},
    ):
        with pytest.raises(SettingsConflict, match=next(iter(bad))):
            Store.create(tmp_path / "run", **bad)  # type: ignore[arg-type]


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store.create("a b")
    assert Store.open(f"file://{tmp_path}/a%20b").id == store.id
    assert Store.open(f"file://localhost{tmp_path}/a%20b").root == tmp_path / "a b"
    for url in ("s3://key:secret@bucket/x?y", "file://host/x", "file://", "unheard-of://secret@x/y", ""):
        with pytest.raises(UsageError) as info:
            Store.open(url)
        assert "secret" not in str(info.value)


@pytest.mark.parametrize(
    "bad", [{"shards": 0}, {"shards": 10**7}, {"seed": -1}, {"partition_bytes": 0}, {"rows": {"a": 0}}]
)
def test_bad_settings_create_nothing(tmp_path: Path, bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Store.create(tmp_path / "run", **bad)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_a_missing_folder_and_a_file_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(NoStore) as info:
        Store.open(tmp_path / "nothing")
    assert info.value.kind == "no-store"
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("gone")
    calls: list[Callable[[Path], object]] = [Store.open, Store.create, diagnose]
    for call in calls:
        with pytest.raises(NoStore) as info:
            call(tmp_path / "file")
        assert info.value.kind == "foreign-store"
        with pytest.raises(NoStore):
            call(tmp_path / "dangling")


def test_a_diagnosis_of_a_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(NoStore) as info:
        diagnose(tmp_path)
    assert info.value.kind == "foreign-store"
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_an_empty_store_has_no_state(store: Store) -> None:
    state = store.state(0)
    assert (state.seq, len(state.ids), store.shards(), store.current_layout()) == (-1, 0, [], None)
    assert list(store.read(state, np.array([1]), corrupt=(bad := []))) == []
    assert len(bad) == 1
    assert store.read_extras(state) is None
    assert list(store.log(0).records()) == []
    assert verify(store, read_data=True).intact


def test_partitions_never_saved_are_reported(store: Store, writer: StoreWriter, data: Data) -> None:
    writer.commit(np.arange(4), data, step=0)
    found, bad = read_all(store, writer.state, np.array([2, 3, 4, 9999]))
    assert sorted(found) == [2, 3]
    assert sorted(bad) == [4, 9999]
    assert "never saved" in bad[4]


# --- one writer ---------------------------------------------------------------------------------------------


def test_a_look_for_a_writer_does_not_stop_a_new_one(tmp_path: Path, layout: Layout) -> None:
    """`scarctl prune` holds the lock for a moment to find out whether a writer is alive."""
    store = Store.create(tmp_path / "run")
    for begin in (lambda: open_writer(store, layout=layout).close(), store.lock):
        look = StoreLock(store.root / "lock")
        threading.Timer(0.05, look.release).start()
        begin()
    store.unlock()


def test_a_second_writer_is_told_who_writes(store: Store, writer: StoreWriter, layout: Layout) -> None:
    before = files(store.root)
    with pytest.raises(Contention, match=f"process {os.getpid()} "):
        open_writer(Store.open(store.url), layout=layout)
    assert files(store.root) == before
    writer.close()
    writer.close()
    with open_writer(store, layout=layout):
        pass
    with pytest.raises(UsageError, match="closed"):
        writer.commit(np.array([0]), lambda *_: b"", step=0)


def test_a_store_may_be_locked_before_there_is_a_layout(store: Store, layout: Layout) -> None:
    other = Store.open(store.url)
    store.lock()
    with pytest.raises(Contention):
        other.lock()
    writer = open_writer(store, layout=layout)
    with pytest.raises(Contention):
        open_writer(store, layout=layout)
    writer.close()
    with pytest.raises(Contention):
        other.lock()  # the store still holds it
    store.close()
    other.lock()
    other.close()


@pytest.mark.parametrize("parent_dies", [False, True])
def test_a_forked_child_neither_writes_nor_keeps_the_lock(
    store: Store, layout: Layout, data: Data, parent_dies: bool
) -> None:
    """The grandchild survives the writer, its parent."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        writer = open_writer(store, layout=layout)
        grandchild = os.fork()
        if grandchild == 0:
            try:
                writer.commit(np.array([0]), data, step=0)
            except UsageError:
                writer.close()
                os.write(ready[1], f"{os.getpid()}\n".encode())
            os.read(go[0], 1)
            os._exit(0)
        os.read(go[0], 1)
        os._exit(0)
    try:
        grandchild = int(os.read(ready[0], 20))
        with pytest.raises(Contention):
            StoreLock(store.root / "lock")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        StoreLock(store.root / "lock").release()
    finally:
        os.kill(grandchild, signal.SIGKILL)
        for fd in (*ready, *go):
            os.close(fd)


def test_a_term_that_was_claimed_without_a_record_is_passed(store: Store, layout: Layout, data: Data) -> None:
    """Its writer was killed in between. A claim that is missing below another one is made, so that none is skipped."""
    with open_writer(store, layout=layout) as writer:
        writer.commit(np.arange(5), data, step=5)
    for number in (2, 4):
        term = Term(0, number)
        store.blobs.create_exclusive(term.path, [term.data])
    assert read_all(store, store.state(0))[0] == data.all(range(5))
    with open_writer(store, layout=layout) as writer:
        assert writer.epoch == 5
        assert read_all(store, writer.state)[0] == data.all(range(5))
        assert writer.state.step == 5
    log = store.log(0)
    assert log.terms() == [1, 2, 3, 4, 5]
    assert [log.top(log.term(number)).closed for number in log.terms()] == [3, 1, 1, 1, None]
    assert verify(store, read_data=True).problems == []


def test_a_lost_answer_of_a_claim_or_a_closing_changes_nothing(
    store: Store, layout: Layout, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file exists already when it is created: with the same bytes it is one's own."""
    with open_writer(store, layout=layout) as writer:
        writer.commit(np.arange(5), data, step=5)
    original = LocalBlobs.create_exclusive

    def create(self: LocalBlobs, name: str, parts: Sequence[Buffer]) -> None:
        original(self, name, parts)
        if "/terms/" in name or "/log/" in name:
            raise FileExistsError(errno.EEXIST, "exists", name)

    monkeypatch.setattr(LocalBlobs, "create_exclusive", create)
    with open_writer(store, layout=layout) as writer:
        writer.commit(np.arange(3), data, step=6)
    assert [(r.epoch, r.k) for r in store.log(0).records()] == [(1, 1), (1, 2), (2, 1), (2, 2)]


# --- permissions and odd files ------------------------------------------------------------------------------


@pytest.mark.skipif(os.getuid() == 0, reason="root may do everything")
def test_permissions(tmp_path: Path, layout: Layout) -> None:
    store = Store.create(tmp_path / "run")
    os.chmod(tmp_path / "run", 0o500)
    try:
        with pytest.raises(AccessDenied) as info:
            open_writer(store, layout=layout)
        assert info.value.exit_code == 12
    finally:
        os.chmod(tmp_path / "run", 0o700)


def test_denied_calls_are_access_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.create(tmp_path / "run")
    original = os.open

    def denied(path: object, *args: int, **kwargs: int) -> int:
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(AccessDenied, match=r"scarctl\.json"):
        Store.open(store.url)
    with pytest.raises(AccessDenied):
        Store.create(tmp_path / "other")


@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder", "socket"])
@pytest.mark.parametrize("which", ["settings", "lock", "term", "record", "segment", "layout"])
def test_what_is_not_a_regular_file_is_refused(
    store: Store, layout: Layout, data: Data, tmp_path: Path, which: str, kind: str
) -> None:
    with open_writer(store, layout=layout) as writer:
        record = writer.commit(np.arange(layout.partitions), data, step=0)
    assert record.segment is not None
    path = (
        store.root
        / {
            "settings": "scarctl.json",
            "lock": "lock",
            "term": "lanes/0/terms/00000001.json",
            "record": record.place.path(0),
            "segment": f"lanes/0/seg/{record.segment.name}",
            "layout": f"layout/{layout.digest}.json",
        }[which]
    )
    path.rename(tmp_path / "real")
    if kind == "symlink":
        path.symlink_to(tmp_path / "real")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)

    def use() -> None:
        opened = Store.open(store.url)
        open_writer(opened, layout=layout).close()

    if which == "segment":
        state = Store.open(store.url).state(0)
        assert (read_all(store, state), state.doubt.all()) == (({}, {}), True)
        assert str(path) in state.damaged[0].reason
        assert [p.file for p in verify(store, read_data=True).problems] == [str(path)]
    else:
        with pytest.raises(Corruption, match=r"lock|scarctl\.json|log|layout|terms"):
            use()


def test_a_hint_names_the_stores_near_a_path_without_one(tmp_path: Path) -> None:
    assert near(tmp_path / "ckpt") == near(tmp_path / "gone" / "ckpt") == ""
    for name in ("ckpt", "other"):
        Store.create(tmp_path / name)
    assert near(tmp_path / "ckp") == f"; did you mean {tmp_path / 'ckpt'}?"
    assert near(tmp_path / "ckpt" / "lanes" / "0") == f"; did you mean the store {tmp_path / 'ckpt'}?"
    assert near(tmp_path) == near(tmp_path / "runs") == f"; stores in {tmp_path}: ckpt, other"
    for name in ("c", "d", "e"):
        Store.create(tmp_path / name)
    assert near(tmp_path) == f"; stores in {tmp_path}: c, ckpt, d and 2 more"
    (tmp_path / "model.pt").touch()
    assert near(tmp_path / "model.pt") == "", "a file that exists was meant"
