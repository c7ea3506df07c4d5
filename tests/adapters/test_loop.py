"""Test that loops over arrays save the user's extras and the host's random generators."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scarctl.errors import LayoutMismatch, UsageError
from scarctl_adapters.loop import LoopAdapter


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
