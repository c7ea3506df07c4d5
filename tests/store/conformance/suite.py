"""Define what every place for a store must do. A backend's test module inherits both classes and gives `place`.

Bytes are checked by a route that bypasses the code under test (`place.raw`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scarctl.errors import Contention, Corruption, Fenced, NoStore, ScarError, SettingsConflict
from scarctl.state.layout import Layout
from scarctl.store import Store, StoreWriter, open_writer, verify
from scarctl.store.backends.address import Address
from scarctl.store.backends.base import Blobs
from scarctl.store.backends.connect import blobs_at
from scarctl.store.backends.probe import create_twice, probe_name, race
from scarctl.store.format import SETTINGS, dump_json, load_json, segment_path
from scarctl.store.lock import NoLock
from scarctl.store.older import older_copies
from scarctl.store.usage import usage
from tests.store.helpers import Data, read_all, small_layout
from tests.support.places import Place

RNG = np.random.default_rng(7)


def noise(size: int) -> bytes:
    return RNG.integers(0, 256, size, dtype=np.uint8).tobytes()


class BlobsConformance:
    """All operations of `Blobs`."""

    large = 100_000
    """Bytes of a file that takes more than one request, on places with requests."""
    tells_absence = True
    """Whether deleting an absent file is an error."""

    @pytest.fixture
    def blobs(self, place: Place) -> Blobs:
        blobs = blobs_at(Address.parse(place.url, place.options))
        blobs.begin()
        blobs.prepare("a")
        return blobs

    def test_what_is_created_is_there_whole(self, blobs: Blobs, place: Place) -> None:
        parts = [b"one", memoryview(b""), np.arange(5), np.empty((0, 3)), bytearray(b"two")]
        blobs.create_exclusive("a/x.json", parts)
        expected = b"one" + np.arange(5).tobytes() + b"two"
        assert place.raw.get("a/x.json") == expected
        assert blobs.read("a/x.json", len(expected)) == expected
        assert place.raw.names() == ["a/x.json"]

    def test_creating_again_fails_and_changes_nothing(self, blobs: Blobs, place: Place) -> None:
        blobs.create_exclusive("a/x", [b"first"])
        for other in (b"second", b"firsT", b"firs", b"first!"):
            with pytest.raises(FileExistsError):
                blobs.create_exclusive("a/x", [other])
        assert place.raw.get("a/x") == b"first"

    def test_one_of_several_at_once_wins(self, blobs: Blobs, place: Place) -> None:
        done = race(blobs, "a/", racers=8, rounds=5)
        assert (done.one_winner, done.rounds, done.problems) == (5, 5, [])
        assert place.raw.names() == []

    def test_the_probe_finds_that_it_is_exclusive(self, blobs: Blobs, place: Place) -> None:
        assert create_twice(blobs, probe_name()) is None
        assert place.raw.names() == []

    def test_absence_is_told_from_everything_else(self, blobs: Blobs) -> None:
        with pytest.raises(FileNotFoundError):
            blobs.read("a/none", 10)
        with pytest.raises(FileNotFoundError), blobs.reader("a/none"):
            pass
        self.deletes_nothing(blobs, "a/none")
        assert not blobs.has("a/none")
        assert blobs.files("none") == blobs.names("none") == blobs.folders("none") == []

    def test_a_limit_is_kept(self, blobs: Blobs, place: Place) -> None:
        place.raw.put("a/x", b"12345")
        assert blobs.read("a/x", 5) == b"12345"
        with pytest.raises(Corruption, match="limit of 4"):
            blobs.read("a/x", 4)

    def test_an_empty_file_is_read(self, blobs: Blobs, place: Place) -> None:
        place.raw.put("a/empty", b"")
        assert blobs.read("a/empty", 10) == b""
        with blobs.reader("a/empty") as file:
            assert file.size == 0
            assert file.read(0, 0) == b""

    @pytest.mark.parametrize("name", ["../x", "a/../x", "/x", "a//x", "", ".", ".hidden", "a/.tmp-1", "a b"])
    def test_strange_names_are_refused(self, blobs: Blobs, name: str) -> None:
        for use in (
            lambda: blobs.read(name, 1),
            lambda: blobs.create_exclusive(name, [b"x"]),
            lambda: blobs.replace(name, b"x"),
            lambda: blobs.delete(name),
            lambda: blobs.writer(name).__enter__(),
        ):
            with pytest.raises(Corruption, match="not the name"):
                use()

    def test_a_file_is_replaced_whole(self, blobs: Blobs, place: Place) -> None:
        assert blobs.marks("a") == blobs.marks("none") == []
        blobs.replace("a/x.json", b"first")
        (before,) = blobs.marks("a")
        assert before[0] == "x.json"
        assert blobs.marks("a") == [before]
        blobs.replace("a/x.json", b"another, longer")
        assert place.raw.get("a/x.json") == b"another, longer"
        assert place.raw.names() == ["a/x.json"]
        (after,) = blobs.marks("a")
        assert after != before or after[1] == "", "a place without marks says so"

    def test_ranges(self, blobs: Blobs, place: Place) -> None:
        data = noise(self.large)
        place.raw.put("a/x", data)
        with blobs.reader("a/x") as file:
            assert file.size == len(data)
            assert file.read(0, len(data)) == data
            assert file.read(3, 4) == data[3:4]
            assert file.read(len(data), len(data)) == b""
            buffers = [(start, bytearray(size)) for start, size in [(5, 100), (70_000, 3), (9, 0), (0, 2000)]]
            file.read_ranges([(start, memoryview(buffer)) for start, buffer in buffers])
            assert all(bytes(buffer) == data[start : start + len(buffer)] for start, buffer in buffers)
            for start, stop in [(-1, 3), (5, 4), (0, len(data) + 1)]:
                with pytest.raises(Corruption):
                    file.read(start, stop)

    @pytest.mark.parametrize("chunk", [1000, 70_001])
    def test_a_written_file_is_there_after_its_commit(self, blobs: Blobs, place: Place, chunk: int) -> None:
        data = noise(self.large)
        with blobs.writer("a/x") as out:
            for start in range(0, len(data), chunk):
                out.write(data[start : start + chunk])
            assert "a/x" not in place.raw.names() or not hasattr(place.raw, "uploads")
            out.commit()
        assert place.raw.get("a/x") == data

    @pytest.mark.parametrize("size", [0, 1, 4096])
    def test_small_written_files(self, blobs: Blobs, place: Place, size: int) -> None:
        data = noise(size)
        with blobs.writer("a/x") as out:
            out.write(data)
            out.commit()
        assert place.raw.get("a/x") == data

    @pytest.mark.parametrize("size", [10, "large"])
    @pytest.mark.parametrize("fail", [True, False])
    def test_what_is_not_committed_never_appears(
        self, blobs: Blobs, place: Place, size: int | str, fail: bool
    ) -> None:
        data = noise(self.large if isinstance(size, str) else size)
        if fail:
            with contextlib.suppress(RuntimeError), blobs.writer("a/x") as out:
                out.write(data)
                raise RuntimeError
        else:
            with blobs.writer("a/x") as out:
                out.write(data)
        assert place.raw.names() == []
        assert getattr(place.raw, "uploads", list)() == []

    def deletes_nothing(self, blobs: Blobs, name: str) -> None:
        with pytest.raises(FileNotFoundError) if self.tells_absence else contextlib.nullcontext():
            blobs.delete(name)

    def test_listings_show_at_once_what_there_is(self, blobs: Blobs, place: Place) -> None:
        assert blobs.files("a") == []
        for number in range(7):
            blobs.create_exclusive(f"a/{number}.json", [b"x" * (number + 1)])
        blobs.prepare("a/inner")
        place.raw.put("a/inner/y", b"")
        place.raw.put("b/z", b"")
        place.raw.put("a/.tmp-1", b"left over")
        assert blobs.files("a") == [(f"{number}.json", number + 1) for number in range(7)]
        assert sorted(blobs.names("a")) == [f"{number}.json" for number in range(7)]
        assert blobs.folders("a") == ["inner"]
        assert {"a", "b"} <= set(blobs.top())
        blobs.delete("a/3.json")
        assert "3.json" not in dict(blobs.files("a"))
        self.deletes_nothing(blobs, "a/3.json")

    def test_a_doubt_is_settled(self, blobs: Blobs, place: Place) -> None:
        place.raw.put("a/x", b"mine")
        assert blobs.settle("a/x", b"mine")
        with pytest.raises(FileExistsError):
            blobs.settle("a/x", b"more than mine")
        there = blobs.settle("a/none", b"mine")
        assert blobs.has("a/none") == there  # in either case it is certain from now on
        assert not there or place.raw.get("a/none") == b"mine"
        assert not there or blobs.settle("a/none", b"mine")


class StoreConformance:
    """The whole life of a store."""

    @pytest.fixture
    def layout(self) -> Layout:
        return small_layout()

    def create(self, place: Place, **settings: Any) -> Store:
        return Store.create(place.url, storage_options=place.options, **settings)

    def open(self, place: Place) -> Store:
        return Store.open(place.url, storage_options=place.options)

    def write(self, store: Store, layout: Layout) -> StoreWriter:
        return open_writer(store, layout=layout)

    def test_what_is_committed_is_read_back(self, place: Place, layout: Layout) -> None:
        data = Data(layout)
        with self.write(self.create(place, shards=2), layout) as writer:
            writer.commit(writer.state.ids, data, step=1, sealed=True, extras={"n": 1})
            some = writer.state.ids[::3]
            data.change(some.tolist(), 5)
            writer.commit(some, data, step=2)
        store = self.open(place)
        assert store.shards() == [0]
        state = store.state(0, layout)
        assert read_all(store, state) == (data.all(state.ids.tolist()), {})
        assert store.read_extras(state) == ((1 << 40) + 1, {"n": 1})
        assert verify(store, read_data=True).problems == []
        assert usage(store, {})["bytes"] == sum(
            len(place.raw.get(name)) for name in place.raw.names() if name != "lock"
        )

    def test_opening_again_fences_and_goes_on(self, place: Place, layout: Layout) -> None:
        data = Data(layout)
        with self.write(self.create(place), layout) as writer:
            writer.commit(writer.state.ids, data, step=1, sealed=True)
            first = writer.epoch
        with self.write(self.open(place), layout) as writer:
            assert writer.epoch > first
            data.change([0, 1], 3)
            writer.commit(np.array([0, 1]), data, step=5)
        state = self.open(place).state(0)
        assert (state.step, state.epoch) == (5, writer.epoch)
        assert read_all(self.open(place), state) == (data.all(state.ids.tolist()), {})

    def test_a_damaged_copy_is_found_and_the_older_one_taken(self, place: Place, layout: Layout) -> None:
        data = Data(layout)
        with self.write(self.create(place), layout) as writer:
            writer.commit(writer.state.ids, data, step=1, sealed=True)
            before = data.partition(3)
            data.change([3], 9)
            record = writer.commit(np.array([3]), data, step=2)
        assert record.segment is not None
        name = segment_path(0, record.segment.name)
        raw = bytearray(place.raw.get(name))
        raw[record.segment.head] ^= 1
        place.raw.put(name, bytes(raw))
        store = self.open(place)
        state = store.state(0)
        found, bad = read_all(store, state, np.array([3]))
        assert found == {}
        assert "checksum" in bad[3]
        older = older_copies(store.log(0), np.array([3]), state)
        assert older is not None
        assert read_all(store, older, np.array([3])) == ({3: before}, {})
        (problem,) = verify(store, read_data=True).problems
        assert problem.partition == layout.name(3)
        assert problem.file == store.blobs.where(name)
        place.raw.remove(name)
        assert "missing" in read_all(self.open(place), state, np.array([3]))[1][3]

    def test_a_roll_back(self, place: Place, layout: Layout) -> None:
        data = Data(layout)
        with self.write(self.create(place), layout) as writer:
            record = writer.commit(writer.state.ids, data, step=1, sealed=True)
            old = data.all(writer.state.ids.tolist())
            data.change([2, 4], 9)
            writer.commit(np.array([2, 4]), data, step=2)
            writer.roll_back(record.seq)
        store = self.open(place)
        assert read_all(store, store.state(0)) == (old, {})

    def test_an_older_writer_is_fenced(
        self, place: Place, layout: Layout, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Store, "take_lock", lambda self: NoLock())  # as on another host
        data = Data(layout)
        older = self.write(self.create(place), layout)
        older.commit(older.state.ids, data, step=1, sealed=True)
        newer = self.write(self.open(place), layout)
        before = place.raw.names()
        with pytest.raises(Fenced, match="newer writer"):
            older.commit(np.array([1]), data, step=2)
        assert place.raw.names() == before  # its segment is gone
        newer.commit(np.array([1]), data, step=2)
        with pytest.raises(Fenced):
            older.commit(np.array([1]), data, step=3)
        older.close()
        newer.close()
        store = self.open(place)
        assert store.state(0).epoch == newer.epoch
        assert verify(store, read_data=True).problems == []

    def test_of_writers_opening_at_once_the_newest_commits(
        self, place: Place, layout: Layout, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Store, "take_lock", lambda self: NoLock())
        data = Data(layout)
        self.create(place)
        writers: list[StoreWriter] = []
        errors: list[BaseException] = []
        gate = threading.Barrier(3)

        def run() -> None:
            gate.wait()
            try:
                writers.append(self.write(self.open(place), layout))
            except BaseException as error:
                errors.append(error)

        _all(run, 3)
        assert all(isinstance(error, Contention | Fenced) for error in errors)
        assert len({writer.epoch for writer in writers}) == len(writers) >= 1
        newest = max(writers, key=lambda writer: writer.epoch)
        for writer in sorted(writers, key=lambda writer: writer.epoch):
            ids = writer.state.ids
            if writer is newest:
                writer.commit(ids, data, step=4, sealed=True)
            else:
                with pytest.raises(Fenced):
                    writer.commit(ids, data, step=9)
        for writer in writers:
            writer.close()
        store = self.open(place)
        assert verify(store, read_data=True).problems == []
        state = store.state(0)
        assert (state.epoch, state.step) == (newest.epoch, 4)
        assert read_all(store, state)[1] == {}

    def test_a_store_that_was_removed_and_made_anew_fences_the_old_writer(
        self, place: Place, layout: Layout, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Store, "take_lock", lambda self: NoLock())
        data = Data(layout)
        old = self.write(self.create(place), layout)
        old.commit(old.state.ids, data, step=1, sealed=True)
        settings = load_json(place.raw.get(SETTINGS), SETTINGS)
        for name in place.raw.names():
            place.raw.remove(name)
        place.raw.put(SETTINGS, dump_json({**settings, "id": "ab" * 16}))
        with self.write(self.open(place), layout) as new:
            new.commit(new.state.ids, data, step=2)
        before = place.raw.names()
        with pytest.raises(Fenced):
            old.commit(old.state.ids, data, step=3)
        assert place.raw.names() == before
        assert self.open(place).state(0).step == 2

    def test_creating_is_opening_what_is_there(self, place: Place) -> None:
        store = self.create(place, shards=3)
        assert self.create(place).id == self.create(place, shards=3).id == store.id
        with pytest.raises(SettingsConflict, match="shards is 3"):
            self.create(place, shards=4)

    def test_created_at_once_it_is_one_store(self, place: Place) -> None:
        found: list[str] = []
        _all(lambda: found.append(self.create(place, seed=1).id), 4)
        assert len(found) == 4
        assert len(set(found)) == 1
        assert [name for name in place.raw.names() if name != "lock"] == [SETTINGS]

    def test_no_store_and_a_foreign_folder(self, place: Place) -> None:
        with pytest.raises(NoStore) as caught:
            self.open(place)
        assert caught.value.kind == "no-store"
        place.raw.put("somebody/else.txt", b"x")
        for use in (self.open, self.create):
            with pytest.raises(NoStore, match="holds other files") as caught:
                use(place)
            assert caught.value.kind == "foreign-store"
        assert place.raw.names() == ["somebody/else.txt"]

    def test_a_store_without_its_settings_is_no_foreign_folder(self, place: Place) -> None:
        store = self.create(place)
        store.close()
        for folder in ("layout", "lanes"):
            place.raw.put(f"{folder}/0/x", b"x")
        place.raw.remove(SETTINGS)
        for use in (self.open, self.create):
            with pytest.raises(Corruption, match=r"without its scarctl\.json") as caught:
                use(place)
            assert caught.value.kind == "store-without-settings"
        assert SETTINGS not in place.raw.names()

    def test_left_overs_of_a_crash_are_not_foreign(self, place: Place) -> None:
        place.raw.put(f"probe-{'0' * 32}", b"x")
        place.raw.put(".tmp-0123", b"x")
        self.create(place)

    def test_a_damaged_record_is_corruption(self, place: Place, layout: Layout) -> None:
        with self.write(self.create(place), layout) as writer:
            path = writer.term.place(1).path(0)
        place.raw.put(path, place.raw.get(path).replace(b'"epoch":1', b'"epoch":2'))
        with pytest.raises(Corruption, match=path):
            self.open(place).state(0)
        place.raw.put(SETTINGS, b"{}")
        with pytest.raises(ScarError, match=SETTINGS):
            self.open(place)


def _write(blobs: Blobs, name: str, data: bytes) -> None:
    with blobs.writer(name) as out:
        out.write(data)
        out.commit()


def _all(run: Callable[[], object], count: int) -> None:
    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
