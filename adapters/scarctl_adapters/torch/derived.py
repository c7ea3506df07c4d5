"""Recompute tensors that hooks derive from a module's parameters before each forward pass, and keep as attributes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm


@torch.no_grad()
def recompute(model: nn.Module) -> None:
    """Compute pruned and normed weights again, because the parameters and masks were restored.

    A loop may read them before the next forward pass: the next pruning takes its mask from them.
    """
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod | WeightNorm):
                hook(module, ())
