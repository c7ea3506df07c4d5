"""Import a framework where a test first uses it: every worker collects all tests, and few run those of a framework."""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """Stand for a module, which is imported when one of its names is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
