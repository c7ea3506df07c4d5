"""Name the files of a lane's log, in their order."""

from __future__ import annotations

from pathlib import Path


def records(store: str | Path, lane: int = 0) -> list[Path]:
    """Return the records of a lane."""
    return sorted(Path(store, "lanes", str(lane), "log").glob("*/*.json"))
