"""Adapt PyTorch modules and optimizers."""

from scarctl_adapters.torch.adapter import TorchAdapter

__all__ = ["TorchAdapter"]
