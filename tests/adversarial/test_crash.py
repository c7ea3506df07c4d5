"""Run the short form: some calls, requests and kills. `tests/store/test_crash*.py` cover all calls of single
operations. Both kinds of stores have their turn: with exact copies only, and with encoded ones.
"""

from __future__ import annotations

import pytest

from tests.adversarial.crash import attack

pytestmark = pytest.mark.usefixtures("soon_full")


@pytest.mark.parametrize(
    ("what", "cases", "first", "every"),
    [("calls", 8, 3, 280), ("requests", 8, 1, 97), ("kills", 4, 0, 1), ("prunes", 1, 0, 1)],
)
def test_killed(what: str, cases: int, first: int, every: int) -> None:
    counts = attack(what, seed=1, first=first, cases=cases, every=every)
    assert counts["violations"] == 0
    assert counts["cases"] == cases
