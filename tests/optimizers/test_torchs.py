"""Test that every torch optimizer is resumed as reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.optimizers import killed
from tests.optimizers.sweep import EXACT, Case, deterministic, outcome
from tests.optimizers.torchs import cases

CASES = [
    pytest.param(case, marks=[pytest.mark.long] * (not case.name.endswith("-0-default")), id=case.name)
    for case in cases()
]
"""Every optimizer as it is by default; its other options are left to `make long`."""


@pytest.mark.parametrize("case", CASES)
def test_every_configuration_is_exact(case: Case, tmp_path: Path) -> None:
    with deterministic():
        assert outcome(case, tmp_path) == (EXACT, "")


@pytest.mark.leaves_arena
@pytest.mark.long
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_killed_run_is_resumed_exactly(case: Case, arena_dir: Path) -> None:
    with deterministic():
        assert killed.outcome(case, arena_dir) == (EXACT, "")
