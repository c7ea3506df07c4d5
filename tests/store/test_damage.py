"""Test flipped bits, missing and truncated files: found, named down to the partition, and worked around if possible."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from scarctl.errors import Corruption, ScarError
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.state.version import pack, step_of
from scarctl.store import (
    Collector,
    Store,
    StoreWriter,
    create_snapshot,
    delete_snapshot,
    open_writer,
    sealed_sets,
    snapshots,
    verify,
)
from scarctl.store.format import dump_json
from scarctl.store.older import older_copies
from tests.store.helpers import Data, read_all, record_file, summary


@pytest.fixture
def tiny(memory_path: Path) -> tuple[Store, Layout, Data]:
    layout = build_layout(
        [("w", "parameter", (TensorSpec("", "F32", (7, 3)), TensorSpec("m", "BF16", (7, 3)))),
         ("b", "buffer", (TensorSpec("", "U8", (5,)),))],
        rows={"w": 2},
    )  # fmt: skip
    store, data = Store.create(memory_path / "run"), Data(layout)
    with open_writer(store, layout=layout) as writer:
        writer.commit(np.arange(layout.partitions), data, step=1, sealed=True, extras={"a": np.arange(3)})
        writer.commit(np.array([1, 3]), data, step=2)
    return store, layout, data


def _flip(path: Path, byte: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1 << bit]))


@pytest.mark.slow
def test_every_flipped_byte_is_found_by_verify(tiny: tuple[Store, Layout, Data]) -> None:
    store, _, _ = tiny
    assert verify(store, read_data=True).problems == []
    newest = store.state(0).segments[-1].name  # every third byte of this one, every 53rd of the others
    for path in sorted(p for p in store.root.rglob("*") if p.is_file() and p.name != "lock"):
        for byte in range(0, path.stat().st_size, 3 if path.name == newest else 53):
            _flip(path, byte, byte % 8)
            report = verify(store, read_data=True)
            assert str(path) in {p.file for p in report.problems}, f"{path} byte {byte}"
            _flip(path, byte, byte % 8)
    assert verify(store, read_data=True).problems == []


def test_damaged_data_are_named_and_the_others_read(tiny: tuple[Store, Layout, Data]) -> None:
    store, layout, data = tiny
    state = store.state(0)
    first = state.segments[state.segment[0]]
    path = store.root / "lanes/0/seg" / first.name
    starts, _ = layout.row_ranges(np.arange(4))
    for i in (0, 2):
        byte = first.head + int(starts[i]) * 12 + 5  # "w" comes first: F32, 12 bytes a row
        _flip(path, byte)
        found, bad = read_all(store, state)
        assert set(bad) == {i}
        assert str(path) in bad[i]
        assert found == data.all(set(range(layout.partitions)) - {i})
        report = verify(store, read_data=True)
        assert [(p.file, p.partition) for p in report.problems] == [(str(path), layout.name(i))]
        assert report.damaged_partitions == 1
        assert verify(store, read_data=False).intact  # only the part that it claims to read
        _flip(path, byte)


def test_random_damage_is_never_returned(tiny: tuple[Store, Layout, Data]) -> None:
    """Whatever bit is flipped, an opened store raises Corruption, or leaves the damaged partitions out."""
    store, layout, data = tiny
    good = data.all(range(layout.partitions))
    rng = np.random.default_rng(0)
    paths = sorted(p for p in store.root.rglob("*") if p.is_file() and p.name != "lock")
    messages: list[str] = []
    for _ in range(300):
        path = paths[rng.integers(len(paths))]
        byte, bit = int(rng.integers(path.stat().st_size)), int(rng.integers(8))
        _flip(path, byte, bit)
        try:
            opened = Store.open(store.url)
            found, _ = read_all(opened, opened.state(0))
            assert found.items() <= good.items()
            extras = opened.read_extras(opened.state(0))
            assert extras is not None or opened.state(0).damaged
            assert extras is None or extras[1]["a"].tolist() == [0, 1, 2]  # type: ignore[index]
        except Corruption as error:
            messages.append(str(error))
        _flip(path, byte, bit)
    assert messages
    # No command opens a store without its settings, and none saves to one without a record.
    advice = {"scarctl.json": "put that file back", "/log/": "put this file back", "": "scarctl verify"}
    for message in messages:
        assert str(store.root) in message
        assert advice[next(name for name in advice if name in message)] in message
    assert any("scarctl.json" in m for m in messages)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, -1])
def test_truncated_and_missing_files(tiny: tuple[Store, Layout, Data], cut: int) -> None:
    store, _, _ = tiny
    first = next(iter(store.log(0).records()))
    assert first.segment is not None
    # The newest record may be missing, and the segment that a later full record has replaced.
    spare = {record_file(store, 3), store.root / "lanes/0/seg" / first.segment.name}
    for path in sorted(p for p in store.root.rglob("*") if p.is_file() and p.name != "lock"):
        good = path.read_bytes()
        path.write_bytes(good[:cut])
        assert str(path) in {p.file for p in verify(store, read_data=True).problems}
        path.unlink()
        if path.name not in ("scarctl.json", "settings.json") and path not in spare:
            problems = verify(store, read_data=True).problems
            assert any(str(path) in f"{problem.file}: {problem.reason}" for problem in problems)
        path.write_bytes(good)
    record_file(store, 1).unlink()
    assert any("missing" in p.reason for p in verify(store, read_data=False).problems)


def test_a_lost_claim_is_found(tiny: tuple[Store, Layout, Data]) -> None:
    """Its log is never read again: the next opening claims the number anew."""
    store, layout, _ = tiny
    (store.root / "lanes/0/terms/00000001.json").unlink()
    (problem,) = verify(store, read_data=False).problems
    assert "the claim of this term is missing" in problem.reason
    with open_writer(store, layout=layout):
        pass
    (problem,) = verify(store, read_data=False).problems
    assert "the claim of this term is another one" in problem.reason


def test_the_copy_of_the_settings_comes_with_the_next_opening(tiny: tuple[Store, Layout, Data]) -> None:
    """When verify has advised to delete a damaged one."""
    store, layout, _ = tiny
    copy, settings = store.root / "layout/settings.json", (store.root / "scarctl.json").read_bytes()
    assert copy.read_bytes() == settings
    copy.write_bytes(b"{}")
    (problem,) = verify(store, read_data=False).problems
    assert problem.file == str(copy)
    assert "delete it" in problem.reason
    copy.unlink()
    assert verify(store, read_data=False).intact
    open_writer(store, layout=layout).close()
    assert copy.read_bytes() == settings


def test_settings_of_another_store_do_not_condemn_the_copy(
    tiny: tuple[Store, Layout, Data], tmp_path: Path
) -> None:
    store, _, _ = tiny
    other = Store.create(tmp_path / "other", shards=5)
    (store.root / "scarctl.json").write_bytes((other.root / "scarctl.json").read_bytes())
    (problem,) = verify(store, read_data=False).problems
    assert problem.file == str(store.root / "layout/settings.json")
    assert "if that file was copied here from another store, put this one back" in problem.reason


def test_a_missing_segment_puts_partitions_in_doubt(tiny: tuple[Store, Layout, Data]) -> None:
    """It is unknown what it held: older copies are shown, and marked."""
    store, layout, data = tiny
    old = data.all(range(layout.partitions))
    with open_writer(store, layout=layout) as writer:
        data.change([2], 9)
        lost = writer.commit(np.array([2]), data, step=3)
        writer.commit(np.array([3]), data, step=3)
        old |= data.all([3])
    assert lost.segment is not None
    path = store.root / "lanes/0/seg" / lost.segment.name
    path.unlink()

    state = store.state(0)
    assert [(d.seq, d.file) for d in state.damaged] == [(lost.seq, str(path))]
    assert state.doubt.tolist() == [i != 3 for i in range(layout.partitions)]
    assert step_of(state.version).tolist() == [1, 2, 1, 3, 1][: layout.partitions]
    assert [seal.step for seal in state.sealed] == [1]
    assert read_all(store, state) == (old, {})

    with open_writer(store, layout=layout) as writer:
        with pytest.raises(ScarError, match="sealed"):
            writer.commit(np.array([2]), data, step=4, sealed=True)
        writer.commit(np.array([2]), data, step=4)
        assert writer.state.doubt.tolist() == [i not in (2, 3) for i in range(layout.partitions)]
        assert summary(store.state(0)) == summary(writer.state)
        writer.commit(np.arange(layout.partitions), data, step=5, sealed=True)
        assert not writer.state.doubt.any()
    assert store.state(0).sealed[-1].step == 5
    assert read_all(store, store.state(0)) == (data.all(range(layout.partitions)), {})


def test_an_older_copy_below_damage_is_not_called_sealed(
    store: Store, writer: StoreWriter, layout: Layout, data: Data
) -> None:
    writer.commit(np.arange(layout.partitions), data, step=0, sealed=True)
    lost = writer.commit(np.array([1]), data, step=1)
    writer.commit(np.empty(0, np.int64), data, step=2, sealed=True)
    newest = writer.commit(np.array([1]), data, step=3)
    state = writer.state
    assert lost.segment is not None
    assert newest.segment is not None
    (store.root / "lanes/0/seg" / newest.segment.name).unlink()
    older = older_copies(store.log(0), np.array([1]), state)
    assert older is not None
    assert older.version.tolist() == [pack(1, 2)]
    (store.root / "lanes/0/seg" / lost.segment.name).unlink()
    assert read_all(store, older)[0] == {}
    older = older_copies(store.log(0), np.array([1]), older)
    assert older is not None
    assert older.version.tolist() == [pack(1, 0)]


def test_a_record_of_another_chain_is_found(tiny: tuple[Store, Layout, Data]) -> None:
    store, _, _ = tiny
    record = list(store.log(0).records())[1]
    obj = {**record.to_json(), "created": "2001-01-01T00:00:00+00:00"}
    record_file(store, 2).write_bytes(dump_json(obj))
    with pytest.raises(Corruption, match="chain"):
        store.state(0)
    assert any("chain" in p.reason for p in verify(store, read_data=False).problems)


@pytest.mark.parametrize(
    "change",
    [
        {"place": [1, "0" * 32, 3]}, {"place": 3}, {"lane": 1}, {"kind": "x"}, {"epoch": 0}, {"epoch": True},
        {"step": -1}, {"step": 2**50}, {"parent": "x"}, {"layout": "../" + "0" * 61}, {"layout": "0" * 64},
        {"line": "x"}, {"base": 0}, {"full": 0}, {"partitions": 10**15}, {"partitions": 1}, {"rest": 1},
        {"unsaved": 1}, {"doubt": 1}, {"segment": None}, {"segment": []},
        {"whole": 1}, {"created": None}, {"format": 0}, *({"segment." + k: v} for k, v in [
            ("name", "../../../etc/passwd"), ("name", "00000001-" + "g" * 32 + ".safetensors"),
            ("bytes", 10**17), ("bytes", -1), ("head", 2**61), ("data", 2**61), ("tail", 0), ("tail", 2**61),
            ("digest", "0" * 63), ("tail_digest", "0" * 64),
        ]),
    ],
)  # fmt: skip
def test_hostile_records_are_refused(tiny: tuple[Store, Layout, Data], change: dict[str, object]) -> None:
    """The file is well-formed, with a valid checksum, and false."""
    store, _, _ = tiny
    path = record_file(store, 3)
    obj = list(store.log(0).records())[2].to_json()
    ((key, value),) = change.items()
    if key.startswith("segment."):
        obj["segment"] = {**obj["segment"], key.split(".")[1]: value}
    else:
        obj[key] = value
    path.write_bytes(dump_json(obj))
    try:
        reason = store.state(0).damaged[0].file
    except Corruption as error:
        reason = error.message
    assert str(store.root) in reason
    assert verify(store, read_data=True).problems


def test_ids_so_far_apart_that_their_difference_wraps_are_refused(tiny: tuple[Store, Layout, Data]) -> None:
    store, _, _ = tiny
    record = list(store.log(0).records())[2]
    assert record.segment is not None
    path = store.root / "lanes/0/seg" / record.segment.name
    data = bytearray(path.read_bytes())
    tail = record.segment.tail
    data[tail : tail + 16] = np.array([(1 << 63) - 1, -(1 << 63) + 3], "<i8").tobytes()
    path.write_bytes(data)
    digest = hashlib.sha256(data[tail:]).hexdigest()
    obj = record.to_json()
    obj["segment"] = {**obj["segment"], "tail_digest": digest}
    record_file(store, 3).write_bytes(dump_json(obj))
    assert "not ascending" in store.state(0).damaged[0].reason
    assert any("list of partitions" in p.reason for p in verify(store, read_data=True).problems)


def test_a_damaged_segment_is_named_and_none_that_was_collected(tiny: tuple[Store, Layout, Data]) -> None:
    store, layout, data = tiny
    with open_writer(store, layout=layout) as writer:
        for step in (7, 8):
            writer.commit(np.arange(layout.partitions), data, step=step, sealed=True)
        Collector(writer, floor=0).collect()
    state = store.state(0)
    (seal,) = state.sealed
    for name in {ref.name for ref in state.segments}:
        os.truncate(store.root / "lanes/0/seg" / name, 100)
    segment = store.log(0).at(seal.place).segment
    assert segment is not None
    with pytest.raises(Corruption, match=segment.name):
        store.log(0).state_at(seal.place)


def test_a_snapshot_of_a_record_that_is_gone_is_a_problem_not_the_end(
    tiny: tuple[Store, Layout, Data],
) -> None:
    """It may have been collected while its snapshot was made, by a process that then died."""
    store, layout, data = tiny
    create_snapshot(store, "first", sealed_sets([store.state(0)])[0])
    (snapshot,) = snapshots(store)
    delete_snapshot(store, "first")
    with open_writer(store, layout=layout) as writer:
        writer.commit(np.arange(layout.partitions), data, step=7, sealed=True)
        Collector(writer, floor=0).collect()
    store.blobs.create_exclusive("snapshots/first.json", [snapshot.data])
    problems = verify(store, read_data=True).problems
    assert [p.file for p in problems] == [str(store.root / snapshot.places[0].path(0))]


def test_an_oversized_record_is_refused_before_it_is_read(tiny: tuple[Store, Layout, Data]) -> None:
    store, _, _ = tiny
    path = record_file(store, 4)
    with path.open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(Corruption, match="limit"):
        store.state(0)
    os.truncate(path, 0)
    path.unlink()


def test_unknown_fields_are_kept_and_ignored(tiny: tuple[Store, Layout, Data]) -> None:
    store, layout, data = tiny
    tip = list(store.log(0).records())[2]
    record_file(store, 3).write_bytes(dump_json({**tip.to_json(), "new": {"x": 1}}))
    with open_writer(store, layout=layout) as writer:
        writer.commit(np.array([0]), data, step=9)
    assert verify(store, read_data=True).intact
    assert store.state(0).step == 9


def test_the_first_table_is_soon_not_the_only_one(memory_path: Path) -> None:
    """A run that is killed early and loses its first, small segment keeps everything else."""
    layout = build_layout([("w", "parameter", (TensorSpec("", "F32", (64, 3)),))], rows={"w": 4})
    store, data = Store.create(memory_path / "run"), Data(layout)
    writer = open_writer(store, layout=layout)
    everything = np.arange(layout.partitions)
    writer.commit(everything, data, step=1, sealed=True)
    writer.commit(everything[:1], data, step=2)  # not closed: as if killed
    first = next(iter(store.log(0).records()))
    assert first.segment is not None
    (file,) = (memory_path / "run").rglob(f"seg/{first.segment.name}*")
    file.unlink()
    state = Store.open(memory_path / "run").state(0)
    assert state.ids.tolist() == everything.tolist()
    assert bool(state.saved.all())
    assert verify(store, read_data=True).problems == []
