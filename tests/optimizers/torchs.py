"""Provide every configuration of torch's own optimizers that torch tests itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.optimizers.sweep import Case


def names() -> list[str]:
    """Return the names of torch's optimizers. `optim_db` takes seconds to import."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    return sorted(
        {kind.__name__ for kind in kinds if issubclass(kind, torch.optim.Optimizer)} - {"Optimizer"}
    )


def default(name: str) -> Case:
    """Return the case of an optimizer as it is by default, without `optim_db`."""
    return _case(getattr(torch.optim, name), f"{name}-0-default", {})


def _case(kind: type[torch.optim.Optimizer], name: str, options: dict[str, Any]) -> Case:
    return Case(
        name,
        functools.partial(_make, kind, options),
        closure=kind.__name__ == "LBFGS",
        sparse=kind.__name__ == "SparseAdam",
        matrices=kind.__name__ == "Muon",
    )


def cases(device: str = "cpu") -> Iterator[Case]:
    """Yield a case for each of `optim_db`'s inputs and each implementation, for parameters on this device."""
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        for number, given in enumerate(info.optim_inputs_func(device=device)):
            for way in ("", *info.supported_impls):
                options = dict(given.kwargs)
                if way:
                    options[way] = True
                if options.get("fused") and (options.get("foreach") or options.get("differentiable")):
                    continue
                if options.get("foreach") and options.get("differentiable"):
                    continue
                # A differentiable step needs parameters that are not leaves.
                if options.get("differentiable"):
                    continue
                if options.get("capturable") and device == "cpu":
                    continue  # only on a GPU
                name = f"{info.optim_cls.__name__}-{number}-{given.desc.replace(' ', '-')}"
                yield _case(info.optim_cls, f"{name}-{way}" if way else name, options)


def _make(kind: Any, options: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    copied = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return kind(model.parameters(), **copied)  # type: ignore[no-any-return]
