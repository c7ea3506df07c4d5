"""Test the line of a lane: it changes with the state, and with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from scarctl.store import Collector, Store, StoreWriter, open_writer, sealed_sets
from scarctl.store.store import Found
from scarctl.store.term import NO_LINE, Line, Term, number_of
from tests.store.helpers import Data, small_layout

LAYOUT = small_layout()
EVERYTHING = np.arange(LAYOUT.partitions)


class Notes:
    """A companion that remembers the calls to it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.own = self.base = NO_LINE

    def begin_line(self, own: Line, base: Line) -> None:
        self.told.append("begin")
        self.own, self.base = own, base

    def note(self, own: Line) -> None:
        self.told.append("note")
        assert own.id == self.own.id
        self.own, self.base = own, NO_LINE


def writing(path: Path) -> StoreWriter:
    return open_writer(Store.create(path), layout=LAYOUT)


def seal(writer: StoreWriter, step: int) -> None:
    writer.commit(EVERYTHING, Data(LAYOUT, step), step=step, sealed=True, extras={"step": step})


def line(path: Path) -> Found | None:
    return Store.open(path).line()


def test_commits_and_roll_backs_change_it_and_openings_do_not(tmp_path: Path) -> None:
    path, seen = tmp_path / "run", []
    with writing(path) as writer:
        seen.append(line(path))
        seal(writer, 1)
        seen.append(line(path))
        seal(writer, 2)
        seen.append(line(path))
        writer.roll_back(sealed_sets([writer.state])[1].seqs[0])
        seen.append(line(path))
    with writing(path) as writer:
        assert writer.line == line(path) == seen[-1]
    assert len(set(seen)) == 4


def test_compaction_and_collection_do_not_change_it(tmp_path: Path) -> None:
    with writing(tmp_path / "run") as writer:
        collector = Collector(writer, ratio=1.1, floor=0)
        for step in range(1, 9):
            seal(writer, step)
        before = line(tmp_path / "run")
        collector.collect()
        writer.repeat()
        writer.renew()
        assert collector.done.deleted_files
        assert line(tmp_path / "run") == before


def test_a_copy_has_the_same_until_something_is_committed(tmp_path: Path) -> None:
    with writing(tmp_path / "run") as writer:
        seal(writer, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert line(tmp_path / "run") == line(tmp_path / "copy")
    for name in ("run", "copy"):
        with writing(tmp_path / name) as writer:
            seal(writer, 2)
    assert line(tmp_path / "run") != line(tmp_path / "copy")


def test_a_store_without_a_record_has_the_ids_of_its_terms(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run")
    assert store.line() is None
    terms = [Term(0, number) for number in (1, 2)]
    for term in terms:
        store.blobs.prepare("lanes/0/terms")
        store.blobs.create_exclusive(term.path, [term.data])
    assert store.line() == Found(0, 0, frozenset(number_of(term.id) for term in terms))


def test_a_companion_hears_of_what_is_acknowledged(tmp_path: Path) -> None:
    notes = Notes()
    with writing(tmp_path / "run") as writer:
        writer.accompany(notes)
        first = writer.term.id
        assert (notes.own, notes.base) == (Line(first, 1), NO_LINE)
        seal(writer, 1)
        seal(writer, 2)
        assert (notes.own, notes.base) == (Line(first, 3), NO_LINE)
        writer.repeat()
        writer.renew()
        assert (notes.own, notes.base) == (Line(writer.term.id, 0), Line(first, 3))
        seal(writer, 3)
        assert (notes.own, notes.base) == (Line(writer.term.id, 2), NO_LINE)
        writer.roll_back(sealed_sets([writer.state])[1].seqs[0])
        assert (notes.own, notes.base) == (Line(writer.term.id, 1), NO_LINE)
        assert notes.told == ["begin", "note", "note", "begin", "note", "begin"]
