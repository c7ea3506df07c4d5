"""scarctl: checkpoint what changed, restore only what was lost.

    import scarctl

    session = scarctl.attach(model, optimizer, store="checkpoints")
    start = session.resume().step

Importing the package loads neither torch nor numpy; using `attach` or `Session` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scarctl.api import attach
    from scarctl.config import Extra, Member, Partitioning, Ranks, Selection, Settings
    from scarctl.errors import (
        AccessDenied,
        Contention,
        Corruption,
        Fenced,
        LayoutMismatch,
        MissingGuarantee,
        NoIntactCopy,
        NoStore,
        Overwritten,
        ScarError,
        SettingsConflict,
        Unavailable,
        UsageError,
    )
    from scarctl.recovery.report import Report
    from scarctl.session.resumed import Resumed
    from scarctl.session.session import Session

__version__ = "0.1.0"
__all__ = [
    "AccessDenied",
    "Contention",
    "Corruption",
    "Extra",
    "Fenced",
    "LayoutMismatch",
    "Member",
    "MissingGuarantee",
    "NoIntactCopy",
    "NoStore",
    "Overwritten",
    "Partitioning",
    "Ranks",
    "Report",
    "Resumed",
    "ScarError",
    "Selection",
    "Session",
    "Settings",
    "SettingsConflict",
    "Unavailable",
    "UsageError",
    "attach",
]

_HOMES = {
    "attach": "scarctl.api",
    "Session": "scarctl.session.session",
    "Report": "scarctl.recovery.report",
    "Resumed": "scarctl.session.recover",
    **dict.fromkeys(("Extra", "Member", "Partitioning", "Ranks", "Selection", "Settings"), "scarctl.config"),
}
"""Module of each public name that is not an error. A module is imported when its name is first used."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'scarctl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "scarctl.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
