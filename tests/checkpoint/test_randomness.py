"""Test that raw states of generators are private and saved unchanged, and that draws are counted from them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from scarctl.checkpoint.randomness import capture_rng, digests, draws, raw, restore_rng, undisturbed
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


def test_draws_are_counted_over_kept_states() -> None:
    before = raw()
    assert draws(before, raw()) == [0, 0, 0]
    random.getrandbits(32)
    np.random.bytes(4 * 700)
    torch.empty(3).uniform_()
    assert draws(before, raw()) == [1, 700, 3]
    moved = {name for name, digest in digests(raw()).items() if digest != digests(before)[name]}
    assert moved == {"python", "numpy", "torch"}


@pytest.mark.parametrize("which", range(3))
def test_only_what_was_drawn_inside_is_put_back(which: int) -> None:
    inside = [random.random, np.random.rand, lambda: torch.rand(1)]
    before = raw()
    with undisturbed():
        inside[which]()
        assert not before.same_on_host(raw())
    assert before.same_on_host(raw())
