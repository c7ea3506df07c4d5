"""Save and resume Lightning fits: a callback for `Trainer`."""

from scarctl_adapters.lightning.callback import ScarCallback

__all__ = ["ScarCallback"]
