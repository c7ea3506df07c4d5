"""Name the leaves of a tree, and divide them into groups with slots and values that are saved whole.

A partial recovery restores groups row by row. Random keys, step counts and rates are saved whole, as extras of one
step. These are all leaves of the following kinds:

- a random key (`jax.random.key`), or a value that is not an array,
- an array of integers or bools of at most `WHOLE` bytes (counts, and keys of `jax.random.PRNGKey`),
- a scalar outside the parameters.

The slots of a parameter are leaves outside the parameters whose path ends like the parameter's. Their shape is the
parameter's, or (rows,).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np

from scarctl.errors import UsageError

WHOLE = 1024
"""Bytes up to which an array of integers or bools is saved whole."""
ROOTS = ("params", "model", "0")
"""Top-level names that may hold the parameters: of a TrainState or dict, of nnx, of (params, opt_state)."""

Path: TypeAlias = tuple[str, ...]


@dataclass
class Plan:
    """The division of one tree's leaves."""

    names: list[str]
    """Paths of all leaves, joined by dots."""
    groups: dict[str, dict[str, int]] = field(default_factory=dict)
    """Numbers of leaves by group and slot; "" is the parameter itself, and the first."""
    whole: list[int] = field(default_factory=list)
    """Numbers of the leaves that are saved whole."""


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed random keys."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array of numbers, JAX's or numpy's."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) and not is_key(leaf)


def divide(tree: Any, parameters: str | None) -> Plan:
    """Divide the leaves of `tree`. parameters: path of the parameters' part, such as "params"; None: one of `ROOTS`.

    Raises UsageError for a path that does not exist, two leaves of one name, and leaves that cannot be saved.
    """
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = [tuple(map(_text, path)) for path, _ in found]
    leaves = [leaf for _, leaf in found]
    plan = Plan([".".join(path) for path in paths])
    if twice := sorted({name for name in plan.names if plan.names.count(name) > 1}):
        raise UsageError(f"two leaves of the state are called {twice[0]!r}", hint="use names without dots")
    root = _root(paths, parameters)
    for name, leaf in zip(plan.names, leaves, strict=True):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex | str):
            raise UsageError(
                f"leaf {name!r} of the state is a {type(leaf).__name__}",
                hint="keep only arrays and numbers in the state; pass other objects in extras",
            )
    inside = [bool(root) and path[: len(root)] == root for path in paths]
    plan.whole = [n for n, leaf in enumerate(leaves) if _is_whole(leaf, trained=inside[n])]
    rest = [n for n in range(len(leaves)) if n not in set(plan.whole)]
    known = {paths[n][len(root) :]: n for n in rest if inside[n]}
    for n in rest:
        if inside[n]:
            plan.groups[plan.names[n]] = {"": n}
    for n in rest:
        if not inside[n]:
            owner = _owner(paths[n], leaves, n, known)
            if owner is None:
                plan.groups[plan.names[n]] = {"": n}
            else:
                slot = ".".join(paths[n][: len(paths[n]) - len(paths[owner]) + len(root)])
                plan.groups[plan.names[owner]][slot] = n
    if not plan.groups:
        raise UsageError(
            "the state has no arrays that training changes", hint="pass parameters and opt_state"
        )
    return plan


def _text(key: Any) -> str:
    """Return the entry of a path (of a dict, a sequence, a class, or a custom node) as text."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _root(paths: Sequence[Path], parameters: str | None) -> Path:
    if parameters is not None:
        root = tuple(parameters.split("."))
        if not any(path[: len(root)] == root for path in paths):
            raise UsageError(
                f"the state has no part {parameters!r}",
                hint=f"its parts: {', '.join(sorted({path[0] for path in paths if path}))}",
            )
        return root
    there = {path[0] for path in paths if path}
    return next(((name,) for name in ROOTS if name in there), ())


def _is_whole(leaf: Any, *, trained: bool) -> bool:
    if not is_array(leaf):
        return True
    if not trained and leaf.ndim == 0:
        return True
    return not jax.dtypes.issubdtype(leaf.dtype, np.inexact) and leaf.nbytes <= WHOLE


def _owner(path: Path, leaves: Sequence[Any], n: int, known: dict[Path, int]) -> int | None:
    """Return the parameter whose slot leaf `n` is: the one with the longest common end of the path."""
    for start in range(1, len(path)):
        owner = known.get(path[start:])
        if owner is not None:
            shape = leaves[owner].shape
            per_row = len(shape) > 1 and leaves[n].shape == shape[:1] and shape[0] not in shape[1:]
            return owner if leaves[n].shape == shape or per_row else None
    return None
