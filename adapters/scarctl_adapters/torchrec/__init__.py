"""Adapt TorchRec's `DistributedModelParallel`, with embedding tables that are trained in the backward pass."""

from scarctl_adapters.torchrec.adapter import TorchRecAdapter

__all__ = ["TorchRecAdapter"]
