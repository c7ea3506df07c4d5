"""Test what a loop over immutable arrays may rely on: sessions take trees and return trees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax", reason="flax is not installed here: `make frameworks`")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import scarctl
from scarctl.config import grouped
from scarctl.errors import UsageError
from scarctl_adapters.jax import attach
from tests.adapters.jax import models

ROOT = Path(__file__).parents[3]


def options(folder: Path, **more: Any) -> dict[str, Any]:
    """Return options of `attach`, all files inside `folder`."""
    (folder / "arena").mkdir(exist_ok=True)
    fixed = {"daemon": False, "on_error": "raise", "arena_dir": str(folder / "arena"), "rows": {"*": 1}}
    return {"store": folder / "store", **grouped(**{**fixed, "interval": 1, "fraction": 0.5, **more})}


def train(state: Any, number: int, step: Any = models.step) -> Any:
    return step(state, models.batch(number), jnp.float32(1.0))


def same(first: Any, second: Any) -> bool:
    a, b = models.arrays(first), models.arrays(second)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_a_recovery_returns_a_tree_and_leaves_the_old_one_alone(tmp_path: Path) -> None:
    """Lost rows are those of the checkpoint; leaves without lost rows are the same objects as before."""
    with attach(models.build(), **options(tmp_path, interval=100)) as session:
        state = saved = session.step(train(session.resume(), 0))
        for number in (1, 2):
            state = session.step(train(state, number))
        before = models.arrays(state)
        found = session.recover("params.embed.embedding[1:3]")
        assert session.report is not None
        assert session.report.restored_partitions == 2
        assert same(state, state)
        assert all(np.array_equal(before[n], a) for n, a in models.arrays(state).items())
        assert found.params["out"]["kernel"] is state.params["out"]["kernel"]
        for tree_of in (lambda s: s.params, lambda s: s.opt_state[1][0].mu, lambda s: s.opt_state[1][0].nu):
            old, new, then = (np.asarray(tree_of(s)["embed"]["embedding"]) for s in (state, found, saved))
            assert np.array_equal(new[1:3], then[1:3])
            assert not np.array_equal(new[1:3], old[1:3])
            assert np.array_equal(np.delete(new, [1, 2], 0), np.delete(old, [1, 2], 0))
        assert found.step == state.step == 3
        assert session.head_step == 3
        session.step(train(found, 3))


@pytest.mark.parametrize("donated", [False, True])
def test_a_step_that_somebody_asked_to_recover_returns_another_tree(tmp_path: Path, *, donated: bool) -> None:
    """The session restores within `step`, as for `scarctl live recover`."""
    from scarctl.daemon.request import Request

    step = models.donating if donated else models.step
    with attach(models.build(), donated=donated, **options(tmp_path, interval=100)) as session:
        state = session.step(train(session.resume(), 0, step))
        kept = np.array(state.params["embed"]["embedding"])
        state = session.step(train(state, 1, step))
        session.session._requests.add(Request("recover", lost="params.embed.*"))
        trained = train(state, 2, step)
        state = session.step(trained)
        assert state is not trained
        assert np.array_equal(np.asarray(state.params["embed"]["embedding"]), kept)
        assert state.params["out"]["kernel"] is trained.params["out"]["kernel"]


def test_donated_memory_is_used_again_and_every_copy_is_right(tmp_path: Path) -> None:
    """With a checkpoint in every step JAX takes all leaves' memory, and the result is that of a run without scarctl."""
    with attach(models.build(), donated=True, **options(tmp_path)) as session:
        state = session.resume()
        for number in range(5):
            old = state
            state = session.step(train(state, number, models.donating))
            taken = [leaf.is_deleted() for leaf in jax.tree.leaves(old) if isinstance(leaf, jax.Array)]
            assert all(taken), f"step {number}: {taken}"
        last = models.arrays(state)
    alone = models.build()
    for number in range(5):
        alone = train(alone, number, models.donating)
    assert all(np.array_equal(last[name], array) for name, array in models.arrays(alone).items())
    with attach(models.build(), donated=True, **options(tmp_path)) as session:
        assert same(session.resume(), alone)
        assert session.resumed is not None
        assert session.resumed.consistent


def test_donating_without_saying_so_is_safe_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with attach(models.build(), **options(tmp_path)) as session:
        state = session.resume()
        for number in range(4):
            state = session.step(train(state, number, models.donating))
        found = [caveat.message for caveat in session.session.caveats]
    assert any("donated=True" in text for text in found), found
    assert "donate_argnums" in caplog.text
    with attach(models.build(), **options(tmp_path)) as session:
        assert same(session.resume(), state)


def test_no_former_state_stays_in_memory(tmp_path: Path) -> None:
    """Even without donation no reference keeps a tree that the loop has replaced."""
    with attach(models.build(), **options(tmp_path, interval=2)) as session:
        state = session.resume()
        for number in range(4):
            state = session.step(train(state, number))
        kernel = state.params["out"]["kernel"]
        state = session.step(train(state, 4))
        given = jax.jit(lambda a: a + 1, donate_argnums=0)
        given(kernel)
        assert kernel.is_deleted(), "something refers to a kernel of the step before"


def test_what_is_donated_already_is_refused(tmp_path: Path) -> None:
    with attach(models.build(), donated=True, **options(tmp_path)) as session:
        state = session.resume()
        new = train(state, 0, models.donating)
        with pytest.raises(UsageError, match="was donated to a function"):
            session.step(state)
        session.step(new)


def test_another_tree_is_refused_and_the_run_can_continue(tmp_path: Path) -> None:
    with attach(models.build(), **options(tmp_path)) as session:
        state = session.step(train(session.resume(), 0))
        with pytest.raises(UsageError, match="not built like"):
            session.step({"params": state.params})
        assert session.head_step == 1
        session.step(train(state, 1))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"params": {"w": jnp.ones(3)}, "f": object()}, "is a object"),
        ({"a.b": jnp.ones(3), "a": {"b": jnp.ones(3)}}, "two leaves"),
        ({"n": 3}, "no arrays"),
        ({"params": {"w": jnp.ones(3, jnp.int4)}}, None),
    ],
)
def test_trees_that_cannot_be_saved(tmp_path: Path, state: Any, message: str | None) -> None:
    if message is None:  # values of four bits are saved completely
        state["params"]["w"] = jnp.ones(5000, jnp.int4)
        message = "int4"
    with pytest.raises(UsageError, match=message):
        attach(state, **options(tmp_path))


def test_a_bare_tree_says_how_to_attach(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        scarctl.attach(models.build(), store=tmp_path / "store")
    assert "scarctl_adapters.jax.attach" in str(raised.value.hint)


def test_every_kind_of_leaf_comes_back_as_it_was(tmp_path: Path) -> None:
    """Class, dtype, weak type and bits are kept: of random keys, Python's numbers, bfloat16, numpy arrays, 0-dim
    arrays.
    """

    def state(seed: int) -> Any:
        return {
            "params": {
                "w": jnp.full((4, 2), seed, jnp.bfloat16),
                "scale": jnp.float32(seed),
                "f8": jnp.full((2, 2), seed, jnp.float8_e4m3fn),
            },
            "typed": jax.random.key(seed),
            "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
            "raw": jax.random.PRNGKey(seed),
            "weak": jnp.asarray(seed),
            "weak_float": jnp.asarray(seed / 3),
            "python": seed,
            "rate": seed / 7,
            "flag": bool(seed % 2),
            "half": jnp.asarray(seed / 3, jnp.bfloat16),
            "numpy": np.full((3, 2), seed, np.float64),
            "counts": jnp.full((400,), seed, jnp.int32),
            "mask": jnp.full((3,), bool(seed % 2)),
        }

    with attach(state(1), **options(tmp_path)) as session:
        session.resume()
        session.step(state(5))
    with attach(state(2), **options(tmp_path)) as session:
        found = session.resume()
    for name, wanted in state(5).items():
        for a, b in zip(jax.tree.leaves(found[name]), jax.tree.leaves(wanted), strict=True):
            assert type(a) is type(b), name
            assert getattr(a, "dtype", None) == getattr(b, "dtype", None), name
            assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None), name
    assert same(found, state(5))


def test_an_nnx_model_with_its_optimizer(tmp_path: Path) -> None:
    """Parameters are found below "model", dropout keys are saved completely, and the run equals an undisturbed one."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(6, 3, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.out = nnx.Linear(3, 4, rngs=rngs)

        def __call__(self, ids: jax.Array) -> jax.Array:
            return self.out(self.drop(self.embed(ids)))

    def build() -> tuple[Any, Any]:
        model = Net(nnx.Rngs(0, dropout=1))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        return nnx.split({"model": model, "optimizer": optimizer})

    graph, first = build()

    @jax.jit
    def step(state: Any, ids: jax.Array) -> Any:
        both = nnx.merge(graph, state)
        grads = nnx.grad(lambda model: (model(ids) ** 2).mean())(both["model"])
        both["optimizer"].update(both["model"], grads)
        return nnx.split(both)[1]

    alone = first
    for number in range(5):
        alone = step(alone, models.batch(number))
    with attach(first, **options(tmp_path)) as session:
        state = session.resume()
        for number in range(3):
            state = session.step(step(state, models.batch(number)))
        groups = {group.name: len(group.tensors) for group in session.session.layout.groups}
    assert set(groups.values()) == {3}, groups
    with attach(build()[1], **options(tmp_path)) as session:
        state = session.resume()
        assert session.resumed is not None
        assert session.resumed.consistent
        for number in range(session.head_step, 5):
            state = session.step(step(state, models.batch(number)))
    assert same(state, alone)


def test_arrays_of_several_devices_keep_their_sharding(tmp_path: Path) -> None:
    """Run in another process, whose CPU counts as four devices."""
    program = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from scarctl_adapters.jax import attach
from tests.adapters.jax.test_loop import options
rows = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec("x"))
w = jax.device_put(jnp.arange(16.0).reshape(8, 2), rows)
here = Path(sys.argv[1])
step = jax.jit(lambda s: jax.tree.map(lambda a: a + 1, s))
with attach({"params": {"w": w}}, **options(here)) as session:
    state = session.step(step(session.resume()))
    assert any(caveat.kind == "copied-whole" for caveat in session.session.caveats)
    state = session.recover("params.w[1:2]")
    assert state["params"]["w"].sharding.is_equivalent_to(rows, 2)
with attach({"params": {"w": w}}, **options(here)) as session:
    state = session.resume()
assert state["params"]["w"].sharding.is_equivalent_to(rows, 2)
assert np.array_equal(state["params"]["w"], np.arange(16.0).reshape(8, 2) + 1)
step(state)
"""
    flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=flags, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
