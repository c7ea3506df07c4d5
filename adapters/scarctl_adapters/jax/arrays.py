"""Convert between leaves of a tree and torch tensors of the host, without a copy where JAX allows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from scarctl.errors import UsageError
from scarctl.state.torch_dtypes import Deferred
from scarctl_adapters.jax.tree import is_key


def is_deleted(leaf: Any) -> bool:
    """Return whether a leaf's memory was given away, by a function with `donate_argnums`."""
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def view(name: str, leaf: Any) -> torch.Tensor:
    """Return a leaf as a tensor: the same memory if JAX has the leaf in one piece on the host, otherwise a copy.

    JAX does not use that memory again while the tensor refers to it: a function to which it is donated then copies.
    Waits until the leaf is computed. Raises UsageError for a dtype that torch or the store lacks.
    """
    try:
        if isinstance(leaf, jax.Array) and in_host(leaf):
            return from_dlpack(leaf)
        host = np.array(leaf, copy=True)
        return from_dlpack(jnp.asarray(host)) if host.dtype.kind == "V" else torch.from_numpy(host)
    except Exception as error:
        raise UsageError(
            f"leaf {name!r} of the state has dtype {leaf.dtype}, and cannot be read: {error}",
            hint="convert it, or exclude it from the state",
        ) from error


def in_host(leaf: jax.Array) -> bool:
    """Return whether a leaf is one piece of the host's memory."""
    return len(leaf.devices()) == 1 and next(iter(leaf.devices())).platform == "cpu"


def check(name: str, leaf: Any) -> None:
    """Raise UsageError for an array whose parts are in several processes."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise UsageError(
            f"leaf {name!r} of the state is divided among several processes",
            hint="scarctl saves a JAX state only if one process has all of it; see docs/jax.md",
        )


def leaf_of(tensor: torch.Tensor, like: Any) -> Any:
    """Return a private copy of a tensor of the host as a leaf: of the class, dtype and placement of `like`."""
    host = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().view(like.dtype).reshape(like.shape)
    return _placed(host, like)


def _placed(host: Any, like: Any) -> Any:
    if not isinstance(like, jax.Array):
        return host.copy() if isinstance(like, np.ndarray) else host[()]
    made = jnp.array(host, copy=True)
    # An array that is committed to its device forbids operations with arrays on others.
    return jax.device_put(made, like.sharding) if getattr(like, "committed", True) else made


class Kept(Deferred):
    """The values of leaves that are saved whole. They are copied on their device: nothing waits for a computation."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {
            name: (_copied(leaf), getattr(leaf, "weak_type", False) and leaf.ndim == 0)
            for name, leaf in values.items()
        }

    def value(self) -> dict[str, Any]:
        """Return the stored form of every leaf, by name. Waits until all are computed."""
        return {name: _stored(*kept) for name, kept in self._values.items()}


def _copied(leaf: Any) -> Any:
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.array(jax.random.key_data(leaf), copy=True), impl=_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jnp.array(leaf, copy=True)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _impl(key: jax.Array) -> str:
    return str(jax.random.key_impl(key))


def _stored(leaf: Any, weak: bool) -> Any:
    """Return a leaf as plain values. weak: its type is weak, like that of a Python number."""
    if is_key(leaf):
        return {"key": _impl(leaf), "data": np.asarray(jax.random.key_data(leaf))}
    if weak:
        return {"weak": leaf.item(), "dtype": leaf.dtype.name}
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        host = np.asarray(leaf)
        if host.dtype.kind == "V":  # a dtype that numpy lacks, such as bfloat16
            return {"bytes": host.tobytes(), "dtype": host.dtype.name, "shape": host.shape}
        return {"array": host.copy(), "numpy": not isinstance(leaf, jax.Array)}
    return leaf


def restored(stored: Any, like: Any) -> Any:
    """Return the leaf from the result of `_stored`. like: the live leaf, for its placement."""
    if not isinstance(stored, dict):
        return stored
    if "key" in stored:
        key = jax.random.wrap_key_data(jnp.asarray(stored["data"]), impl=stored["key"])
        return jax.device_put(key, like.sharding) if getattr(like, "committed", False) else key
    if "weak" in stored:
        made = jnp.asarray(stored["weak"])
        return made if made.dtype.name == stored["dtype"] else made.astype(stored["dtype"])
    if "bytes" in stored:
        host = np.frombuffer(stored["bytes"], jnp.dtype(stored["dtype"])).reshape(stored["shape"])
        return _placed(host, like) if isinstance(like, jax.Array) else jnp.array(host)
    host = np.asarray(stored["array"])
    if stored["numpy"]:
        return host.copy()
    return _placed(host, like) if isinstance(like, jax.Array) else jnp.array(host)
