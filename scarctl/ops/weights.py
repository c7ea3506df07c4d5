"""Find the tensors of a saved model's own `state_dict()`: no optimizer state, and every name of a tied tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scarctl.errors import Corruption, UsageError
from scarctl.ops.assemble import whole_groups
from scarctl.recovery.shared_plan import SharedPlan
from scarctl.state.group import is_text
from scarctl.state.layout import TensorSpec


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a model in a store."""

    specs: Mapping[str, TensorSpec]
    """Tensors by the name of their group."""
    tied: Mapping[str, str]
    """Other names of tensors, each with the name of the group."""
    problems: tuple[str, ...]
    """Entries of the model's `state_dict()` that the store lacks, for display."""


def weights_of(plan: SharedPlan, specs: Mapping[str, TensorSpec]) -> Weights:
    """Return the model's tensors in a planned state. specs: all tensors of the state.

    Raises UsageError if there are no such tensors, Corruption if the extras cannot be read.
    """
    groups = whole_groups(plan.state.layouts)
    tied: dict[str, str] = {}
    outside: set[str] = set()
    shapes: dict[str, Any] = {}
    modules: set[str] = set()
    known = False
    for share, one in zip(plan.state.shares, plan.plans, strict=True):
        found = share.store.read_extras(share.state if one is None else one.state)
        saved = _dict(_dict(None if found is None else found[1]).get("state"))
        model = saved.get("model")
        if isinstance(model, dict):
            known = True
            tied |= _tied(model.get("tied"), groups)
            shapes |= _dict(model.get("shapes"))
            outside |= {name for name in _list(model.get("outside")) if isinstance(name, str)}
        modules |= {name for name in _dict(saved.get("modules")) if isinstance(name, str)}
    kept = {
        name: _in_shape(name, specs[name], shapes.get(name))
        for name in groups
        if name in specs and name not in outside
    }
    if not kept:
        raise UsageError(
            f"{plan.state.store.where}: it contains no tensor of a model", hint="export without --weights"
        )
    problems = []
    if not known:
        problems.append(
            "the store does not record which tensors belong to the model, or which are tied: all except the "
            "optimizer's are written. A save by a session of this version adds the record"
        )
    if modules:
        names = ", ".join(sorted(modules)[:5])
        problems.append(
            f"the extra state of modules is not written; load_state_dict(strict=True) misses it: {names}"
        )
    return Weights(
        kept, {alias: name for alias, name in sorted(tied.items()) if name in kept}, tuple(problems)
    )


def _tied(found: object, groups: Mapping[str, Any]) -> dict[str, str]:
    """Check the names in the extras, which may be hostile. Raises Corruption."""
    tied = _dict(found)
    for alias, name in tied.items():
        sound = isinstance(alias, str) and isinstance(name, str) and alias and is_text(alias)
        if not sound or alias in groups or alias.startswith("__metadata__"):
            raise Corruption(
                f"the extras name a tied tensor {str(alias)[:200]!r}, which no model has",
                hint="export without --weights",
            )
    return tied


def _in_shape(name: str, spec: TensorSpec, shape: object) -> TensorSpec:
    """Return a tensor that was saved as a vector in the shape of the model's. Raises Corruption for another size."""
    if shape is None:
        return spec
    sound = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not sound or len(spec.shape) != 1 or math.prod(_list(shape)) != spec.shape[0]:
        raise Corruption(
            f"the extras give {name!r} the shape {shape!r:.80}, and it has the shape {list(spec.shape)}",
            hint="export without --weights",
        )
    return replace(spec, shape=tuple(_list(shape)))


def _dict(value: object) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
