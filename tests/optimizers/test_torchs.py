"""Test that every torch optimizer is resumed as reported."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.optimizers import killed
from tests.optimizers.sweep import EXACT, Case, deterministic, outcome
from tests.optimizers.torchs import cases, default, names


@functools.cache
def every(name: str) -> list[Case]:
    """Return all cases of an optimizer."""
    return [case for case in cases() if case.name.startswith(f"{name}-")]


@pytest.mark.parametrize("name", names())
def test_every_optimizer_is_exact(name: str, tmp_path: Path) -> None:
    """As it is by default; its other options are left to `make long`."""
    with deterministic():
        assert outcome(default(name), tmp_path) == (EXACT, "")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", names())
def test_every_configuration_is_exact(name: str, tmp_path: Path) -> None:
    with deterministic():
        found = {case.name: outcome(case, tmp_path / case.name) for case in every(name)}
    assert found == dict.fromkeys(found, (EXACT, ""))
    assert default(name).name in found


@pytest.mark.leaves_arena
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", names())
def test_every_killed_run_is_resumed_exactly(name: str, arena_dir: Path) -> None:
    with deterministic():
        for case in every(name):
            folder = arena_dir / case.name
            folder.mkdir()
            assert killed.outcome(case, folder) == (EXACT, ""), case.name
