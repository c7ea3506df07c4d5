"""Adapt JAX: a training state that is a tree of immutable arrays. Importing this imports JAX."""

from scarctl_adapters.jax.adapter import JaxAdapter
from scarctl_adapters.jax.session import TreeSession, attach

__all__ = ["JaxAdapter", "TreeSession", "attach"]
