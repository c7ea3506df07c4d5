"""Hosts whose network loses frames silently, in one direction or both, or carries small frames only.

Hosts are those of `tests.distributed.test_networks`; a program carries the frames of their daemons in place of the
switch. A cable that is cut is seen by both ends. Here nobody is told.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_networks import (
    catches_up,
    hosts,
    link_of,
    training,
    trains_on,
    two_hosts,
)
from tests.support.networks import Networks
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

__all__ = ["hosts"]


@pytest.fixture
def weather(hosts: Networks, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Yield a function that changes the network."""
    settings = tmp_path / "weather.json"
    carrier = hosts.weather(settings, tmp_path / "weather.err")

    def change(**now: Any) -> None:
        new = settings.with_suffix(".new")
        new.write_text(json.dumps(now))
        os.replace(new, settings)

    yield change
    assert carrier.poll() is None, (tmp_path / "weather.err").read_text()
    carrier.kill()
    carrier.wait()


@two_hosts
@pytest.mark.parametrize(
    "now", [{"deaf": [[0, 1], [1, 0]]}, {"deaf": [[0, 1]]}, {"deaf": [[1, 0]]}, {"most": 300}], ids=str
)
def test_a_network_that_loses_frames_silently(
    hosts: Networks, weather: Callable[..., None], tmp_path: Path, now: dict[str, Any]
) -> None:
    """In both directions, in one, or only the large ones: the link is given up after 30 s, and comes back."""
    with training(hosts, tmp_path) as end:
        weather(**now)
        trains_on(tmp_path)
        said = link_of(tmp_path)
        assert re.search(r"\d+ behind", said), said
        wait_until(lambda: not re.search("following|behind,|full", link_of(tmp_path)), 60)
        trains_on(tmp_path)
        weather()
        wait_until(lambda: "following" in link_of(tmp_path))
        catches_up(tmp_path)
        reports = end()
    assert any("not kept up to date" in text for text in reports[0]["warned"])
