"""Provide tensors of every kind, and write them as torch.distributed.checkpoint does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from scarctl.state.torch_dtypes import NAME_TO_TORCH


def zoo() -> dict[str, torch.Tensor]:
    """Return a tensor of every dtype that files can hold, scalars, empty tensors, NaN and negative zero."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, dtype in NAME_TO_TORCH.items():
        raw = torch.randint(0, 2 if name == "BOOL" else 256, (6, 16), generator=generator, dtype=torch.uint8)
        tensors[f"of.{name}"] = raw.view(dtype)
    tensors["scalar"] = torch.tensor(-0.0)
    tensors["empty"] = torch.zeros(0, 3)
    tensors["narrow"] = torch.zeros(4, 0)
    tensors["odd"] = torch.arange(7, dtype=torch.uint8)
    tensors["nan"] = torch.tensor([1.0, float("nan"), float("-inf")])
    return tensors


def save_dcp(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder
