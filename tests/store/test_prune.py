"""Test pruning a store by hand, where no lock shows whether a writer is running."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

import numpy as np
import pytest

from scarctl.errors import Contention, Fenced
from scarctl.state.layout import Layout
from scarctl.store import Store, open_writer, verify
from scarctl.store.lock import StoreLock
from scarctl.store.prune import Retention, plan_prune, prune
from tests.store.helpers import Data, read_all

STEPS = 30


@pytest.fixture
def url(layout: Layout, data: Data) -> str:
    """Return the address of a remote store with a history that was never collected."""
    url = f"memory:///{uuid.uuid4().hex}/run"
    store = Store.create(url, shards=1)
    with open_writer(store, layout=layout) as writer:
        for step in range(STEPS):
            data.change(range(layout.partitions), step)
            writer.commit(np.arange(layout.partitions), data, step=step, sealed=step % 10 == 9)
    return url


def test_a_remote_store_is_collected_when_nobody_writes(url: str, layout: Layout, data: Data) -> None:
    store = Store.open(url)
    cautious = plan_prune(store, Retention())
    assert cautious.writer is not None
    assert prune(store, cautious).files == 0
    plan = plan_prune(store, Retention(keep_last=2, no_writer=True))
    assert plan.writer is None
    assert [s.step for s in plan.keep_sealed] == [29, 19]
    before = len(store.blobs.files("lanes/0/seg"))
    done = prune(store, plan)
    assert done.files >= len(plan.files) > 20
    assert before - len(store.blobs.files("lanes/0/seg")) > 20
    assert done.sizes["bytes"] < 10 * done.sizes["live_bytes"]
    assert verify(store, read_data=True).problems == []
    assert read_all(store, store.state(0)) == (data.all(range(layout.partitions)), {})


def test_whoever_writes_all_the_same_is_fenced(url: str, layout: Layout, data: Data) -> None:
    writer = open_writer(Store.open(url), layout=layout)
    store = Store.open(url)
    prune(store, plan_prune(store, Retention(no_writer=True)))
    with pytest.raises(Fenced):
        writer.commit(np.arange(layout.partitions), data, step=STEPS)
    assert read_all(store, store.state(0))[0] == data.all(range(layout.partitions))


def test_where_there_is_nothing_to_do_nothing_is_written(url: str) -> None:
    store = Store.open(url)
    prune(store, plan_prune(store, Retention(no_writer=True)))
    epoch, terms = store.state(0).epoch, store.log(0).terms()
    plan = plan_prune(store, Retention(no_writer=True))
    assert plan.empty
    assert prune(store, plan).bytes == 0
    assert (store.state(0).epoch, store.log(0).terms()) == (epoch, terms)


def test_a_full_disk_does_not_refuse_the_lock_to_who_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who holds it cannot be written, which is for messages."""

    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    lock = StoreLock(tmp_path / "lock")
    with pytest.raises(Contention, match="another process is writing"):
        StoreLock(tmp_path / "lock")
    lock.release()
    StoreLock(tmp_path / "lock").release()
