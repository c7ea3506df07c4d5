"""Name the tensors of a model's own `state_dict()`: a group has one name, but a tied tensor appears under several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def model_names(
    model: nn.Module,
    clean: Callable[[str], str],
    resident: Callable[[str, nn.Parameter], nn.Parameter],
    owners: Mapping[int, str],
    groups: Collection[str],
) -> dict[str, Any]:
    """Return the model's tensors, and their other names, as plain values for the extras.

    clean: removes wrappers from a name. resident: returns the sharded parameter of a gathered one. owners: the group of
    every parameter, by id. groups: names of all groups. The result has `tied`, the group of every other name in the
    model, and `outside`, the groups that are not in the model.
    """
    tied, inside = {}, set()
    for wrapped, parameter in model.named_parameters(remove_duplicate=False):
        name = clean(wrapped)
        owner = owners.get(id(resident(name, parameter)))
        if owner is not None:
            inside.add(owner)
            if owner != name:
                tied[name] = owner
    first: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if isinstance(buffer, torch.Tensor) and key not in module._non_persistent_buffers_set:
                name = clean(f"{prefix}.{key}" if prefix else key)
                owner = first.setdefault(id(buffer), name)
                inside.add(owner)
                if owner != name:
                    tied[name] = owner
    return {"tied": tied, "outside": [name for name in groups if name not in inside]}


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield persistent buffers as name, module, and name in the module. Modules rebuild the others themselves."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield (f"{prefix}.{name}" if prefix else name), module, name
