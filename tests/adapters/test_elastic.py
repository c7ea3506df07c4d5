"""Test elastic schedules of DDP on real ranks of gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import environment, free_port, launch

RANKS = "tests.adapters.elastic_ranks"


@pytest.mark.parametrize("world", [2, 3])
def test_with_beta_1_it_is_ddp_bit_for_bit(world: int) -> None:
    assert all(launch(f"{RANKS}:nothing_lent", world))


def test_what_is_lent_is_corrected() -> None:
    found = launch(f"{RANKS}:corrected", 2)
    assert found[0]["lent"] > 2, "the slow rank is not waited for"
    assert found[0]["open"]
    assert found[0]["ahead"] > 1e-3, "it steps with its own gradient"
    assert all(rank["corrected"] < 1e-5 for rank in found), found


@pytest.mark.parametrize("world", [2, 3])
def test_the_constant_is_within_its_bound(world: int) -> None:
    found = launch(f"{RANKS}:bounded", world)
    assert max(rank["lent"] for rank in found) > 5
    assert all(rank["constant"] <= rank["bound"] for rank in found), found
    assert max(rank["constant"] for rank in found) > 0.1


def test_other_optimizers_are_averaged() -> None:
    assert launch(f"{RANKS}:resynced", 2) == [True, True]


def test_what_is_refused() -> None:
    for said in launch(f"{RANKS}:refused", 2):
        assert len(said) == 6, said
        assert ["beta is 0.0" in said[0], "beta is 1.5" in said[1], "resync is 0" in said[2]] == [True] * 3
        assert "AdamW does not correct" in said[3]
        assert "between a backward pass and its step" in said[4]
        assert "two backward passes" in said[5]


def test_clipped_gradients_are_warned_of() -> None:
    found = launch(f"{RANKS}:clipped", 2)
    assert found[0]["lent"] > 0
    assert [line for line in found[0]["warnings"] if "clipped" in line]


@pytest.mark.long
def test_a_program_that_ends_right_after_a_gradient_was_lent_does_not_abort() -> None:
    port = free_port()
    programs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.adapters.elastic_ranks"],
            env=environment(rank, 2, port),
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    said = [program.communicate(timeout=120)[1].decode() for program in programs]
    assert [program.returncode for program in programs] == [0, 0], said


@pytest.mark.parametrize("interval", [2, 1])
def test_a_state_with_something_lent_is_not_consistent(tmp_path: Path, interval: int) -> None:
    found = launch(f"{RANKS}:protected", 2, str(tmp_path), interval)
    assert not found[0]["settled-False"]
    assert "communication-hook" in found[0]["caveats-False"]
    assert not found[0]["consistent-False"]
    assert any("ranks had different values" in reason for reason in found[0]["reasons-False"])
    assert found[0]["lent-True"] > 0
    assert [(rank["settled-True"], rank["reasons-True"], rank["consistent-True"]) for rank in found] == [
        (True, [], True)
    ] * 2


def test_ranks_that_lend_do_not_count_as_different(tmp_path: Path) -> None:
    """A checkpoint that selects nothing does not look at the hook's state for a caveat."""
    found = launch(f"{RANKS}:unsaved", 2, str(tmp_path))
    assert found[0]["lent"] > 5
    assert all(rank["checkpoints"] > 5 and "ranks-differ" not in rank["kinds"] for rank in found), found


def test_hooks_with_a_state_of_their_own_are_said(tmp_path: Path) -> None:
    for found in launch(f"{RANKS}:stateful", 2, str(tmp_path)):
        assert found["fp16"] == found["group"] == []
        (message,) = found["powersgd"]
        assert "PowerSGDState" in message
