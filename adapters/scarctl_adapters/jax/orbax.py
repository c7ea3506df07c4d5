"""Write a store's state as a checkpoint of Orbax. The reverse needs no function: see docs/jax.md."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open

from scarctl.errors import Corruption, LayoutMismatch, UsageError
from scarctl.formats.hf_index import WHOLE
from scarctl.ops.export import Exported, ExportSettings, export
from scarctl.recovery.shared_plan import plan_lost, plans_back
from scarctl.recovery.shares import named_snapshot, open_shares
from scarctl.store import Store
from scarctl_adapters.jax.arrays import leaf_of, restored
from scarctl_adapters.jax.tree import Plan, divide

try:
    import orbax.checkpoint as ocp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"scarctl_adapters.jax.orbax needs {error.name}: pip install orbax-checkpoint", name=error.name
    ) from error


def to_orbax(
    store: str | os.PathLike[str],
    output: str | os.PathLike[str],
    like: Any,
    *,
    parameters: str | None = None,
    snapshot: str | None = None,
) -> Exported:
    """Write the newest state of a store as a checkpoint of `orbax.checkpoint.StandardCheckpointer`, and describe it.

    Takes no lock: a session may save meanwhile. The description's `whole` says whether all is of one step, as one
    commit saved it.

    like: a tree as it was attached, for structure, dtypes and placement. Its values are not used.
    parameters: as for `attach`.
    snapshot: the snapshot to write; None: the newest copy of every partition.

    Raises UsageError (`output` exists), LayoutMismatch (another tree), NoStore, NoIntactCopy, Corruption.
    """
    target = Path(os.path.abspath(output))
    if os.path.lexists(target):
        raise UsageError(f"{output} already exists", hint="use another name, or delete it")
    plan = divide(like, parameters)
    leaves, structure = jax.tree_util.tree_flatten(like)
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = _whole(os.fspath(store), snapshot)
    # In the output's folder, which needs the same space anyway.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        file = Path(folder, WHOLE)
        found = export(ExportSettings(store=os.fspath(store), output=file, snapshot=snapshot))
        _fill(file, plan, leaves, os.fspath(store))
    for n in plan.whole:
        if plan.names[n] not in whole:
            raise LayoutMismatch(f"{os.fspath(store)} has no {plan.names[n]!r}, which is in the tree")
        leaves[n] = restored(whole[plan.names[n]], leaves[n])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target, jax.tree_util.tree_unflatten(structure, leaves))
    return found


def _fill(file: Path, plan: Plan, leaves: list[Any], store: str) -> None:
    """Replace the leaves of all groups by a file's tensors. Raises LayoutMismatch."""
    with safe_open(file, "pt") as tensors:
        there = set(tensors.keys())
        for name, slots in plan.groups.items():
            for slot, n in slots.items():
                key = f"{name}/{slot}" if slot else name
                if key not in there:
                    raise LayoutMismatch(f"{store} has no {key!r}, which is in the tree")
                tensor = tensors.get_tensor(key)
                if tuple(tensor.shape) != leaves[n].shape or tensor.nbytes != leaves[n].nbytes:
                    raise LayoutMismatch(
                        f"{store} has {key!r} as {tensor.dtype} of shape {tuple(tensor.shape)}, and the tree as "
                        f"{leaves[n].dtype} of shape {leaves[n].shape}"
                    )
                leaves[n] = leaf_of(tensor, leaves[n])


def _whole(store: str, snapshot: str | None) -> dict[str, Any]:
    """Return the values that are saved whole, by name. Raises Corruption if the store has no values of a tree."""
    opened = Store.open(store)
    named = named_snapshot(opened, snapshot)
    state = open_shares(opened, named)
    nothing = [None] * len(state.shares)
    if named is None:
        plan = plan_lost(state, state.everything(), nothing)
    else:
        plan = next(plans_back(state, nothing, 0, named))
    newest: tuple[int, Any] = (-1, None)
    for share, one in zip(plan.state.shares, plan.plans, strict=True):
        found = share.store.read_extras(share.state if one is None else one.state)
        if found is not None and found[0] > newest[0]:
            newest = found
    saved = newest[1].get("state") if isinstance(newest[1], dict) else None
    leaves = saved.get("leaves") if isinstance(saved, dict) else None
    if not isinstance(leaves, dict):
        raise Corruption(f"{store}: no session over a JAX tree has saved to it")
    return {name: leaf for name, leaf in leaves.items() if _is_sound(leaf)}


def _is_sound(leaf: Any) -> bool:
    """Return whether a stored leaf is built as `arrays` builds them: a store may be hostile."""
    if not isinstance(leaf, dict):
        return isinstance(leaf, bool | int | float | complex | str)
    kinds: dict[str, type[Any] | tuple[type[Any], ...]] = {
        "key": str,
        "data": np.ndarray,
        "weak": (bool, int, float, complex),
        "dtype": str,
        "bytes": bytes,
        "shape": tuple,
        "array": np.ndarray,
        "numpy": bool,
    }
    fields = ({"key", "data"}, {"weak", "dtype"}, {"bytes", "dtype", "shape"}, {"array", "numpy"})
    return set(leaf) in fields and all(isinstance(value, kinds[name]) for name, value in leaf.items())
