"""Test the line of a log, one number that changes with the log's state, and with nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from scarctl.errors import Corruption
from scarctl.store import Collector, Store, StoreWriter, open_writer, sealed_sets
from scarctl.store.format import checksum, dump_json
from scarctl.store.record import Record
from tests.store.helpers import Data, small_layout
from tests.support.log_per_shard import store_with_a_log_per_shard

LAYOUT = small_layout()
SHARD_OF = LAYOUT.shards(2, 0)


class Notes:
    """A companion that remembers the calls to it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.lines: dict[int, int] = {}
        self.expected: dict[int, int] = {}

    def begin_lines(self, lines: Mapping[int, int]) -> None:
        self.told.append("begin")
        self.lines = dict(lines)

    def expect(self, shard: int, line: int) -> None:
        self.told.append(f"expect {shard}")
        self.expected[shard] = line

    def note(self, shard: int, line: int) -> None:
        self.told.append(f"note {shard}")
        assert line == self.expected[shard]
        self.lines[shard] = line


def writing(path: Path) -> StoreWriter:
    return open_writer(store_with_a_log_per_shard(path, shards=2), layout=LAYOUT, shard_of=SHARD_OF)


def seal(writer: StoreWriter, step: int) -> None:
    for shard in writer.states:
        ids = np.flatnonzero(shard == SHARD_OF)
        writer.commit(shard, ids, Data(LAYOUT, step), step=step, sealed=True, extras={"step": step})


def lines(path: Path) -> dict[int, int]:
    return Store.open(path).lines()


def test_commits_and_roll_backs_change_it_and_epochs_do_not(tmp_path: Path) -> None:
    path, seen = tmp_path / "run", []
    with writing(path) as writer:
        seal(writer, 1)
        seen.append(lines(path))
        seal(writer, 2)
        seen.append(lines(path))
        assert writer.lines == seen[-1]
        writer.roll_back(sealed_sets(writer.states.values())[1].seqs)
        seen.append(lines(path))
    with writing(path) as writer:
        assert writer.lines == lines(path) == seen[-1]
    for shard in (0, 1):
        assert len({one[shard] for one in seen}) == 3


def test_compaction_and_collection_do_not_change_it(tmp_path: Path) -> None:
    with writing(tmp_path / "run") as writer:
        collector = Collector(writer, ratio=1.1, floor=0)
        for step in range(1, 9):
            seal(writer, step)
        before = writer.lines
        collector.collect()
        assert all(state.boundary for state in writer.states.values())
        assert writer.lines == lines(tmp_path / "run") == before
        states = Store.open(tmp_path / "run").states(writer.states)
        assert {s: state.line for s, state in states.items()} == {
            s: state.line for s, state in writer.states.items()
        }


def test_a_copy_has_the_same_until_something_is_committed(tmp_path: Path) -> None:
    with writing(tmp_path / "run") as writer:
        seal(writer, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert lines(tmp_path / "run") == lines(tmp_path / "copy")
    for name in ("run", "copy"):
        with writing(tmp_path / name) as writer:
            seal(writer, 2)
    assert lines(tmp_path / "run") != lines(tmp_path / "copy")


def test_a_companion_hears_of_a_record_before_and_after(tmp_path: Path) -> None:
    notes = Notes()
    with writing(tmp_path / "run") as writer:
        seal(writer, 1)
        writer.accompany(notes)
        seal(writer, 2)
        assert notes.told == ["begin", "expect 0", "note 0", "expect 1", "note 1"]
        assert notes.lines == lines(tmp_path / "run")
        writer.roll_back(sealed_sets(writer.states.values())[1].seqs)
        assert notes.lines == lines(tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "seq", "base", "known"),
    [
        ("commit", 5, None, True),
        ("epoch", 0, None, True),
        ("epoch", 5, 3, True),
        ("epoch", 5, None, False),
        ("compact", 5, None, False),
    ],
)
def test_of_a_record_of_an_earlier_version_it_is_known_where_one_begins(
    kind: str, seq: int, base: int | None, known: bool
) -> None:
    parent = "a" * 64 if seq else ""
    record = Record(seq, 0, kind, 1, 3, parent, "b" * 64, base=base, line="c" * 32)
    assert Record.parse(record.data, "it", shard=0, seq=seq).line == "c" * 32
    old = {name: value for name, value in record.to_json().items() if name != "line"}
    parsed = Record.parse(dump_json(old), "it", shard=0, seq=seq)
    assert parsed.digest == checksum(old)
    assert parsed.line == (record.write_id if known else "")


def test_one_that_cannot_be_is_corrupt() -> None:
    record = Record(0, 0, "epoch", 1, -1, "", "b" * 64, line="no")
    with pytest.raises(Corruption):
        Record.parse(record.data, "it", shard=0, seq=0)
