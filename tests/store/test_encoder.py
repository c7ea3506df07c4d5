"""Test encoded commits: reading, seals, compaction, and which claims of a hostile record are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.torch

from scarctl.errors import Corruption, UsageError
from scarctl.state.encoding import decode, encode, encoded_groups, parts, stored_as
from scarctl.state.encodings import Encoding
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.store import Collector, Store, StoreWriter, open_writer, verify
from scarctl.store.check import Report
from scarctl.store.encoder import Encoder
from scarctl.store.format import segment_path, sign_json
from scarctl.store.record import Record
from scarctl.store.usage import usage
from tests.store.helpers import place, read_all, summary

LOSSY: list[Encoding] = ["bfloat16", "int8"]
F32 = np.float32


class Weights:
    """Random float32 weights and slots, a bfloat16 tensor, and a buffer: a segment's source."""

    def __init__(self) -> None:
        self.layout = build_layout(
            [
                (
                    "emb",
                    "parameter",
                    (
                        TensorSpec("", "F32", (50, 16)),
                        TensorSpec("exp_avg", "F32", (50, 16)),
                        TensorSpec("exp_avg_sq", "F32", (50, 16)),
                    ),
                ),
                ("fc", "parameter", (TensorSpec("", "F32", (11, 600)), TensorSpec("m", "F64", (11, 4)))),
                ("half", "parameter", (TensorSpec("", "BF16", (7, 40)),)),
                ("bias", "parameter", (TensorSpec("", "F32", (33,)),)),
                ("mean", "buffer", (TensorSpec("", "F32", (12, 8)),)),
                ("scalar", "parameter", (TensorSpec("", "F32", ()),)),
                ("count", "parameter", (TensorSpec("", "I64", (9, 9)),)),
            ],
            rows={"emb": 1, "fc": 4, "half": 3, "bias": 10, "count": 2, "mean": 12},
            optimizer="AdamW",
        )
        self.tensors: list[list[np.ndarray]] = []
        self.change(0)

    def change(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.tensors = []
        for group in self.layout.groups:
            rows = []
            for spec in group.tensors:
                values = rng.standard_normal((spec.rows, *spec.shape[1:])).astype(F32)
                if spec.slot == "exp_avg_sq":
                    values **= 2
                wide = {"F64": np.float64, "I64": np.int64}.get(spec.dtype)
                raw = values if wide is None else (values * 9).astype(wide)
                if spec.dtype == "BF16":
                    raw = (values.view(np.uint32) >> 16).astype(np.uint16)
                rows.append(np.ascontiguousarray(raw).view(np.uint8).reshape(spec.rows, -1))
            self.tensors.append(rows)

    def __call__(self, group: int, tensor: int, start: int, stop: int) -> memoryview:
        return memoryview(self.tensors[group][tensor][start:stop])

    def decoded(self, i: int, encoding: Encoding) -> bytes:
        """Return the bytes to which partition `i` is decoded."""
        g, start, stop = place(self.layout, i)
        group = self.layout.groups[g]
        rows = [array[start:stop].reshape(-1) for array in self.tensors[g]]
        stored = [encode(rows[part.of], group.tensors[part.of], part) for part in parts(group, encoding)]
        return b"".join(one.tobytes() for one in decode(group, encoding, stored))

    def all(self, ids: np.ndarray, encoding: Encoding = "exact") -> dict[int, bytes]:
        return {i: self.decoded(i, encoding) for i in ids.tolist()}


@pytest.fixture
def data() -> Weights:
    return Weights()


@pytest.fixture
def layout(data: Weights) -> Layout:
    return data.layout


def commit(
    writer: StoreWriter, data: Weights, ids: np.ndarray, encoding: Encoding, step: int, **options: Any
) -> tuple[Record, Encoder]:
    source = Encoder(data.layout, encoding, data, ids)
    return writer.commit(ids, source, step=step, **options), source


def checked(store: Store) -> Report:
    report = verify(store, read_data=True)
    assert report.intact, report.problems
    return report


def forge(store: Store, seq: int, **changes: object) -> None:
    """Write a record again with other fields and a valid checksum."""
    record = store.log(0).at(store.log(0).place(seq))
    obj = record.to_json()
    for name, value in changes.items():
        if name == "encoding":
            obj["segment"] = {**obj["segment"], "encoding": value}
        else:
            obj[name] = value
    (store.root / record.place.path(0)).write_bytes(sign_json(obj)[0])


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_reader_gets_decoded_copies_and_is_told_so(
    store: Store, writer: StoreWriter, data: Weights, encoding: Encoding
) -> None:
    everything = np.arange(data.layout.partitions)
    writer.commit(everything, data, step=1, sealed=True, extras={"a": 1})
    before = data.all(everything)
    data.change(1)
    ids = everything[np.random.default_rng(3).random(everything.size) < 0.5]
    ids = np.union1d(ids, everything[-1:])
    record, _ = commit(writer, data, ids, encoding, 2, extras={"a": 2})
    assert record.encoded
    assert record.nbytes == stored_as(data.layout, encoding).bytes_of(ids).sum()
    for state in (writer.state, store.state(0)):
        lossy = ids[encoded_groups(data.layout, encoding)[data.layout.group_of(ids)]]
        assert np.array_equal(state.ids[state.encoded], lossy)
        found, bad = read_all(store, state)
        assert (found, bad) == ({**before, **data.all(ids, encoding)}, {})
        corrupt: list[Any] = []
        batches = list(store.read(state, everything, corrupt=corrupt))
        assert all(batch.encoded == bool(np.isin(batch.ids, lossy).all()) for batch in batches)
        assert {batch.encoded for batch in batches} == {True, False}
    assert summary(store.state(0)) == summary(writer.state)
    checked(store)


@pytest.mark.parametrize("encoding", LOSSY)
def test_the_error_of_each_parameter_is_measured(
    writer: StoreWriter, data: Weights, encoding: Encoding
) -> None:
    ids = np.arange(data.layout.partitions)[::2]
    _, source = commit(writer, data, ids, encoding, 1)
    for i, error in zip(ids.tolist(), source.error.tolist(), strict=True):
        g, start, stop = place(data.layout, i)
        live = data.tensors[g][0][start:stop].reshape(-1)
        back = np.frombuffer(data.decoded(i, encoding), np.uint8)[: live.size]
        if data.layout.groups[g].tensors[0].dtype == "F32":
            wanted = np.square(live.view(F32).astype(np.float64) - back.view(F32)).sum()
            assert error == pytest.approx(wanted, rel=1e-6)
        elif data.layout.groups[g].name == "half":
            assert (error > 0) == (encoding == "int8")
        else:
            assert error == 0


def test_plain_safetensors_reads_encoded_data(store: Store, writer: StoreWriter, data: Weights) -> None:
    ids = np.arange(data.layout.partitions)
    for encoding, dtype in (("bfloat16", "torch.bfloat16"), ("int8", "torch.int8")):
        record, _ = commit(writer, data, ids, encoding, 1)  # type: ignore[arg-type]
        assert record.segment is not None
        tensors = safetensors.torch.load_file(store.root / segment_path(0, record.segment.name))
        assert str(tensors["emb/exp_avg"].dtype) == dtype
        assert str(tensors["mean"].dtype) == "torch.float32"
    by_hand = tensors["emb"].float() * tensors["emb/scarctl-scale"][:, None]
    live = data.tensors[0][0].view(F32)
    assert np.allclose(by_hand.numpy(), live, atol=np.abs(live).max() / 250)
    roots = tensors["emb/exp_avg_sq"].numpy().view(np.uint8).astype(F32)
    squares = np.square(roots * tensors["emb/exp_avg_sq.scarctl-scale"].numpy()[:, None])
    assert (squares >= data.tensors[0][2].view(F32) * (1 - 1e-6)).all()


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_seal_needs_exact_copies(
    store: Store, writer: StoreWriter, data: Weights, encoding: Encoding
) -> None:
    everything = np.arange(data.layout.partitions)
    writer.commit(everything, data, step=1, sealed=True)
    with pytest.raises(UsageError, match="sealed"):
        commit(writer, data, everything, encoding, 2, sealed=True)
    commit(writer, data, everything[:9], encoding, 2)
    with pytest.raises(UsageError, match=r"cannot be sealed: 5 partitions, such as emb\[4:5\]"):
        writer.commit(everything[:4], data, step=3, sealed=True)
    writer.commit(everything[:9], data, step=3, sealed=True, whole="ab" * 16)
    state = store.state(0)
    assert not state.encoded.any()
    assert state.whole == "ab" * 16
    assert read_all(store, state) == (data.all(everything), {})


def test_compaction_moves_encoded_copies_as_they_are(store: Store, data: Weights) -> None:
    everything = np.arange(data.layout.partitions)
    with open_writer(store, layout=data.layout) as writer:
        writer.commit(everything, data, step=1)
        encodings: list[Encoding] = ["bfloat16", "int8", "exact"]
        for step in range(2, 14):
            ids = everything[step % 5 :: 2 + step % 3]
            commit(writer, data, ids, encodings[step % 3], step)
        before = read_all(store, store.state(0))[0]
        kinds = writer.state.encoding(everything).tolist()
        sizes = writer.state.bytes_of(everything).tolist()
        collector = Collector(writer, floor=0, ratio=1.1)
        collector.collect()
        assert collector.done.moved_bytes
        assert writer.state.encoding(everything).tolist() == kinds
        assert set(kinds) == {0, 1, 2}
        assert usage(store, [writer.state])["live_bytes"] == sum(sizes)
    again = Store.open(store.root)
    assert read_all(again, again.state(0)) == (before, {})
    assert again.state(0).encoding(everything).tolist() == kinds
    checked(again)


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_flipped_byte_shows(store: Store, writer: StoreWriter, data: Weights, encoding: Encoding) -> None:
    ids = np.arange(data.layout.partitions)
    record, _ = commit(writer, data, ids, encoding, 1)
    assert record.segment is not None
    path = store.root / segment_path(0, record.segment.name)
    raw = bytearray(path.read_bytes())
    raw[record.segment.head + 5] ^= 1  # in the scales, or in the first of the exact tensors
    raw[record.segment.head + record.segment.data - 5] ^= 1
    path.write_bytes(raw)
    _, bad = read_all(store, store.state(0))
    assert len(bad) == 2
    assert len(verify(store, read_data=True).problems) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"encoding": "int4"}, "'int4' is not an encoding"),
        ({"encoding": 8}, "encoding"),
        ({"whole": "ab" * 16}, "which state is consistent"),
    ],
)
def test_a_record_that_lies_about_its_encoding_is_refused(
    store: Store, data: Weights, changes: dict[str, object], reason: str
) -> None:
    ids = np.arange(data.layout.partitions)
    with open_writer(store, layout=data.layout) as writer:
        record, _ = commit(writer, data, ids, "int8", 1)
    forge(store, record.seq, **changes)
    with pytest.raises(Corruption, match=reason):
        Store.open(store.root).state(0)
    assert not verify(store, read_data=True).intact


@pytest.mark.parametrize("claimed", ["bfloat16", "exact"])
def test_data_of_another_encoding_than_the_records_are_not_decoded(
    store: Store, data: Weights, claimed: str
) -> None:
    ids = np.arange(data.layout.partitions)
    with open_writer(store, layout=data.layout) as writer:
        record, _ = commit(writer, data, ids, "int8", 1)
    forge(store, record.seq, encoding=claimed)
    again = Store.open(store.root)
    found, bad = read_all(again, again.state(0))
    exact = [i for i in ids.tolist() if data.layout.groups[place(data.layout, i)[0]].kind == "buffer"]
    for i, copy in found.items():  # only tensors that both encodings store alike
        assert copy == data.decoded(i, "exact")
    assert set(exact) <= found.keys()
    assert len(bad) > 50
    assert not verify(again, read_data=True).intact


def test_a_seal_over_encoded_copies_is_refused(store: Store, data: Weights) -> None:
    ids = np.arange(data.layout.partitions)
    with open_writer(store, layout=data.layout) as writer:
        commit(writer, data, ids, "int8", 1)
        writer.repeat()
        record = writer.state.place
    assert record is not None
    forge(store, record.seq, whole="ab" * 16, seal=record.to_json())
    with pytest.raises(Corruption, match="has encoded copies"):
        Store.open(store.root).state(0)
    forge(store, record.seq - 1, whole="ab" * 16, seal=[record.number, record.id, record.k - 1])
    with pytest.raises(Corruption, match="calls a state consistent that is not"):
        store.state(0, at=record.seq - 1)


def test_a_table_that_calls_encoded_copies_a_whole_state(store: Store, data: Weights) -> None:
    """Only a forged one does: its copies are not called so."""
    ids = np.arange(data.layout.partitions)
    with open_writer(store, layout=data.layout) as writer:
        commit(writer, data, ids, "int8", 1)
        writer.state.whole = "ab" * 16
        writer.repeat()
    again = Store.open(store.root).state(0)
    assert again.encoded.any()
    assert again.whole == ""


def test_scales_of_the_wrong_length_are_damage(store: Store, data: Weights) -> None:
    """The segment's header gives a scale fewer rows than the codes have."""
    ids = np.arange(data.layout.partitions)
    with open_writer(store, layout=data.layout) as writer:
        record, _ = commit(writer, data, ids, "int8", 1)
    assert record.segment is not None
    path = store.root / segment_path(0, record.segment.name)
    raw = path.read_bytes()
    head = raw[: record.segment.head]
    name = b'"emb/scarctl-scale":{"dtype":"F32","shape":[5'
    short = head.replace(name + b"0]", name + b"]")
    assert short != head
    path.write_bytes(short.ljust(len(head)) + raw[len(head) :])
    again = Store.open(store.root)
    found, bad = read_all(again, again.state(0))
    assert not found
    assert len(bad) == len(ids)


def test_a_batch_keeps_its_label_when_parts_of_it_are_damaged(
    store: Store, writer: StoreWriter, data: Weights
) -> None:
    ids = np.arange(data.layout.partitions)
    record, _ = commit(writer, data, ids, "bfloat16", 1)
    assert record.segment is not None
    path = store.root / segment_path(0, record.segment.name)
    raw = bytearray(path.read_bytes())
    raw[record.segment.head + record.segment.data - 1] ^= 1
    path.write_bytes(raw)
    bad: list[Any] = []
    batches = list(store.read(store.state(0), ids, corrupt=bad))
    assert len(bad) == 1
    lossy = encoded_groups(data.layout, "bfloat16")
    assert all(batch.encoded == lossy[batch.group] for batch in batches)
