"""Test segments: a plain safetensors library reads them, and data are returned unchanged, for every dtype and shape."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from scarctl.errors import Overwritten, UsageError
from scarctl.state.layout import DTYPES, Group, Layout, TensorSpec, build_layout
from scarctl.store import Store, StoreWriter, open_writer, verify
from scarctl.store.backends.local import LocalBlobs
from scarctl.store.backends.local_files import LocalReader
from scarctl.store.segment import groups_checksums, partition_checksums
from tests.store.helpers import Data, read_all


def _store(folder: Path, layout: Layout) -> tuple[Store, StoreWriter]:
    store = Store.create(folder)
    return store, open_writer(store, layout=layout)


def _segment(store: Store) -> Path:
    return max(store.root.glob("lanes/0/seg/*"), key=lambda p: p.stat().st_mtime_ns)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (1,), (7,), (13, 5), (3, 0), (9, 1, 3)])
def test_every_dtype_round_trips(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    layout = build_layout(
        [("w", "parameter", (TensorSpec("", dtype, shape),)), ("x", "buffer", (TensorSpec("", "U8", (3,)),))],
        rows={"w": 2},
    )
    data = Data(layout)
    store, writer = _store(tmp_path, layout)
    with writer:
        writer.commit(np.arange(layout.partitions), data, step=1)
    state = store.state(0)
    assert read_all(store, state) == (data.all(range(layout.partitions)), {})
    with safetensors.safe_open(_segment(store), "pt") as file:
        loaded = file.get_tensor("x")
        assert bytes(loaded.numpy()) == data.tensors[1][0].tobytes()
        if layout.groups[0].partitions:
            tensor = file.get_tensor("w")
            assert tuple(tensor.shape) == (shape or (1,))
            assert bytes(tensor.contiguous().view(torch.uint8).numpy()) == data.tensors[0][0].tobytes()


def test_plain_safetensors_opens_a_segment(
    store: Store, writer: StoreWriter, layout: Layout, data: Data
) -> None:
    ids = np.arange(layout.partitions)[::2]
    extras = {"rng": np.arange(5, dtype=np.uint8), "step": np.float64(3.5)}
    record = writer.commit(ids, data, step=3, extras=extras)
    path = _segment(store)
    tensors = safetensors.torch.load_file(path)
    assert tensors.pop("scarctl/partitions").tolist() == ids.tolist()
    assert tensors.pop("scarctl/checksums").tolist() == writer.state.checksum[ids].tolist()
    assert tensors["scarctl/extras/0"].dtype == torch.uint8
    for g, group in enumerate(layout.groups):
        local = ids[(ids >= layout.base[g]) & (ids < layout.base[g + 1])]
        starts, stops = layout.row_ranges(local)
        rows = [r for a, b in zip(starts.tolist(), stops.tolist(), strict=True) for r in range(a, b)]
        for t, spec in enumerate(group.tensors):
            if not len(local):
                assert group.key(t) not in tensors
                continue
            found = tensors[group.key(t)]
            assert tuple(found.shape) == (len(rows), *spec.shape[1:])
            assert bytes(found.view(torch.uint8).numpy()) == data.tensors[g][t][rows].tobytes()
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert {k: metadata[k] for k in ("format", "kind", "layout", "lane", "epoch", "step")} == {
        "format": "1", "kind": "delta", "layout": layout.digest, "lane": "0", "epoch": "1", "step": "3",
    }  # fmt: skip
    assert record.segment is not None
    assert path.stat().st_size == record.segment.nbytes


def test_data_are_aligned_to_their_items(
    store: Store, writer: StoreWriter, layout: Layout, data: Data
) -> None:
    writer.commit(
        np.arange(layout.partitions), data, step=0, extras={"a": np.zeros(3, np.uint8), "b": np.zeros(2)}
    )
    raw = _segment(store).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            assert (8 + length + entry["data_offsets"][0]) % DTYPES[entry["dtype"]] == 0, name


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Layout, list[int], int]:
    groups = []
    for i in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(1, 30))
        specs = tuple(
            TensorSpec(
                slot, draw(st.sampled_from(("F32", "BF16", "U8", "I64"))), (rows, draw(st.integers(0, 6)))
            )
            for slot in ("", "m", "v")[: draw(st.integers(1, 3))]
        )
        groups.append((f"g{i}", "parameter", specs))
    per = {f"g{i}": draw(st.integers(1, 40)) for i in range(len(groups))}
    layout = build_layout(groups, rows=per)
    every = list(range(layout.partitions))
    ids = draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    return layout, ids, draw(st.integers(0, 2**16))


@given(
    case=_cases(),
    big=st.sampled_from([1, 50, 1 << 18]),
    chunk=st.sampled_from([1, 64, 1 << 22]),
    gap=st.sampled_from([0, 40, 1 << 14]),
)
def test_any_choice_of_partitions_round_trips(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[Layout, list[int], int],
    big: int,
    chunk: int,
    gap: int,
) -> None:
    layout, ids, seed = case
    assume(layout.partitions > 0)
    data = Data(layout, seed)
    store, writer = _store(tmp_path_factory.mktemp("s"), layout)
    with pytest.MonkeyPatch.context() as patch, writer:
        patch.setattr("scarctl.store.segment_writer.BIG_RUN", big)
        patch.setattr("scarctl.store.segment_writer.CHUNK", chunk)
        patch.setattr("scarctl.store.ranges.SPAN", chunk)
        patch.setattr(LocalBlobs, "batch", chunk)
        patch.setattr(LocalBlobs, "gap", gap)
        writer.commit(np.array(ids, np.int64), data, step=0, extras={"x": 1})
        state = writer.state
        assert read_all(store, state) == (data.all(ids), {})
        some = np.array(ids[::2], np.int64)
        assert read_all(store, state, some)[0] == data.all(some.tolist())
        assert verify(store, read_data=True).intact


def test_pieces_of_many_sizes(tmp_path: Path) -> None:
    specs = [(f"w{n}", "parameter", (TensorSpec("", "U8", (4099, n)),)) for n in (1, 15, 300, 5000)]
    layout = build_layout(specs, rows={"w1": 1, "w15": 1, "w300": 16, "w5000": 1})
    data = Data(layout)
    ids = np.sort(np.random.default_rng(0).permutation(layout.partitions)[: layout.partitions // 3])
    store, writer = _store(tmp_path, layout)
    with writer:
        writer.commit(ids, data, step=0)
    assert read_all(store, store.state(0)) == (data.all(ids.tolist()), {})


def test_neighbours_are_read_with_one_call(
    store: Store, writer: StoreWriter, layout: Layout, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.commit(np.arange(layout.partitions), data, step=0)
    ranges: list[int] = []
    original = LocalReader.read_into

    def counted(self: LocalReader, start: int, buffer: memoryview) -> None:
        ranges.append(len(buffer))
        original(self, start, buffer)

    monkeypatch.setattr(LocalReader, "read_into", counted)
    list(store.read(writer.state, np.arange(5, 20), corrupt=[]))  # rows of "emb": two tensors
    assert ranges[1:] == [15 * 12, 15 * 24]  # after the header
    monkeypatch.setattr(LocalBlobs, "gap", 0)
    ranges.clear()
    list(store.read(writer.state, np.array([1, 2, 9]), corrupt=[]))
    assert ranges[1:] == [24, 12, 48, 24]


def test_a_source_of_the_wrong_length_is_refused(store: Store, writer: StoreWriter, data: Data) -> None:
    def short(g: int, t: int, a: int, b: int) -> memoryview:
        return data(g, t, a, b - 1)

    def strided(g: int, t: int, a: int, b: int) -> memoryview:
        return memoryview(np.repeat(data.tensors[g][t][a:b], 2, axis=0)[::2])

    for source in (short, strided):
        with pytest.raises(UsageError, match="emb"):
            writer.commit(np.array([0, 1]), source, step=0)
    assert (
        len(list(store.root.glob("lanes/0/seg/*"))) == 1
    )  # the first record's; no files of the attempts are left
    writer.commit(np.array([0, 1]), data, step=0)


def test_a_source_that_changed_meanwhile_is_discarded(store: Store, writer: StoreWriter, data: Data) -> None:
    for ids in (np.array([1]), np.empty(0, np.int64)):
        with pytest.raises(Overwritten):
            writer.commit(ids, data, step=0, extras={"a": 1}, verify_source=lambda: False)
    assert len(list(store.root.glob("lanes/0/seg/*"))) == 1
    assert writer.state.records == 1
    assert writer.commit(np.array([1]), data, step=0, verify_source=lambda: True).k == 2


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 3, 8, 2000, 5000]), st.integers(1, 3), st.integers(1, 3)), max_size=8
    ),
    st.integers(0, 1 << 32).map(Random),
)
def test_checksums_of_many_groups_are_those_of_each(cuts: list[tuple[int, int, int]], random: Random) -> None:
    parts = []
    for width, rows, count in cuts:
        specs = (TensorSpec("", "U8", (rows * count, width)), TensorSpec("m", "U8", (rows * count, width)))
        group = Group("g", "parameter", rows, specs)
        data = [np.frombuffer(random.randbytes(rows * count * width), np.uint8) for _ in specs]
        parts.append((group, count, data))
    found = groups_checksums(parts)
    assert [one.tolist() for one in found] == [partition_checksums(*part).tolist() for part in parts]
