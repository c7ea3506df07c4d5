"""Test that the kept states of the global generators equal those that the generators report, at every moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.util import generators
from scarctl.util.generators import keep_host

DRAWS: dict[str, Callable[[], object]] = {
    "word": lambda: random.getrandbits(32),
    "gauss": lambda: random.gauss(0.0, 1.0),
    "block": lambda: [random.random() for _ in range(312)],
    "seed": lambda: random.seed(7),
    "numpy word": lambda: np.random.bytes(4),
    "numpy gauss": lambda: np.random.randn(),
    "numpy block": lambda: np.random.bytes(4 * 624),
    "numpy seed": lambda: np.random.seed(7),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    python, of_numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(of_numpy)


def check() -> None:
    kept = keep_host()
    assert kept.python() == random.getstate()
    found, official = kept.numpy(), np.random.get_state()
    assert (found[0], *found[2:]) == (official[0], *official[2:])
    assert np.array_equal(found[1], official[1])


def test_states_are_read_from_memory_here() -> None:
    kept = keep_host()
    assert isinstance(kept._python[0], bytes)
    assert isinstance(kept._numpy[0], bytes)


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=12))
def test_kept_states_are_the_official_ones(draws: list[str]) -> None:
    check()
    for name in draws:
        DRAWS[name]()
        check()


def test_a_kept_state_stays_as_it_was() -> None:
    kept, python, of_numpy = keep_host(), random.getstate(), np.random.get_state()
    random.random()
    np.random.rand()
    now = keep_host()
    assert kept.python() == python
    assert np.array_equal(kept.numpy()[1], of_numpy[1])
    assert not kept.same_python(now)
    assert not kept.same_numpy(now)
    random.setstate(kept.python())
    np.random.set_state(kept.numpy())
    assert kept.same_python(keep_host())
    assert kept.same_numpy(keep_host())


def test_numpys_generator_may_be_replaced() -> None:
    before = np.random.get_bit_generator()
    check()
    try:
        np.random.set_bit_generator(np.random.MT19937(1))
        check()
        np.random.randn()
        check()
    finally:
        np.random.set_bit_generator(before)
    check()


def test_where_memory_is_not_as_expected_the_official_functions_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generators, "_python_is_known", lambda: False)
    monkeypatch.setattr(generators, "_gauss_of_numpy", lambda: None)
    monkeypatch.setattr(generators, "_known", None)
    try:
        kept = keep_host()
        assert kept._python[0] is kept._numpy[0] is None
        check()
        assert kept.same_python(keep_host())
        assert kept.same_numpy(keep_host())
        random.random()
        np.random.rand()
        assert not kept.same_python(keep_host())
        assert not kept.same_numpy(keep_host())
    finally:
        monkeypatch.setattr(generators, "_known", None)


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=6))
def test_a_state_is_kept_once_until_a_generator_draws(draws: list[str]) -> None:
    for name in draws:
        kept = keep_host()
        assert keep_host() is kept
        DRAWS[name]()
        now = keep_host()
        again = now.python() == kept.python() and repr(now.numpy()) == repr(kept.numpy())
        assert (now is kept) == again or name.endswith("seed")
    check()
