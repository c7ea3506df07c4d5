"""Test the records of hosts: hints that are overwritten, and that nothing in a store depends on."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.errors import Corruption
from scarctl.store import Store, open_writer, verify
from scarctl.store.format import HOSTS, dump_json
from scarctl.store.hosts import (
    GONE,
    MAX_HOST,
    MOST_HOSTS,
    HostRecord,
    gone_hosts,
    host_marks,
    host_path,
    read_host,
    read_hosts,
    remove_hosts,
    write_host,
)
from scarctl.store.layouts import layout_digests
from scarctl.store.prune import Retention, plan_prune, prune
from scarctl.store.usage import usage
from tests.store.helpers import Data, small_layout
from tests.support.places import Place
from tests.support.ranks import RankStore

PLACE, OTHER = "0123456789abcdef", "f" * 16
RECORD = HostRecord(PLACE, "node7", "rack 2", "10.0.0.7", 4711, False, 1_700_000_000, (OTHER,))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(tmp_path / "store")
    made.blobs.prepare(HOSTS)
    return made


def changed(**fields: Any) -> bytes:
    """Return the record with some fields changed, under a checksum that fits."""
    obj = {k: v for k, v in json.loads(RECORD.data).items() if k != "checksum"}
    return dump_json({**obj, **fields})


def test_a_record_is_overwritten_and_its_mark_changes(store: Store) -> None:
    write_host(store, RECORD)
    before = host_marks(store)
    assert host_marks(store) == before
    newer = replace(RECORD, port=4712, written=RECORD.written + 60)
    write_host(store, newer)
    after = host_marks(store)
    assert before.keys() == after.keys() == {PLACE}
    assert before[PLACE] != after[PLACE]
    assert read_hosts(store) == {PLACE: newer}
    assert [path.name for path in (store.root / HOSTS).iterdir()] == [f"{PLACE}.json"]


def test_records_on_an_object_store(s3_place: Place) -> None:
    store = Store.create(s3_place.url, storage_options=s3_place.options)
    try:
        store.blobs.prepare(HOSTS)
        write_host(store, RECORD)
        before = host_marks(store)
        assert before[PLACE]
        assert host_marks(store) == before
        write_host(store, replace(RECORD, port=4712))
        assert host_marks(store)[PLACE] not in ("", before[PLACE])
        assert read_hosts(store)[PLACE].port == 4712
        assert remove_hosts(store, [PLACE]) == 1
        assert read_hosts(store) == {}
    finally:
        store.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "topology"},
        {"place": OTHER},
        {"host": 7},
        {"host": "x" * 301},
        {"domain": None},
        {"address": "node7"},
        {"address": "10.0.0.7/8"},
        {"address": "0.0.0.0"},
        {"address": "::"},
        {"address": "224.0.0.1"},
        {"address": ["10.0.0.7"]},
        {"port": 0},
        {"port": 65_536},
        {"port": True},
        {"tls": 1},
        {"written": -1},
        {"written": 1e9},
        {"written": 1 << 41},
        {"to": PLACE},
        {"to": [PLACE] * 65},
        {"to": ["../../etc"]},
        {"to": [1]},
        {"format": 99},
    ],
    ids=str,
)
def test_a_record_with_other_values_is_ignored(store: Store, fields: dict[str, Any]) -> None:
    data = changed(**fields)
    with pytest.raises(Corruption):
        HostRecord.parse(data, "it", place=PLACE)
    (store.root / host_path(PLACE)).write_bytes(data)
    assert read_host(store, PLACE) is None
    assert read_hosts(store) == {}


def test_what_is_not_a_record_is_not_read(store: Store, tmp_path: Path) -> None:
    folder = store.root / HOSTS
    write_host(store, RECORD)
    (folder / f"{OTHER}.json").write_bytes(b"x" * (MAX_HOST + 1))
    (folder / "notes.txt").write_text("not a record")
    (folder / f"{'A' * 16}.json").write_bytes(RECORD.data)
    (folder / f"{'1' * 16}.json").mkdir()
    (folder / f"{'2' * 16}.json").symlink_to(tmp_path / "elsewhere")
    assert read_hosts(store) == {PLACE: RECORD}


def test_a_display_name_cannot_control_a_terminal(store: Store) -> None:
    (store.root / host_path(PLACE)).write_bytes(changed(host="a\x1b[2Jb"))
    found = read_host(store, PLACE)
    assert found is not None
    assert "\x1b" not in found.host


def test_very_many_records_are_bounded(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(MOST_HOSTS + 5):
        (store.root / host_path(f"{number:016x}")).write_bytes(b"")
    assert len(host_marks(store)) == MOST_HOSTS
    assert f"{MOST_HOSTS + 5} hosts are recorded" in caplog.text


def test_only_records_older_than_a_day_are_gone(store: Store) -> None:
    now = float(RECORD.written)
    for age, gone in ((0, False), (GONE, False), (GONE + 1, True)):
        newer = replace(RECORD, place=OTHER, written=int(now + age))
        assert gone_hosts({PLACE: RECORD, OTHER: newer}, now + age) == [PLACE] * gone
    assert RECORD.fresh(now - 599)
    assert not RECORD.fresh(now + 601)


@pytest.mark.parametrize("wrong", [-900 * GONE, 900 * GONE])
def test_a_clock_that_is_wrong_makes_no_record_gone(wrong: float) -> None:
    """A machine may start before its clock is set. Its own record, by the same clock, confirms nothing."""
    records = {PLACE: RECORD, OTHER: replace(RECORD, place=OTHER, written=RECORD.written - int(GONE) - 1)}
    now = RECORD.written + wrong
    assert gone_hosts({PLACE: RECORD}, now) == []
    assert gone_hosts(records, now) == [OTHER]
    own = "e" * 16
    records[own] = replace(RECORD, place=own, written=int(now))
    assert gone_hosts({PLACE: RECORD, own: records[own]}, now, [own]) == []
    assert gone_hosts(records, now, [own]) == [OTHER]
    assert gone_hosts(records, float(RECORD.written)) == ([OTHER, own] if wrong < 0 else [OTHER])


def test_a_store_with_records_is_a_good_store(store: Store) -> None:
    """Damaged ones too: nothing depends on them."""
    write_host(store, RECORD)
    (store.root / host_path(OTHER)).write_bytes(b"garbage")
    before = verify(store, read_data=True)
    assert before.problems == []
    assert usage(store, {})["bytes"] == sum(p.stat().st_size for p in store.root.rglob("*.json"))
    again = Store.open(store.root)
    assert again.shards() == layout_digests(again.blobs) == []


@pytest.mark.parametrize("alive", [False, True], ids=["stopped", "while ranks save"])
def test_prune_removes_records_of_hosts_that_are_gone(tmp_path: Path, alive: bool) -> None:
    ranks = RankStore(tmp_path / "store", 2).save(3)
    if not alive:
        ranks.close()
    store = Store.open(tmp_path / "store")
    now = int(time.time())
    store.blobs.prepare(HOSTS)
    for place, written in ((PLACE, now - 100), (OTHER, now - 2 * int(GONE))):
        write_host(store, replace(RECORD, place=place, written=written))
    plan = plan_prune(store, Retention())
    assert plan.hosts == (OTHER,)
    assert not plan.empty
    assert read_hosts(store).keys() == {PLACE, OTHER}
    assert prune(store, plan).files >= 1
    assert read_hosts(store).keys() == {PLACE}
    ranks.close()


def test_pruning_records_alone_begins_no_epoch(tmp_path: Path) -> None:
    layout = small_layout()
    store = Store.create(tmp_path / "store")
    with open_writer(store, layout=layout) as writer:
        writer.commit(np.arange(layout.partitions), Data(layout), step=1, sealed=True)
    prune(store, plan_prune(store, Retention()))
    store.blobs.prepare(HOSTS)
    for place, written in ((PLACE, time.time()), (OTHER, time.time() - 2 * GONE)):
        write_host(store, replace(RECORD, place=place, written=int(written)))
    epochs = [record.epoch for record in store.log(0).records()]
    plan = plan_prune(store, Retention())
    assert not plan.collects
    assert prune(store, plan).files == 1
    assert [record.epoch for record in store.log(0).records()] == epochs
