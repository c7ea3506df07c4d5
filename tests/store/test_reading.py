"""Test how much is read to restore a part of a store, and that operations that mostly wait run concurrently."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.store import Store, open_writer
from scarctl.store import ranges as ranges_module
from scarctl.store.backends.base import BlobReader, Blobs
from scarctl.store.backends.parallel import AHEAD_BYTES, AT_ONCE, Helpers
from scarctl.store.format import log_folder
from tests.store.helpers import Data, read_all
from tests.support.faulty import WatchedReader
from tests.support.places import Place

SHARDS = 4
ROWS = 4096


@dataclass
class Counted:
    """Passes all operations on, and notes which bytes of which files were read."""

    inner: Blobs
    read_bytes: dict[str, int] = field(default_factory=dict)
    ranges: dict[str, int] = field(default_factory=dict)

    def read(self, name: str, limit: int) -> bytes:
        data = self.inner.read(name, limit)
        self.add(name, len(data))
        return data

    @contextmanager
    def reader(self, name: str) -> Iterator[BlobReader]:
        with self.inner.reader(name) as file:
            yield WatchedReader(file, lambda nbytes, ranges: self.add(name, nbytes, ranges))

    def add(self, name: str, nbytes: int, ranges: int = 1) -> None:
        self.read_bytes[name] = self.read_bytes.get(name, 0) + nbytes
        self.ranges[name] = self.ranges.get(name, 0) + ranges

    def of(self, folder: str) -> int:
        return sum(nbytes for name, nbytes in self.read_bytes.items() if f"/{folder}/" in name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture(
    params=[
        "local",
        pytest.param("memory", marks=pytest.mark.long),
        pytest.param("s3", marks=pytest.mark.long),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Any) -> Place:
    if request.param == "s3":
        found: Place = request.getfixturevalue("s3_place")
        return found
    url = (
        str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path.name}-{id(tmp_path)}/run"
    )
    return Place(url, None)  # type: ignore[arg-type]


@pytest.fixture
def saved(place: Place) -> tuple[Layout, Data]:
    """Return a store with a row per partition, and with larger partitions, some of which were saved twice."""
    layout = build_layout(
        [
            ("rows", "parameter", (TensorSpec("", "F32", (ROWS, 64)), TensorSpec("m", "F32", (ROWS, 64)))),
            ("big", "parameter", (TensorSpec("", "F32", (1024, 512)), TensorSpec("m", "F32", (1024, 512)))),
        ],
        rows={"rows": 1, "big": 16},
    )
    data = Data(layout)
    store = Store.create(place.url, shards=SHARDS, storage_options=place.options)
    with open_writer(store, layout=layout) as writer:
        writer.commit(writer.state.ids, data, step=0, sealed=True)
        some = writer.state.ids[::7]
        data.change(some.tolist(), 1)
        writer.commit(some, data, step=1)
    return layout, data


def an_eighth(layout: Layout) -> np.ndarray[Any, Any]:
    return np.arange(ROWS, layout.partitions)[::8]


def scattered(layout: Layout) -> np.ndarray[Any, Any]:
    return np.sort(np.random.default_rng(3).choice(ROWS, 120, replace=False))


@pytest.mark.parametrize("lost", [an_eighth, scattered])
def test_no_more_is_read_than_is_lost(
    place: Place, saved: tuple[Layout, Data], lost: Callable[[Layout], np.ndarray[Any, Any]]
) -> None:
    layout, data = saved
    ids = lost(layout)
    store = Store.open(place.url, storage_options=place.options)
    counted = store.blobs = Counted(store.blobs)  # type: ignore[assignment]
    state = store.state(0)
    log = counted.of("log") + counted.of("seg")
    found, bad = read_all(store, state, ids)
    assert bad == {}
    assert found == data.all(ids.tolist())
    heads = sum(ref.head for ref in state.segments)
    read = counted.of("log") + counted.of("seg") - log
    assert read <= 1.1 * layout.partition_bytes[ids].sum() + heads
    # Their places are read once: records, twice the newest two, and the lists of partitions.
    records = sum(size for term in store.log(0).logs() for _, size in store.blobs.files(log_folder(0, *term)))
    assert log <= 2 * records + sum(ref.nbytes - ref.tail for ref in state.segments)


@pytest.mark.parametrize("place", ["local"], indirect=True)
def test_very_many_scattered_rows_are_not_as_many_ranges(place: Place, saved: tuple[Layout, Data]) -> None:
    layout, data = saved
    ids = np.flatnonzero(layout.shards(SHARDS, 0)[:ROWS] == 0)[::2]
    store = Store.open(place.url, storage_options=place.options)
    state = store.state(0)
    counted = store.blobs = Counted(store.blobs)  # type: ignore[assignment]
    assert read_all(store, state, ids) == (data.all(ids.tolist()), {})
    pieces = 2 * len(ids)
    assert pieces > 900
    assert sum(counted.ranges.values()) < pieces
    most = 2 * (ranges_module.MANY + 2)  # of each tensor
    assert all(n <= most for n in counted.ranges.values())


class TestHelpers:
    def test_results_come_in_order_and_work_is_done_once(self) -> None:
        done: list[int] = []

        def work(n: int) -> int:
            time.sleep(0.001 * (n % 3))
            done.append(n)
            return n * n

        assert list(Helpers().each(work, range(100))) == [n * n for n in range(100)]
        assert sorted(done) == list(range(100))

    def test_work_made_of_work_never_waits_for_itself(self) -> None:
        helpers = Helpers(3)

        def inner(n: int) -> int:
            time.sleep(0.001)
            return n

        def outer(n: int) -> int:
            return sum(helpers.each(inner, range(n)))

        assert list(helpers.each(outer, [20] * 20)) == [190] * 20

    def test_large_results_do_not_pile_up(self) -> None:
        held, most = [0], [0]
        size = AHEAD_BYTES // 4

        def work(_: int) -> int:
            held[0] += size
            most[0] = max(most[0], held[0])
            return size

        for nbytes in Helpers().each(work, range(64), lambda _: size):
            held[0] -= nbytes
        assert held[0] == 0
        assert most[0] <= AHEAD_BYTES + size

    def test_the_first_failure_in_order_is_raised_and_nothing_new_begun(self) -> None:
        begun: list[int] = []

        def work(n: int) -> int:
            begun.append(n)
            time.sleep(0.002)
            if n in (5, 7):
                raise ValueError(n)
            return n

        with pytest.raises(ValueError, match="5"):
            list(Helpers().each(work, range(1000)))
        count = len(begun)
        time.sleep(0.05)
        assert len(begun) <= count + AT_ONCE < 1000

    def test_patient_ones_leave_nothing_under_way(self) -> None:
        begun, under_way = threading.Event(), [0]

        def work(n: int) -> int:
            if n:
                under_way[0] += 1
                begun.set()
                time.sleep(0.05)
                under_way[0] -= 1
            else:
                begun.wait()
            return n

        results = Helpers(1, patient=True).each(work, range(100))
        assert next(results) == 0
        results.close()  # type: ignore[attr-defined]
        assert under_way == [0]
        begun.clear()
        time.sleep(0.1)
        assert not begun.is_set()
