"""Test the samples by which ranks notice that their replicas differ."""

from __future__ import annotations

import pytest
import torch

from scarctl.adapter import StateGroup
from scarctl.distributed.common import Common, digest_of
from scarctl.distributed.owned_adapter import holdings_of
from scarctl.distributed.ownership import Division, divide


def replica(count: int, value: float = 0.0) -> list[StateGroup]:
    shapes = [(n % 5 + 1, 7) if n % 3 else () for n in range(count)]
    return [
        StateGroup(f"p{n}", "parameter", {"": torch.full(shape, value)}, role="shared")
        for n, shape in enumerate(shapes)
    ]


def division(count: int) -> Division:
    held = holdings_of(replica(count))
    return divide([held, held])


def sampled(parts: Division, groups: list[StateGroup], step: int, rank: int = 1) -> int:
    return digest_of(Common(parts, rank, lambda: groups).sample(step))


def test_equal_replicas_have_equal_samples_and_others_have_not() -> None:
    for count in (1, 64, 200):
        parts = division(count)
        groups, others = replica(count), replica(count, 1.0)
        for step in range(5):
            samples = [sampled(parts, groups, step, rank) for rank in range(2)]
            assert samples[0] == samples[1]
            assert 0 < samples[0] <= 1 << 62
            assert sampled(parts, others, step) != samples[0]


def test_one_value_that_differs_is_found_in_time() -> None:
    parts, groups, others = division(3), replica(3), replica(3)
    others[1].tensors[""][1, 3] = float("nan")
    assert any(sampled(parts, groups, step) != sampled(parts, others, step) for step in range(100))


@pytest.mark.parametrize("count", [3, 64, 200])
def test_every_parameter_that_differs_is_found_in_its_turn(count: int) -> None:
    parts, groups, changed = division(count), replica(count), replica(count, 1.0)
    usual = [sampled(parts, groups, k, 0) for k in range(4)]
    for n in range(count):
        others = [*groups[:n], changed[n], *groups[n + 1 :]]
        assert any(usual[k] != sampled(parts, others, k) for k in range(4)), n


def test_every_value_of_a_parameter_is_sampled_in_time() -> None:
    groups, others = replica(1), replica(1)
    groups[0].tensors[""] = torch.zeros(8, 8)
    parts = divide([holdings_of(groups)] * 2)
    for at in range(64):
        others[0].tensors[""] = torch.zeros(8, 8)
        others[0].tensors[""].view(-1)[at] = 1
        assert any(sampled(parts, groups, k) != sampled(parts, others, k) for k in range(150)), at


def test_ranks_may_have_their_parameters_in_another_order() -> None:
    groups = replica(5)
    for number, group in enumerate(groups):
        group.tensors[""].fill_(number)
    others = groups[::-1]
    parts = divide([holdings_of(groups), holdings_of(others)])
    assert sampled(parts, groups, 1, 0) == sampled(parts, others, 1, 1) != 0


def test_nothing_is_known_before_there_are_groups() -> None:
    assert sampled(division(3), [], 1) == 0
