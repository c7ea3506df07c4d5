"""The short form: some calls, requests and kills, of stores with a log per shard and of one log with encoded copies.

`tests/store/test_crash*.py` have every call of single operations.
"""

from __future__ import annotations

import pytest

from scarctl.store import writer
from tests.adversarial.crash import attack


@pytest.fixture(autouse=True)
def soon_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes come after a few commits, so that losses hit them, too."""
    monkeypatch.setattr(writer, "INDEX_LEAST", 1)


@pytest.mark.parametrize(
    ("what", "cases", "first", "every"),
    [("calls", 12, 3, 220), ("requests", 12, 1, 65), ("kills", 6, 0, 1), ("prunes", 1, 0, 1)],
)
def test_killed(what: str, cases: int, first: int, every: int) -> None:
    counts = attack(what, seed=1, first=first, cases=cases, every=every)
    assert counts["violations"] == 0
    assert counts["cases"] == cases
