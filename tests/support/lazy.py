"""Import a framework where a test first uses it: every worker collects all tests, and few run those of a framework.

pytest looks at every name of a test module, for fixtures behind wrappers. That must import nothing.
"""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """Stand for a module, which is imported when one of its names is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name":
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
