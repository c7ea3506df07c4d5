"""Test that raw states of generators are private and saved unchanged."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from scarctl.checkpoint.randomness import capture_rng, raw, restore_rng, undisturbed
from scarctl.state.codec import encode
from scarctl.state.torch_dtypes import plain, private


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with undisturbed():
        yield


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def test_a_raw_state_stays_and_restores_what_it_was_read_from() -> None:
    draw()
    before, official = raw(), capture_rng()
    numbers = draw()
    assert encode(plain(before)) == encode(plain(official)) == encode(plain(private(before)))
    restore_rng(before)
    assert draw() == numbers
    restore_rng(official)
    assert draw() == numbers


def test_private_copies_tensors_and_leaves_raw_states_for_later() -> None:
    tensor, state = torch.zeros(2), raw()
    kept = private({"a": [tensor], "rng": state})
    tensor.fill_(1)
    assert isinstance(kept, dict)
    assert kept["rng"] is state
    assert not any(kept["a"][0].data)


@pytest.mark.parametrize("which", range(3))
def test_only_what_was_drawn_inside_is_put_back(which: int) -> None:
    inside = [random.random, np.random.rand, lambda: torch.rand(1)]
    before = raw()
    with undisturbed():
        inside[which]()
        assert encode(plain(before)) != encode(plain(raw()))
    assert encode(plain(before)) == encode(plain(raw()))
