"""Test a kill at every call of compaction, collection and snapshots: no kept state is lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from scarctl.state.layout import Layout
from scarctl.store import (
    Collector,
    Store,
    create_snapshot,
    delete_snapshot,
    open_writer,
    read_snapshot,
    sealed_sets,
    snapshots,
    verify,
)
from tests.store.helpers import Data, read_all
from tests.support.failpoint import Fault, in_child, kill_myself

Contents = tuple[dict[int, bytes], list[int]]


def _state(store: Store, at: int | None = None) -> Contents:
    state = store.state(0, at=at)
    found, bad = read_all(store, state)
    assert bad == {}
    return found, state.version.tolist()


def _prepared(folder: Path, layout: Layout) -> Store:
    """Return a store with a sealed state "old" (named), a newer one, and commits that leave dead copies everywhere."""
    store = Store.create(folder / "run")
    data = Data(layout)
    everything = np.arange(layout.partitions)
    with open_writer(store, layout=layout) as writer:
        for step in (0, 5):
            data.change(everything.tolist(), step)
            writer.commit(everything, data, step=step, sealed=True, extras={"step": step})
            if step == 0:
                create_snapshot(store, "old", sealed_sets([writer.state])[0])
        for step in range(6, 16):
            ids = np.sort(np.random.default_rng(step).permutation(everything)[: len(everything) // 3])
            data.change(ids.tolist(), step)
            writer.commit(ids, data, step=step, extras={"step": step})
    return store


def _tidy(store: Store, layout: Layout) -> None:
    """Run one life of a writer that compacts and collects, with an old snapshot deleted and a new one made."""
    with open_writer(store, layout=layout) as writer:
        collector = Collector(writer, ratio=1.2, floor=0, turn_bytes=8000)
        create_snapshot(store, "new", sealed_sets([writer.state])[0])
        for _ in range(3):
            collector.turn()
        writer.renew()
        delete_snapshot(store, "old")
        collector.collect()
        assert collector.done.moved_bytes > 0
        assert collector.done.deleted_files > 15


@pytest.mark.parametrize("every", [15, pytest.param(1, marks=pytest.mark.long)])
def test_killed_at_calls_of_compaction_collection_and_snapshots(
    memory_path: Path, layout: Layout, every: int
) -> None:
    store = _prepared(memory_path, layout)
    run, saved = memory_path / "run", memory_path / "saved"
    shutil.copytree(run, saved)
    newest = _state(store)
    sealed = sealed_sets([store.state(0)])[0]
    old = read_snapshot(store, "old")
    kept, named = _state(store, sealed.seqs[0]), _state(store, old.seqs[0])
    seen = set()
    k = 0
    while True:
        k += every

        def work(k: int = k) -> None:
            with Fault(k, kill_myself):
                _tidy(store, layout)

        status = in_child(work)
        reopened = Store.open(run)
        report = verify(reopened, read_data=k % 10 < every)
        assert report.problems == [], f"call {k}"
        names = {s.name for s in snapshots(reopened)}
        seen.add(frozenset(names))
        assert _state(reopened) == newest, f"call {k}"
        assert _state(reopened, sealed.seqs[0]) == kept, f"call {k}"
        if "old" in names:
            assert _state(reopened, old.seqs[0]) == named, f"call {k}"
        if k % 10 < every or not os.WIFSIGNALED(status):
            # The next writer finishes the collection: no garbage stays forever.
            with open_writer(reopened, layout=layout) as writer:
                Collector(writer, ratio=1.2, floor=0).collect()
            report = verify(reopened, read_data=True)
            assert (report.problems, report.orphans) == ([], [])
            # The kept states, what closes each log, and the newest term's own records.
            ends = len(list(run.glob("lanes/0/terms/*"))) - 1
            assert len(list(run.glob("lanes/0/log/*/*"))) <= ends + 1 + len(names) + 8
            assert _state(reopened) == newest
        if not os.WIFSIGNALED(status):
            assert status == 0
            break
        shutil.rmtree(run)
        shutil.copytree(saved, run)
    assert seen == {frozenset({"old"}), frozenset({"old", "new"}), frozenset({"new"})}
    assert k > 120
