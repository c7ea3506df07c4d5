"""Save a run of torchtitan: a checkpoint manager for its configuration."""

from scarctl_adapters.torchtitan.manager import ScarCheckpointManager

__all__ = ["ScarCheckpointManager"]
