"""Test elastic schedules of DDP on real ranks of gloo."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from examples.elastic import elastic_constant
from scarctl.errors import UsageError
from tests.distributed.launch import environment, free_port, launch

RANKS = "tests.examples.elastic_ranks"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two ranks find, one thing after the other in the same processes."""
    found: list[dict[str, Any]] = launch(f"{RANKS}:everything", 2, str(tmp_path_factory.mktemp("ranks")))
    return found


def test_with_beta_1_it_is_ddp_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["nothing_lent"] for rank in ranks)


def test_what_is_lent_is_corrected(ranks: list[dict[str, Any]]) -> None:
    found = [rank["corrected"] for rank in ranks]
    assert found[0]["lent"] > 2, "the slow rank is not waited for"
    assert found[0]["open"]
    assert found[0]["ahead"] > 1e-3, "it steps with its own gradient"
    assert all(rank["corrected"] < 1e-5 for rank in found), found


def test_the_constant_is_within_its_bound() -> None:
    found = launch(f"{RANKS}:bounded", 3)
    assert max(rank["lent"] for rank in found) > 5
    assert all(rank["constant"] <= rank["bound"] for rank in found), found
    assert max(rank["constant"] for rank in found) > 0.1


def test_other_optimizers_are_averaged(ranks: list[dict[str, Any]]) -> None:
    assert [rank["resynced"] for rank in ranks] == [True, True]


def test_what_is_refused(ranks: list[dict[str, Any]]) -> None:
    for said in (rank["refused"] for rank in ranks):
        assert len(said) == 6, said
        assert ["beta is 0.0" in said[0], "beta is 1.5" in said[1], "resync is 0" in said[2]] == [True] * 3
        assert "AdamW does not correct" in said[3]
        assert "between a backward pass and its step" in said[4]
        assert "two backward passes" in said[5]


def test_clipped_gradients_are_warned_of(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["clipped"]
    assert found["lent"] > 0
    assert [line for line in found["warnings"] if "clipped" in line]


@pytest.mark.long
def test_a_program_that_ends_right_after_a_gradient_was_lent_does_not_abort() -> None:
    port = free_port()
    programs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.examples.elastic_ranks"],
            env=environment(rank, 2, port),
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    said = [program.communicate(timeout=120)[1].decode() for program in programs]
    assert [program.returncode for program in programs] == [0, 0], said


def test_a_state_with_something_lent_is_not_consistent(ranks: list[dict[str, Any]]) -> None:
    found = [rank["protected"] for rank in ranks]
    assert not found[0]["settled-False"]
    assert "communication-hook" in found[0]["caveats-False"]
    assert not found[0]["consistent-False"]
    assert any("ranks had different values" in reason for reason in found[0]["reasons-False"])
    assert found[0]["lent-True"] > 0
    assert [(rank["settled-True"], rank["reasons-True"], rank["consistent-True"]) for rank in found] == [
        (True, [], True)
    ] * 2


def test_ranks_that_lend_do_not_count_as_different(ranks: list[dict[str, Any]]) -> None:
    """A checkpoint that selects nothing does not look at the hook's state for a caveat."""
    found = [rank["unsaved"] for rank in ranks]
    assert found[0]["lent"] > 5
    assert all(rank["checkpoints"] > 5 and "ranks-differ" not in rank["kinds"] for rank in found), found


def test_hooks_with_a_state_of_their_own_are_said(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["stateful"] for rank in ranks):
        assert found["fp16"] == found["group"] == []
        (message,) = found["powersgd"]
        assert "PowerSGDState" in message


def test_the_constant_is_the_least_that_holds_at_every_moment() -> None:
    moments = [np.array([3.0, 4.0]), np.array([[0.0, 2.0], [2.0, 0.0]]), np.zeros(2)]
    alphas = np.array([0.5, 0.1, 0.01])
    b = elastic_constant(moments, alphas)
    assert b == pytest.approx(20.0)
    squares = np.array([25.0, 4.0, 0.0])
    assert (squares <= (alphas * b) ** 2 + 1e-9).all()


@pytest.mark.parametrize("alphas", [[], [0.0], [0.1, 0.1], [math.nan]])
def test_nonsense_is_refused(alphas: list[float]) -> None:
    with pytest.raises(UsageError):
        elastic_constant([np.ones(2)], alphas)
