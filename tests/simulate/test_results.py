"""Test the file of results: its content stays, and trials of other studies are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scarctl.errors import Contention, Corruption, UsageError
from scarctl.simulate.results import Results

STUDY: dict[str, Any] = {"workload": "a:b", "seed": 0, "source": "1"}


def result(trial: int) -> dict[str, Any]:
    return {"trial": trial, "rework": [trial]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "results.jsonl"
    kept = Results(path, STUDY)
    for trial in (3, 0):
        kept.add(result(trial))
    kept.close()
    return path


def test_results_are_found_again(file: Path) -> None:
    kept = Results(file, STUDY)
    assert kept.by_trial == {0: result(0), 3: result(3)}
    kept.close()
    kept.close()


def test_every_place_where_a_process_may_have_died(file: Path) -> None:
    content = file.read_bytes()
    for length in range(len(content) + 1):
        file.write_bytes(content[:length])
        kept = Results(file, STUDY)
        whole = content[:length].count(b"\n")
        assert len(kept.by_trial) == max(0, whole - 1)
        kept.add(result(7))
        kept.close()
        lines = file.read_text().splitlines()
        assert len(lines) == max(1, whole) + 1
        assert json.loads(lines[-1]) == result(7)


@pytest.mark.parametrize("change", [{"seed": 1}, {"source": "2"}, {"workload": "a:c"}])
def test_another_study_is_refused(file: Path, change: dict[str, Any]) -> None:
    before = file.read_bytes()
    with pytest.raises(UsageError, match="another") as caught:
        Results(file, {**STUDY, **change})
    assert caught.value.kind == "other-study"
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"my thesis\n", b"my thesis, unfinished", b'{"kind": "shopping"}\n', b"[1]\n"]
)
def test_another_file_is_refused_and_left_alone(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(UsageError, match="not a file of results"):
        Results(file, STUDY)
    assert file.read_bytes() == content


def test_a_damaged_line_in_the_middle_is_named(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], b"\xff{\n", *lines[1:]]))
    with pytest.raises(Corruption, match="line 2"):
        Results(file, STUDY)


def test_one_process_at_a_time(file: Path) -> None:
    first = Results(file, STUDY)
    with pytest.raises(Contention):
        Results(file, STUDY)
    first.close()
    Results(file, STUDY).close()


def test_no_file_is_fine_and_no_folder_is_not(tmp_path: Path) -> None:
    kept = Results(None, STUDY)
    kept.add(result(1))
    assert kept.by_trial == {1: result(1)}
    kept.close()
    with pytest.raises(UsageError):
        Results(tmp_path, STUDY)
    with pytest.raises(UsageError):
        Results(tmp_path / "nowhere" / "file", STUDY)
