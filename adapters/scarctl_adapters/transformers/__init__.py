"""Save and resume runs of Hugging Face Transformers: a callback for `Trainer`."""

from scarctl_adapters.transformers.callback import ScarCallback

__all__ = ["ScarCallback"]
