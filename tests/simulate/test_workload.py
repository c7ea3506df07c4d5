"""Test finding a workload, and the messages about invalid ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scarctl.errors import UsageError
from scarctl.simulate.workload import load, source_digest

HERE = "tests.simulate.workloads"


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("nonsense", "usage", "is not a workload"),
        ("no.such.module:f", "no-workload", "ModuleNotFoundError"),
        (f"{HERE}:nothing", "no-workload", "no function 'nothing'"),
        (f"{HERE}:not_callable", "no-workload", "no function"),
        (f"{HERE}:Incomplete", "no-workload", "without reset, state, metric"),
        (f"{HERE}:Timeless", "no-workload", "iterations is 0"),
        (f"{HERE}:NeedsData", "no-workload", "TypeError"),
    ],
)
def test_what_is_no_workload_is_refused(name: str, kind: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        load(name, None)
    assert caught.value.kind == kind


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="FileNotFoundError"):
        load(f"{HERE}:NeedsData", str(tmp_path))


def test_one_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    path = tmp_path / "my_workload_here.py"
    path.write_text("from examples.simulate.quadratic import build\n")
    assert load("my_workload_here:build", None).iterations == 60
    assert len(source_digest("my_workload_here:build")) == 64
