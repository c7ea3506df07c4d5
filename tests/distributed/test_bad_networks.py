"""Hosts whose network loses frames silently, in one direction or both, or carries small frames only.

Hosts are those of `tests.distributed.test_networks`; a program carries the frames of their daemons in place of the
switch. A cable that is cut is seen by both ends. Here nobody is told.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scarctl.state.version import step_of
from tests.distributed.paced import END
from tests.distributed.test_networks import HOMES, INTERVAL, TRAIN, hosts, replica_at, run_of, step_at
from tests.support.networks import Networks, outcome
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

__all__ = ["hosts"]
two_hosts = pytest.mark.parametrize("hosts", [2], indirect=True, ids=[""])


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


@contextlib.contextmanager
def training(hosts: Networks, folder: Path, **options: Any) -> Iterator[Callable[[], list[Any]]]:
    """Train on all hosts, until the function is called that ends the job and returns the reports."""
    job = {"homes": HOMES, "pace": 0.1, **options}
    ranks = hosts.start(TRAIN, folder, "fsdp", str(folder), job, seconds=300)

    def end() -> list[Any]:
        (folder / END).touch()
        ended = outcome(ranks, folder)
        assert [code for code, _ in ended] == [0] * len(ranks), ended
        assert [report["errors"] for _, report in ended] == [0] * len(ranks)
        return [report for _, report in ended]

    try:
        for rank, home in enumerate(HOMES[: len(ranks)]):
            wait_until(lambda home=home: "up to date" in link_of(folder, home))  # type: ignore[misc]
            wait_until(lambda rank=rank: step_at(folder, rank) >= INTERVAL)  # type: ignore[misc]
        yield end
    finally:
        for rank in ranks:
            rank.kill()


def link_of(folder: Path, home: str = "east") -> str:
    found = run_of(folder, home).get("peers", [""])
    return str(found[0]) if found else ""


def trains_on(folder: Path, iterations: int = 3 * INTERVAL) -> None:
    before = step_at(folder, 0)
    wait_until(lambda: step_at(folder, 0) >= before + iterations)


def catches_up(folder: Path, home: str = "west") -> None:
    was = step_at(folder, 0)
    wait_until(lambda: step_of(replica_at(folder, home).newest()).min() >= was - INTERVAL)


def warnings_of(reports: list[Any], rank: int = 0) -> list[str]:
    return [text for text in reports[rank]["warned"] if "not kept up to date" in text]


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
        began = step_at(tmp_path, 0)
        trains_on(tmp_path)
        assert step_at(tmp_path, 0) > began
        weather()
        wait_until(lambda: "following" in link_of(tmp_path))
        catches_up(tmp_path)
        reports = end()
    assert warnings_of(reports)
