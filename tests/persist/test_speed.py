"""Test the measured speed of saving: bytes and the fixed part of commits, from requests of several sizes."""

from __future__ import annotations

import pytest

from scarctl.persist.speed import Meter, Speed


def _fed(small: tuple[int, float], large: tuple[int, float] | None, shards: int = 1) -> Speed:
    meter = Meter()
    for _ in range(3):
        for nbytes, seconds in (large, small) if large is not None else (small,):
            with meter.commit(shards):
                pass
            meter.served(nbytes, seconds)
    speed = meter.speed()
    assert speed is not None
    return speed


def test_what_is_measured() -> None:
    commits = _fed((1_000, 0.1), (8_000, 0.11))
    assert commits.fixed_share is not None
    assert commits.fixed_share > 0.9
    assert commits.commits_per_second == pytest.approx(10)
    assert _fed((1_000, 0.1), None, shards=8).commits_per_second == pytest.approx(80)
    slow = _fed((1_000_000, 0.1), (8_000_000, 0.8))
    assert slow.fixed_share == pytest.approx(0)
    assert slow.bytes_per_second == pytest.approx(1e7)
    assert slow.request_seconds == pytest.approx(0.1)
    assert _fed((1_000, 0.1), None).fixed_share is None
    assert Meter().speed() is None
    assert Speed.from_json(slow.to_json()) == slow
    for nothing in (
        None,
        {},
        [],
        {**slow.to_json(), "request_seconds": "1"},
        {**slow.to_json(), "fixed_share": -1},
    ):
        assert Speed.from_json(nothing) is None
