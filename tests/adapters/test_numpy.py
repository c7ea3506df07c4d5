"""Test loops over arrays: a dict of numpy arrays that calls `step`, the user's extras and the host's generators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import scarctl
from scarctl.errors import LayoutMismatch, UsageError
from scarctl.testing import AdapterConformance, Training, Visit
from scarctl_adapters.loop import LoopAdapter
from scarctl_adapters.numpy import NumpyAdapter


class Factors(Training):
    """Gradient descent with noise, which changes arrays in place or replaces them."""

    def __init__(self, variant: str) -> None:
        random.seed(1)
        np.random.seed(2)
        rng = np.random.default_rng(3)
        self.state = {"users": rng.normal(size=(6, 3)), "items": rng.normal(size=(4, 3))}
        if variant == "changed":
            self.state["items"] = rng.normal(size=(5, 3))
        elif variant == "non-contiguous":
            self.state["turned"] = np.asfortranarray(rng.normal(size=(3, 5)))
        elif variant == "0-dim":
            self.state["bias"] = np.zeros(())
        elif variant == "empty":
            self.state["nothing"] = np.zeros((0, 3))
        elif variant == "frozen":
            self.state["fixed"] = rng.normal(size=(3, 2))
        self.position = {"batch": 0}
        self.shuffle = np.random.default_rng(4)

    def run(
        self, store: Path, until: int, visit: Visit, *, resume: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        extras = {"position": self.position, "shuffle": self.shuffle}
        with scarctl.attach(self.state, store=store, extras=extras, **options) as session:
            start = session.resume(**resume).step
            visit(session)
            for _ in range(start, until):
                self.step()
                session.step()
                visit(session)

    def step(self) -> None:
        self.position["batch"] += 1
        rate = random.uniform(0.1, 0.2) + np.random.normal()
        for name, array in self.state.items():
            if name == "users":
                self.state[name] = array * 0.9 + rate
            elif name != "fixed":
                array *= 0.9
                array += rate + self.shuffle.normal()

    def values(self) -> Mapping[str, Any]:
        return self.state

    def extras(self) -> Mapping[str, Any]:
        return {"position": self.position, "shuffle": self.shuffle.bit_generator.state}


@pytest.mark.usefixtures("forked_runs")
class TestNumpy(AdapterConformance):
    generators = ("python", "numpy")
    variants = frozenset({"non-contiguous", "0-dim", "empty", "frozen"})

    def training(self, variant: str = "") -> Training:
        return Factors(variant)


def test_a_loop_that_never_says_that_an_iteration_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in (0, 1, 0):
        caplog.clear()
        with scarctl.attach({"users": np.ones(3)}, store=tmp_path / "store") as session:
            session.resume()
            for _ in range(steps):
                session.step()
        first = not (tmp_path / "store" / "lanes").exists()
        assert ("nothing was saved, because no iteration has ended" in caplog.text) == first


def test_a_group_stays_while_its_array_does() -> None:
    state = {"a": np.zeros((4, 2)), "b": np.zeros(3)}
    adapter = NumpyAdapter(state, None)
    first, other = adapter.groups()
    state["a"] += 1
    assert [one is before for one, before in zip(adapter.groups(), [first, other], strict=True)] == [True] * 2
    state["a"] = state["a"] + 1
    replaced, same = adapter.groups()
    assert replaced is not first
    assert same is other
    assert replaced.tensors[""].tolist() == [[2.0, 2.0]] * 4
    state["b"].flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        adapter.groups()
    state["b"] = [1.0]  # type: ignore[assignment]
    with pytest.raises(UsageError, match="not a numpy array"):
        adapter.groups()


class _Count:
    """A user's object with a state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_extras_and_generators_come_back() -> None:
    count = _Count()
    adapter = LoopAdapter({"count": count})
    state = adapter.capture()
    drawn = random.random(), float(np.random.rand())
    count.value = 7
    adapter.restore(state)
    assert count.value == 0
    assert (random.random(), float(np.random.rand())) == drawn


def test_other_extras_than_the_saved_ones_are_refused() -> None:
    state = LoopAdapter({"count": _Count()}).capture()
    with pytest.raises((UsageError, LayoutMismatch), match="extras"):
        LoopAdapter(None).restore(state)


@pytest.mark.parametrize("item", [None, _Count, SimpleNamespace(state_dict={})])
def test_an_object_without_a_state_is_refused(item: Any) -> None:
    with pytest.raises(UsageError, match=r"nothing is .* which has no") as caught:
        LoopAdapter({"nothing": item})
    assert "a dict" in str(caught.value.hint)
