"""Test exchanges between ranks that are real processes, over gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from scarctl.distributed import collectives
from scarctl.distributed.collectives import Team, not_joined
from scarctl.errors import UsageError
from tests.distributed.launch import launch

T = TypeVar("T")
LENGTHS = (0, 1, 900, *range(960, 1040, 3), 5000, 200_000)
"""Lengths of texts: those in the middle have about as many bytes as one exchange carries."""


class Counting(Team):
    """Counts its exchanges."""

    exchanges = 0

    def collectively(self, call: Callable[[], T]) -> T:
        self.exchanges += 1
        return super().collectively(call)


def test_restarted_ranks_that_cannot_connect_learn_the_variable() -> None:
    refused = "Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection refused"
    error = not_joined(2, refused, {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert error.message == f"the 2 ranks could not connect: {refused}"
    assert error.hint.startswith("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun")
    assert "every rank has to call" in not_joined(2, refused, {"TORCHELASTIC_RESTART_COUNT": "0"}).hint


def exchange(rank: int, world: int) -> dict[str, Any]:
    """Exchange values of many lengths; return the failures, and the number of exchanges."""
    team, wrong = Counting(), []
    for n in LENGTHS:
        for theirs in (n, 3):  # all of about one length, or one of them long
            lengths = [n + other if other == 0 else theirs for other in range(world)]
            if team.gather("x" * lengths[rank]) != ["x" * length for length in lengths]:
                wrong.append(f"gather {lengths}")
        for source in range(world):
            given = {"text": "y" * n, "array": np.arange(n % 7)} if rank == source else None
            found = team.from_rank(source, given)
            if found["text"] != "y" * n or found["array"].tolist() != list(range(n % 7)):
                wrong.append(f"from rank {source}: {n}")
    before = team.exchanges
    team.gather([rank, "short"])
    team.agree(lambda: rank)
    found = team.collect(lambda: [rank, rank * rank])
    if found != [[one, one * one] for one in range(world)]:
        wrong.append(f"collect: {found}")
    short = team.exchanges - before
    errors = []
    for ask in (team.agree, team.collect):
        try:
            ask(lambda: fail_on(rank, 1))
        except UsageError as error:
            errors.append(error.message)
    if team.gather(rank) != list(range(world)):
        wrong.append("after a failure")
    team.close()
    return {"wrong": wrong, "exchanges": short, "errors": errors}


def fail_on(rank: int, failing: int) -> int:
    if rank == failing:
        raise UsageError("it cannot be " + "long " * 400)
    return rank


def test_values_of_every_length_arrive_and_failures_are_told() -> None:
    for rank, found in enumerate(launch("tests.distributed.test_collectives:exchange", 3)):
        assert not found["wrong"]
        assert found["exchanges"] == 3  # one each
        prefix = "" if rank == 1 else "rank 1: "
        assert [text.startswith(f"{prefix}it cannot be long") for text in found["errors"]] == [True, True]


def long_call(rank: int, world: int, seconds: float) -> Any:
    """Make a call that takes longer on rank 1 than ranks wait for each other."""
    collectives.PATIENCE = 0.4
    team = Team()

    def call() -> int:
        if rank == 1:
            time.sleep(seconds)
            raise UsageError("no")
        return rank

    try:
        found: Any = team.patiently(call)
    except UsageError as error:
        found = error.message
    return [found, team.gather(rank)]


def test_a_call_that_takes_longer_than_ranks_wait() -> None:
    assert launch("tests.distributed.test_collectives:long_call", 3, 1.0) == [
        [0, [0, 1, 2]],
        ["no", [0, 1, 2]],
        [2, [0, 1, 2]],
    ]
