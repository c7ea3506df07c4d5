"""Run the short form of `python -m tests.adversarial.claims`."""

from __future__ import annotations

import pytest

from tests.adversarial.claims import CLAIMS, SECONDS, Claims


@pytest.fixture(scope="module")
def claims() -> Claims:
    return Claims(seconds=4 * SECONDS)  # on a busy machine


@pytest.mark.slow
@pytest.mark.timeout(400)  # making the largest files takes most of the time
@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if claim.short])
def test_a_small_file_takes_little(claims: Claims, name: str) -> None:
    claims.play(name, most=1)
    assert claims.violations == []
