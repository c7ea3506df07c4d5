"""Adapt DeepSpeed's engine with ZeRO of stage 1, 2 or 3."""

from scarctl_adapters.deepspeed.adapter import DeepSpeedAdapter

__all__ = ["DeepSpeedAdapter"]
