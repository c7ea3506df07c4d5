"""Test that the store's file says whether a process has one log for all shards, so older versions do not guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.errors import Corruption
from scarctl.state.layout import Layout
from scarctl.store import Store, open_writer
from scarctl.store import format as store_format
from scarctl.store.format import FORMAT, MIXED_FORMAT, ONE_LOG_FORMAT, SETTINGS, dump_json
from tests.store.helpers import Data
from tests.support.log_per_shard import store_with_a_log_per_shard
from tests.support.splitmix import mix


def settings_of(store: Store) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((store.root / SETTINGS).read_bytes())
    return found


def test_the_file_says_so(tmp_path: Path) -> None:
    many = Store.create(tmp_path / "many", shards=8)
    assert many.one_log
    assert settings_of(many)["one_log"] is True
    assert settings_of(many)["format"] == ONE_LOG_FORMAT
    one = Store.create(tmp_path / "one")
    assert not one.one_log
    assert "one_log" not in settings_of(one)
    assert settings_of(one)["format"] == FORMAT
    old = store_with_a_log_per_shard(tmp_path / "old", shards=8)
    assert not old.one_log
    assert not Store.create(tmp_path / "old", shards=8).one_log


def test_an_older_version_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.create(tmp_path / "many", shards=8)
    Store.create(tmp_path / "one", shards=1)
    monkeypatch.setattr(store_format, "NEWEST_FORMAT", MIXED_FORMAT)
    with pytest.raises(Corruption, match="newer than this scarctl reads") as caught:
        Store.open(tmp_path / "many")
    assert caught.value.kind == "newer-format"
    Store.open(tmp_path / "one")


@pytest.mark.parametrize(
    "change",
    [{"format": FORMAT}, {"format": MIXED_FORMAT}, {"one_log": False}, {"one_log": None}, {"one_log": 1}],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    store = Store.create(tmp_path / "s", shards=8)
    (store.root / SETTINGS).write_bytes(dump_json(settings_of(store) | change))
    with pytest.raises(Corruption, match=r"one log for all shards|field 'one_log'"):
        Store.open(store.root)


@pytest.mark.parametrize("old", [False, True])
def test_logs_and_shards_of_a_layout(tmp_path: Path, layout: Layout, data: Data, old: bool) -> None:
    create = store_with_a_log_per_shard if old else Store.create
    store = create(tmp_path / "s", shards=4, seed=3)
    shards = layout.shards(4, 3)
    assert np.array_equal(store.shard_of(layout), shards)
    assert np.array_equal(store.log_of(layout), shards if old else np.zeros(layout.partitions))
    with open_writer(store, layout=layout) as writer:
        assert {log: ids.tolist() for log, ids in writer.members.items()} == {
            log: np.flatnonzero(store.log_of(layout) == log).tolist()
            for log in ([0, 1, 2, 3] if old else [0])
        }
        for log, ids in writer.members.items():
            writer.commit(log, ids, data, step=1)
    rank = store.of_shard(7)
    assert set(rank.shard_of(layout)) == set(rank.log_of(layout)) == {7}


@pytest.mark.parametrize(("shards", "seed"), [(1, 0), (3, 0), (8, 7), (1000, 2**40)])
def test_shards_are_as_the_format_says(layout: Layout, shards: int, seed: int) -> None:
    """docs/FORMAT.md, section 1, defines this."""
    n = layout.partitions
    c = min(shards, n)
    order = sorted(range(n), key=lambda i: mix((mix(seed) + (i + 1) * 0x9E3779B97F4A7C15) % 2**64))
    first = [-(-s * n // c) for s in range(c + 1)]
    found = layout.shards(shards, seed)
    for s in range(c):
        assert set(np.flatnonzero(found == s)) == set(order[first[s] : first[s + 1]])
