"""Test the conversion to and from Orbax's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed here: `make frameworks`")

import jax.numpy as jnp
import orbax.checkpoint as ocp

from scarctl.errors import LayoutMismatch, UsageError
from scarctl_adapters.jax import attach
from scarctl_adapters.jax.orbax import to_orbax
from tests.adapters.jax import models
from tests.adapters.jax.test_loop import options, same, train

# Warnings of Orbax and its libraries.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_store_becomes_a_checkpoint_of_orbax(tmp_path: Path, dtype: object) -> None:
    """Every leaf is equal bit for bit: moments, running statistics, counts, the random key. The store is unchanged."""
    with attach(models.build(dtype=dtype), **options(tmp_path)) as session:
        state = session.resume()
        for number in range(3):
            state = session.step(train(state, number))
        session.session.snapshot("three")
        later = session.step(train(state, 3))
    for name, snapshot, wanted in (("newest", None, later), ("named", "three", state)):
        found = to_orbax(tmp_path / "store", tmp_path / name, models.build(dtype=dtype), snapshot=snapshot)
        assert found.consistent
        with ocp.StandardCheckpointer() as checkpointer:
            read = checkpointer.restore(tmp_path / name, models.build(dtype=dtype))
        assert same(read, wanted), name
    with pytest.raises(UsageError, match="already exists"):
        to_orbax(tmp_path / "store", tmp_path / "named", models.build(dtype=dtype))


def test_another_tree_is_refused_and_leaves_no_output(tmp_path: Path) -> None:
    with attach(models.build(), **options(tmp_path)) as session:
        session.step(train(session.resume(), 0))
    for other in (models.build(width=5), {"params": {"else": jnp.ones(3)}}):
        with pytest.raises(LayoutMismatch):
            to_orbax(tmp_path / "store", tmp_path / "out", other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arena", "store"]


def test_a_run_continues_from_a_checkpoint_of_orbax(tmp_path: Path) -> None:
    """Afterwards the store has that run."""
    alone = models.build()
    for number in range(3):
        alone = train(alone, number)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", alone)
        checkpointer.wait_until_finished()
        read = checkpointer.restore(tmp_path / "orbax", models.build())
    with attach(read, **options(tmp_path)) as session:
        state = session.supersede(3)
        state = session.step(train(state, 3))
        assert session.head_step == 4
    with attach(models.build(), **options(tmp_path)) as session:
        assert same(session.resume(), state)
        assert same(state, train(alone, 3))
