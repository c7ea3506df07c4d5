"""Compare the settings that all ranks have to share, before anything depends on them."""

from __future__ import annotations

import platform
from importlib.metadata import version

from scarctl.config import SessionSettings
from scarctl.errors import UsageError

_ALIKE = ("store", "fraction", "interval", "overhead", "max_bandwidth", "policy", "tracker", "encoding",
          "max_staleness", "peers", "seed", "partition_bytes", "by_layer", "rows",
          "on_error")  # fmt: skip
"""Settings that all ranks have to share."""


def settings_of(settings: SessionSettings) -> dict[str, str]:
    """Return the settings that have to be equal on all ranks, as text."""
    found = {name: repr(getattr(settings, name)) for name in _ALIKE}
    norm = settings.norm
    found["norm"] = norm if isinstance(norm, str) else getattr(norm, "__qualname__", "a function")
    return found | {"version of scarctl": version("scarctl"), "byte order": platform.machine()}


def check_alike(everyone: list[dict[str, str]]) -> None:
    """Raise UsageError, naming setting and rank, if two ranks have different settings."""
    for name, first in everyone[0].items():
        others = [rank for rank, theirs in enumerate(everyone) if theirs.get(name) != first]
        if others:
            shown = "" if name == "store" else f": {everyone[others[0]].get(name)}, not {first}"
            raise UsageError(
                f"rank {others[0]} has another {name} than rank 0{shown}",
                hint="give all ranks the same settings; nothing was changed",
            )
