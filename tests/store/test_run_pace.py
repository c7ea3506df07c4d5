"""Test what a log shows of its run's pace."""

from __future__ import annotations

import dataclasses
import datetime

import pytest

from scarctl.store.record import Record
from scarctl.store.run_pace import Pace, pace_of
from scarctl.store.segment import SegmentRef
from scarctl.store.term import Line, Place

BEGIN = datetime.datetime(2030, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)


def record(
    step: int, seconds: float, nbytes: int, *, shard: int = 0, epoch: int = 1, changes: bool = True
) -> Record:
    created = (BEGIN + datetime.timedelta(seconds=seconds)).isoformat(timespec="seconds")
    ref = SegmentRef(
        name="", nbytes=nbytes + 100, head=100, data=nbytes, tail=100 + nbytes, digest="", tail_digest=""
    )
    place = Place(epoch, "ab" * 16, 1 + step)
    line = Line(place.id, place.k if changes else 1)
    return Record(
        shard, place, "delta", epoch=epoch, step=step, segment=ref, partitions=1, line=line, created=created
    )


def test_a_run_of_two_shards() -> None:
    records = [record(1, 0, 4000, shard=s) for s in (0, 1)]
    records += [record(step, step * 2, 500, shard=s) for step in range(10, 101, 10) for s in (1, 0)]
    assert pace_of(records) == Pace(pytest.approx(200 / 99), 10, 1000)


def test_the_newest_run_that_is_long_enough_counts() -> None:
    old = [record(step, 3 * step, 7, epoch=1) for step in (1, 11, 21)]
    new = [record(step, 1000 + step, 9, epoch=2) for step in (30, 35, 40)]
    short = [record(step, 2000, 9, epoch=3) for step in (41, 42)]
    assert pace_of([*short, *new, *old]) == Pace(1.0, 5, 9)
    assert pace_of([*short, *old]) == Pace(3.0, 10, 7)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record(5, 0, 1)],
        [record(5, 0, 1), record(5, 100, 1, shard=1)],
        [record(5, 0, 1), record(6, 3, 1)],
        [record(5, 100, 1), record(6, 0, 1)],
        [record(5, 0, 1, changes=False), record(60, 100, 1, changes=False)],
    ],
)
def test_what_it_does_not_show_is_not_known(records: list[Record]) -> None:
    assert pace_of(records) == Pace(None, None, None)


def test_times_are_for_people_and_may_be_anything() -> None:
    strange = [dataclasses.replace(record(step, 0, 1), created="last summer") for step in (1, 2)]
    assert pace_of(strange) == Pace(None, None, None)
