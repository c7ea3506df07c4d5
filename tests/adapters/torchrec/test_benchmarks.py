"""Test the benchmarks of embedding tables: rows that earlier systems choose, and that both programs run."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
HAS_TORCHREC = pytest.mark.skipif(
    find_spec("torchrec") is None, reason="TorchRec is not installed here: `make frameworks`"
)


@pytest.fixture
def baselines(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import row_baselines

    return row_baselines


def test_rows_that_are_used_most_come_first(baselines: ModuleType) -> None:
    """A saved row has to be used again; a row that nothing has used is never saved."""
    choice = baselines.MostUsed(6)
    for rows in ([5, 5, 5, 2], [2, 2, 0, 5, 4, 4]):
        choice.note(np.array(rows))
    assert choice.choose(2).tolist() == [2, 5]
    choice.note(np.array([5]))
    assert choice.choose(4).tolist() == [0, 4, 5]
    assert not choice.choose(4).size


def test_a_sample_of_used_rows_has_no_row_twice(baselines: ModuleType) -> None:
    """Every second lookup counts. A full list forgets as many rows as come, and is empty after it was saved."""
    choice = baselines.SubSampled(100, 4)
    choice.note(np.array([7, 99, 7, 99, 3, 99]))
    choice.note(np.array([3, 98]))
    assert choice.choose(4).tolist() == [3, 7]
    choice.note(np.arange(0, 6))
    choice.note(np.arange(50, 56))
    found = choice.choose(4).tolist()
    assert len(set(found)) == 4
    assert {50, 52, 54} <= set(found) <= {0, 2, 4, 50, 52, 54}
    choice.note(np.array([0, 1]))
    assert choice.choose(4).tolist() == [0]


def test_increments_grow_until_a_full_checkpoint(baselines: ModuleType) -> None:
    choice = baselines.SinceFull(10)
    choice.note(np.array([1, 1, 4]))
    assert choice.choose().tolist() == [1, 4]
    choice.saved(2)
    choice.note(np.array([9]))
    assert choice.choose().tolist() == [1, 4, 9]
    assert not choice.is_full_cheaper(3)
    assert choice.is_full_cheaper(6)  # 10 + 2 rows, compared with 6 twice
    choice.saved_all()
    assert not choice.choose().size


def test_eight_bits_are_off_by_half_a_step(baselines: ModuleType) -> None:
    weights = torch.cat([torch.randn(50, 16), torch.full((1, 16), 0.25)])
    codes, bounds = baselines.in_8_bits(weights)
    assert (codes.dtype, bounds.shape) == (torch.uint8, (51, 2))
    error = (baselines.from_8_bits(codes, bounds) - weights).abs()
    assert bool((error <= 0.501 * bounds[:, 1:] + 1e-7).all())


@HAS_TORCHREC
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("program", "first"),
    [
        ("sharded_tables.py --rows 20000 --rounds 1 --interval 3", "scarctl "),
        ("lost_rows.py --rows 4000 --trials 1 --failures 1", "scarctl, partitions of 1 "),
    ],
)
def test_a_benchmark_runs(program: str, first: str, tmp_path: Path) -> None:
    """It prints a line for every way, of which none is without bytes."""
    name, *options = program.split()
    command = [sys.executable, str(BENCHMARKS / name), *options, "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith(first) for line in lines), done.stdout
    for way in ("CPR-MFU", "CPR-SSU", "Check-N-Run", "Check-N-Run, 8 bits"):
        found = next(line for line in lines if line.startswith(f"{way}  "))
        assert float(found.removeprefix(way).split()[0]) > 0, found
