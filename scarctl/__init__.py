"""scarctl: checkpoint what changed, restore only what was lost.

    import scarctl

    session = scarctl.attach(model, optimizer, store="checkpoints")
    start = session.resume().step

Importing the package loads neither torch nor numpy; `attach` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Session", "attach"]

if TYPE_CHECKING:
    from scarctl.attaching import attach
    from scarctl.session import Session


def __getattr__(name: str) -> Any:
    if name in __all__:
        from scarctl import attaching

        return getattr(attaching, name)
    raise AttributeError(f"module 'scarctl' has no attribute {name!r}")
