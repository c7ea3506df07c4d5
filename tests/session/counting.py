"""Provide a run whose every value is the number of its step, and which saves only on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import scarctl
from scarctl.config import grouped


class Counting:
    """A table of which a step adds 1 to every value."""

    def __init__(self, store: Path, rows: int = 8, **options: Any) -> None:
        self.x = np.zeros((rows, 4))
        settings: dict[str, Any] = {"interval": 1000, "fraction": 1.0, "rows": {"x": 1}, "daemon": False}
        settings |= {"flush_on_signal": False, **options}
        self.session = scarctl.attach({"x": self.x}, store=store, **grouped(**settings))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.x += 1
            self.session.step()
            self.session._saving.finish()
