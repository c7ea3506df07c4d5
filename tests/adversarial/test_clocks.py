"""Run the short form: clocks that are a day wrong, listings that lag behind."""

from __future__ import annotations

import time

import pytest

from scarctl.store.term import now
from tests.adversarial import clocks


def test_a_clock_is_really_off() -> None:
    before, text = time.time(), now()
    with clocks.clock(2 * clocks.DAY):
        assert time.time() - before > 1.9 * clocks.DAY
        assert now() > text
        assert now()[:10] != text[:10]


def test_clocks_and_listings(capsys: pytest.CaptureFixture[str]) -> None:
    assert clocks.main(["--cases", "6", "--seconds", "100"]) == 0
    out = capsys.readouterr().out
    assert "with other clocks" in out
    assert "listings that were stale" in out
