"""Wait for a condition of another thread or process."""

from __future__ import annotations

import time
from typing import Any


def wait_until(condition: Any, seconds: float = 60.0) -> Any:
    """Return the first true value of `condition()`; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
    return value
