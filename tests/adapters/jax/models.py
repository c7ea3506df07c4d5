"""Provide small trainings with flax and optax, for the tests of the JAX adapter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class State(TrainState):
    """A TrainState with running statistics and a random key."""

    batch_stats: Any
    key: jax.Array


class Net(nn.Module):
    """A model with an embedding, batch norm and dropout, of a few kB."""

    width: int = 3
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(6, self.width, param_dtype=self.dtype, name="embed")(ids)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, param_dtype=self.dtype, name="norm")(x)
        x = nn.Dropout(0.25, deterministic=False)(x)
        return nn.Dense(4, param_dtype=self.dtype, name="out")(x)


@functools.cache
def _initial(width: int, dtype: Any) -> tuple[Any, Any]:
    net = Net(width, dtype)
    init = jax.jit(net.init)
    return net, init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.zeros((2,), int))


@functools.cache
def adam() -> optax.GradientTransformation:
    """Return the shared optimizer: for another one JAX would compile the step again."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.exponential_decay(0.05, 2, 0.9)))


def build(
    *, width: int = 3, dtype: Any = jnp.float32, tx: optax.GradientTransformation | None = None
) -> State:
    """Return the state of a new training: the same in every process."""
    net, variables = _initial(width, dtype)
    variables = jax.tree.map(jnp.copy, variables)  # a step may be given their memory
    return State.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=tx or adam(),
        batch_stats=variables["batch_stats"],
        key=jax.random.key(7),
    )


def _step(state: State, ids: jax.Array, weight: jax.Array) -> State:
    key, mine = jax.random.split(state.key)

    def loss(params: Any) -> Any:
        out, changed = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            ids,
            rngs={"dropout": mine},
            mutable=["batch_stats"],
        )
        return (out.astype(jnp.float32) ** 2).mean() * weight + jnp.abs(out).mean(), changed

    grads, changed = jax.grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads).replace(batch_stats=changed["batch_stats"], key=key)


step: Callable[..., State] = jax.jit(_step)
donating: Callable[..., State] = functools.partial(jax.jit, donate_argnums=0)(_step)


def batch(number: int) -> jax.Array:
    """Return the row numbers of batch `number`: all rows, in another order each time."""
    return jnp.asarray(np.random.default_rng(number).permutation(6))


def arrays(tree: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the bytes of all leaves by path; of keys the bytes of their data."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        host = np.array(leaf)
        found[jax.tree_util.keystr(path)] = (
            host.view(np.uint8) if host.dtype.kind == "V" and host.ndim else host
        )
    return found
