"""Build extras for a rank that has lost its own, from another rank's extras and its own older ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch


def mix_optimizers(
    theirs: Mapping[str, Any], own: Mapping[str, Any], shared: Collection[str]
) -> dict[str, Any]:
    """Return `theirs`, of the step that all ranks continue from, with this rank's own part of `own`, of an older step.

    shared: names of the parameters that both ranks hold. Their step counts come from the other rank, so that copies
    stay equal. Step counts of this rank's own parameters stay with their moments. Learning rates and schedules are
    equal on all ranks.
    """
    optimizers = [
        _mix_optimizer(there, mine, shared)
        for there, mine in zip(theirs["optimizers"], own["optimizers"], strict=True)
    ]
    return {**theirs, "optimizers": optimizers, "modules": own["modules"]}


def _mix_optimizer(
    theirs: Mapping[str, Any], own: Mapping[str, Any], shared: Collection[str]
) -> dict[str, Any]:
    mixed = dict(own)
    if len(theirs["param_groups"]) == len(own["param_groups"]):
        mixed["param_groups"] = theirs["param_groups"]
    there = {name: number for number, name in enumerate(theirs["names"])}
    pairs = {
        number: there[name] for number, name in enumerate(own["names"]) if name in shared and name in there
    }
    for name in ("columns", "packed"):
        columns = {}
        for key in {**theirs.get(name, {}), **own.get(name, {})}:
            mine, other = _by_number(own, name, key), _by_number(theirs, name, key)
            mine |= {number: other[pair] for number, pair in pairs.items() if pair in other}
            numbers = sorted(mine)
            values: Any = [mine[number] for number in numbers]
            if values and all(isinstance(value, torch.Tensor) and not value.dim() for value in values):
                values = torch.stack(values)
            columns[key] = (np.array(numbers, dtype=np.int64), values)
        mixed[name] = columns
    return mixed


def _by_number(extras: Mapping[str, Any], name: str, key: str) -> dict[int, Any]:
    where, values = extras.get(name, {}).get(key, ((), ()))
    return dict(zip(np.asarray(where, dtype=np.int64).tolist(), values, strict=True))
