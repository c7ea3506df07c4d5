"""Run the adapters' suite with a flax TrainState and optax."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax", reason="flax is not installed here: `make frameworks`")

import jax
import jax.numpy as jnp
import optax

from scarctl.testing import AdapterConformance, Training, Visit
from scarctl_adapters.jax import attach
from tests.adapters.jax import models

_RATED = optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9)
_FREEZING = optax.multi_transform(
    {"on": optax.adam(0.05), "off": optax.set_to_zero()}, {"embed": "off", "norm": "on", "out": "on"}
)


class TreeTraining(Training):
    """A training with weights, Adam's moments, running statistics, a schedule, a random key, and draws of Python and
    numpy.
    """

    def __init__(self, variant: str) -> None:
        random.seed(1)
        np.random.seed(2)
        dtype = jnp.bfloat16 if variant == "bfloat16" else jnp.float32
        tx = _RATED if variant == "0-dim" else None
        self.state = models.build(width=5 if variant == "changed" else 3, dtype=dtype, tx=tx)
        if variant in ("0-dim", "empty"):
            shape = () if variant == "0-dim" else (0, 3)
            params = {**self.state.params, "more": jnp.ones(shape)}
            self.state = self.state.replace(params=params, opt_state=self.state.tx.init(params))
        if variant == "frozen":
            self.state = models.build(tx=_FREEZING)
        self.position = {"batch": 0}
        self.live: Any = None

    def run(
        self, store: Path, until: int, visit: Visit, *, resume: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        extras = {"position": self.position}
        with attach(self.state, store=store, extras=extras, **options) as session:
            self.live = lambda: session.state
            try:
                state = session.resume(**resume)
                visit(session.session)
                state = session.state
                for _ in range(session.head_step, until):
                    self.position["batch"] += 1
                    weight = random.random() + np.random.rand()
                    state = models.step(state, models.batch(self.position["batch"]), jnp.float32(weight))
                    session.step(state)
                    visit(session.session)
                    state = session.state
            finally:
                self.state, self.live = session.state, None

    def _arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return models.arrays(self.state if self.live is None else self.live())

    def values(self) -> Mapping[str, Any]:
        return {name: array for name, array in self._arrays().items() if not _is_whole(name)}

    def extras(self) -> Mapping[str, Any]:
        whole = {name: array for name, array in self._arrays().items() if _is_whole(name)}
        # A count is at first a Python number, and an array from the first step on.
        return {"position": self.position, **{name: array.tolist() for name, array in whole.items()}}


def _is_whole(name: str) -> bool:
    return name in (".step", ".key") or "count" in name or "hyperparams[" in name


class TestJax(AdapterConformance):
    generators = ("python", "numpy")
    variants = frozenset({"0-dim", "empty", "bfloat16", "frozen"})

    def training(self, variant: str = "") -> Training:
        return TreeTraining(variant)


def test_jax_runs_on_the_cpu() -> None:
    assert jax.default_backend() == "cpu"
