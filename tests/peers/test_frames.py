"""Test what daemons send each other: frames are decoded unchanged, and hostile bytes end in Corruption."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.arena.line import Word
from scarctl.errors import Corruption
from scarctl.peers.frames import (
    MAX_BODY,
    MAX_FILES,
    MAX_HEAD,
    MAX_SIZE,
    MAX_STRANGER,
    PREFIX,
    Batch,
    Kind,
    Mark,
    Offer,
    decode_batch,
    decode_mark,
    decode_offer,
    decode_prefix,
    encode,
)
from tests.support.frames import joined, parse

PARTITIONS = 50
VERSION = st.integers(-1, (1 << 63) - 1)


def decode(data: bytes) -> Any:
    """Decode as a channel does: the prefix, the head, the body, then the content of the kind."""
    prefix = decode_prefix(data[: PREFIX.size])
    if len(data) != PREFIX.size + prefix.head + prefix.body:
        raise Corruption("cut")
    kind, head, array = parse(data)
    if kind in (Kind.BATCH, Kind.FIELDS):
        return decode_batch(head, array, PARTITIONS)
    if kind in (Kind.INVENTORY, Kind.FETCH):
        return decode_offer(head, array)
    return decode_mark(head, array) if kind is Kind.MARK else head


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    ids = sorted(draw(st.sets(st.integers(0, PARTITIONS - 1), min_size=1)))
    some = st.lists(st.integers(-1, (5 << 40)), min_size=len(ids), max_size=len(ids))
    data = draw(st.binary(max_size=300))
    return Batch(
        np.array(ids),
        np.array([1 + abs(n) for n in draw(some)]),
        np.array(draw(some)),
        np.array(draw(some)),
        np.array([abs(n) for n in draw(some)]),
        np.array(draw(some), np.float64),
        np.frombuffer(data, np.uint8),
    )


LINES = st.none() | st.builds(Word, *(st.integers(0, 1 << 60) for _ in Word._fields))


@st.composite
def marks(draw: st.DrawFn) -> Mark:
    moment = draw(st.integers(0, 1 << 50))
    return Mark(
        draw(st.integers(1, 99)),
        draw(st.integers(1, 99)),
        draw(st.integers(-1, 1 << 30)),
        draw(st.integers(0, 9)),
        draw(st.integers(-1, 1 << 50)),
        moment,
        draw(st.integers(-1, 1 << 50)),
        draw(st.integers(0, moment)),
        draw(st.sampled_from(["", "5" * 32])),
        draw(LINES),
    )


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    numbers, counts = st.integers(1, 1 << 50), st.integers(0, 1 << 20)
    return Offer(
        (draw(st.integers(1, 99)), draw(st.integers(-1, 1 << 30)), draw(st.integers(0, 1 << 50))),
        draw(st.integers(1, 99)),
        draw(numbers),
        draw(LINES),
        draw(counts),
        draw(st.integers(0, 1 << 50)),
        draw(counts),
        draw(numbers),
        (draw(numbers), draw(numbers)),
    )


def batch_frame(batch: Batch) -> bytes:
    return joined(encode(Kind.BATCH, {"count": len(batch.ids)}, *batch.parts()))


@given(batches())
def test_a_batch_comes_back(batch: Batch) -> None:
    found = decode(batch_frame(batch))
    for name in ("ids", "moments", "version", "durable", "saved", "distance", "data"):
        assert np.array_equal(getattr(found, name), getattr(batch, name)), name


@given(marks())
def test_a_mark_comes_back(mark: Mark) -> None:
    found = decode(joined(mark.frame()))
    assert found == mark


@given(offers(), st.sampled_from([Kind.INVENTORY, Kind.FETCH]))
def test_an_offer_comes_back(offer: Offer, kind: Kind) -> None:
    assert decode(joined(offer.frame(kind))) == offer


@given(marks())
def test_a_mark_of_a_moment_that_is_saved_before_it_was_there_is_refused(mark: Mark) -> None:
    with pytest.raises(Corruption, match="kept"):
        decode(joined(replace(mark, kept=mark.moment + 1).frame()))


def test_no_offer_comes_back() -> None:
    assert decode(joined(encode(Kind.INVENTORY, {"found": False}))) is None


@given(
    st.one_of(
        batches().map(batch_frame),
        marks().map(lambda mark: joined(mark.frame())),
        offers().map(lambda offer: joined(offer.frame(Kind.FETCH))),
    ),
    st.data(),
)
def test_a_cut_or_flipped_frame_is_refused(frame: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(Corruption):
        decode(frame[:cut])
    at, bit = data.draw(st.integers(0, len(frame) - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(frame)
    flipped[at] ^= 1 << bit
    if at == 0:
        return  # the checksum does not cover the kind: the next test has any kind
    with pytest.raises(Corruption):
        decode(bytes(flipped))


@given(st.binary(max_size=400))
def test_random_bytes_raise_nothing_but_corruption(data: bytes) -> None:
    with pytest.raises(Corruption):
        decode(data)


@given(
    st.sampled_from(list(Kind)),
    st.dictionaries(
        st.sampled_from(
            [
                *("count", "epoch", "base_epoch", "head_step", "errors", "sealed", "moment", "whole"),
                *("head", "kept"),
                *(
                    "found",
                    "newest",
                    "steps",
                    "size",
                    "files",
                    "files_size",
                    "withheld",
                    "rate",
                    "gap_at",
                    "gap",
                ),
            ]
        ),
        st.one_of(
            st.integers(), st.text(max_size=40), st.none(), st.booleans(), st.lists(st.integers(), max_size=3)
        ),
    ),
    st.binary(max_size=400),
)
def test_any_head_and_body_is_decoded_or_refused(kind: Kind, head: dict[str, Any], body: bytes) -> None:
    """The checksum is right: the sender is authenticated, and wrong."""
    try:
        found = decode(joined(encode(kind, head, body)))
    except Corruption:
        return
    if isinstance(found, Batch):
        assert 0 <= found.ids[0] <= found.ids[-1] < PARTITIONS
    if isinstance(found, Offer):
        assert 0 < found.size <= MAX_SIZE
        assert 0 <= found.files_size <= MAX_SIZE
        assert 0 <= found.files <= MAX_FILES


@given(
    offers(),
    st.sampled_from(
        [
            *("found", "newest", "head_step", "steps", "epoch", "size", "files", "files_size", "withheld"),
            *("rate", "gap_at", "gap"),
        ]
    ),
    st.sampled_from([-2, 1 << 63, 1.5, "7", None, [], True]),
)
def test_an_offer_with_an_impossible_number_is_refused(offer: Offer, name: str, value: Any) -> None:
    frame = joined(offer.frame(Kind.FETCH))
    prefix = decode_prefix(frame[: PREFIX.size])
    head = json.loads(frame[PREFIX.size :][: prefix.head])
    body = frame[PREFIX.size + prefix.head :]
    if name == "found" and value is True:
        return
    with pytest.raises(Corruption):
        decode(joined(encode(Kind.FETCH, {**head, name: value}, body)))


def test_sizes_are_refused_before_anything_is_read() -> None:
    for head, body in ((MAX_HEAD + 1, 0), (0, MAX_BODY + 1), (0xFFFFFFFF, 2**64 - 1)):
        with pytest.raises(Corruption, match="claims"):
            decode_prefix(PREFIX.pack(Kind.BATCH, head, body, 0))
    with pytest.raises(Corruption, match="claims"):
        decode_prefix(PREFIX.pack(Kind.HELLO, MAX_STRANGER + 1, 0, 0), most_head=MAX_STRANGER, most_body=0)
    with pytest.raises(Corruption, match="no known kind"):
        decode_prefix(PREFIX.pack(99, 0, 0, 0))
