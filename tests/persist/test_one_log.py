"""Test that a checkpoint of a process with many shards is one commit, as with one shard."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from scarctl.state.version import step_of
from scarctl.store import Store, verify
from tests.daemon.rig import Rig


def rig_of(folder: Path, shards: int) -> Rig:
    (folder / "arenas").mkdir(parents=True)
    (folder / "arenas" / "run").mkdir(mode=0o700)
    return Rig(folder / "store", folder / "arenas", shards=shards)


def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int) -> Counter[str]:
    """Count the fsyncs, records and segments of one commit."""
    rig = rig_of(tmp_path / str(shards), shards)
    found: Counter[str] = Counter()
    real = os.fsync

    def fsync(fd: int) -> None:
        found["fsync"] += 1
        real(fd)

    for step, ids in ((1, rig.everything), (2, rig.everything[::2])):
        number = rig.save(ids, step)
        before = files(rig.store)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            rig.persist(number)
        found += files(rig.store) - before
        assert (step_of(rig.arena.durable[ids]) == step).all()
    rig.writer.close()
    return found


def files(store: Store) -> Counter[str]:
    paths = store.root.glob("lanes/*/**/*")
    return Counter(path.relative_to(store.root).parts[2] for path in paths if path.is_file())


def test_eight_shards_cost_what_one_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eight = costs(tmp_path, monkeypatch, 8)
    assert eight["log"] == eight["seg"] == 2
    assert eight == costs(tmp_path, monkeypatch, 1)


def test_a_seal_is_one_record_with_all_shards(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, 8)
    rig.persist(rig.save(rig.everything, 5, sealed=True))
    assert step_of(rig.arena.sealed) == 5
    store = Store.open(rig.store.root)
    assert store.shards() == [0]
    assert np.array_equal(store.state(0).ids, rig.everything)
    assert store.state(0).whole == rig.arena.whole
    extras = store.read_extras(store.state(0))
    assert extras is not None
    assert extras[1] == {"step": 5}
    assert verify(store, read_data=True).intact
    rig.writer.close()
