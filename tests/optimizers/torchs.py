"""Provide every configuration of torch's own optimizers that torch tests itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.optimizers.sweep import Case


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
                yield Case(
                    f"{info.optim_cls.__name__}-{number}-{given.desc.replace(' ', '-')}{'-' + way if way else ''}",
                    functools.partial(_make, info.optim_cls, options),
                    closure=info.step_requires_closure,
                    sparse=info.optim_cls.__name__ == "SparseAdam",
                    matrices=info.optim_cls.__name__ == "Muon",
                )


def _make(kind: Any, options: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    copied = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return kind(model.parameters(), **copied)  # type: ignore[no-any-return]
