"""Test a job of ranks that starts on other hosts: the newest memory is on a host that does not take part in the start.

Folders of arenas are hosts, each with a daemon. East and West train; East is lost, and West's daemon still runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scarctl.arena.folder import host_folder
from tests.daemon.trainer import stop
from tests.distributed.jobs import load
from tests.distributed.launch import launch
from tests.distributed.test_replicas import calm

pytestmark = pytest.mark.long

__all__ = ["calm"]
TRAIN = "tests.distributed.hosted:train"
HOMES, ELSEWHERE = ["east", "west"], ["north", "south"]
INTERVAL = 5
CUT = {
    "homes": HOMES,
    "store_stops_at": 7,
    "copied_at": 13,
    "recorded": True,
    "lost": [0],
    "all_die_at": 13,
}
"""The store has nothing after step 7, and both hosts have copies of step 13. Then both ranks are killed."""


class Hosts:
    """Hosts below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        secret = folder / "secret"
        secret.write_text("planted-0123456789abcdef-0123456789abcdef")
        secret.chmod(0o600)
        self.secret = str(secret)

    def cut_short(self, **options: Any) -> None:
        """Train until all ranks are killed, and East is lost."""
        settings = {"peer_secret_file": self.secret}
        with pytest.raises(AssertionError, match="ended with -9"):
            launch(TRAIN, 2, "fsdp", str(self.folder), 20, {**CUT, "settings": settings, **options})

    def start(self, homes: list[str], steps: int = 14, keep: str | None = None, **settings: Any) -> list[Any]:
        """Start the job again, train to a step, and return what each rank has resumed."""
        given = {"peer_secret_file": self.secret, **settings}
        job = {"homes": homes, "settings": given, "keep": keep}
        return launch(TRAIN, len(homes), "fsdp", str(self.folder), steps, job)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Yield hosts, and stop their daemons at the end."""
    monkeypatch.delenv("SCARCTL_DAEMON")
    yield Hosts(tmp_path)
    for home in (*HOMES, *ELSEWHERE, "third"):
        stop(host_folder(str(tmp_path / home)))


def resumed(found: list[Any]) -> list[tuple[int, bool, set[str]]]:
    return [(report["step"], report["consistent"], set(report["tiers"])) for report in found]


def warned(found: list[Any], text: str) -> bool:
    return any(text in line for report in found for line in report["warned"])


def assert_store_only(found: list[Any]) -> None:
    """West's daemon may have saved its own rank's memory to the store. East's is lost."""
    assert all(report["step"] <= 7 and set(report["tiers"]) == {"store"} for report in found)


def test_after_a_flush_it_is_exact(hosts: Hosts, calm: Any) -> None:
    hosts.cut_short(flush_at=13)
    end = hosts.folder / "end.pt"
    found = hosts.start(ELSEWHERE, 17, keep=str(end))
    assert resumed(found) == [(13, True, {"peer"})] * 2
    assert [report["errors"] for report in found] == [0, 0]
    first, second = load(end), calm("fsdp")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_future_that_was_left_never_returns(hosts: Hosts) -> None:
    """West's memory is of step 13. The job has since continued from the store, and saved step 15."""
    hosts.cut_short(flush_at=13)
    assert_store_only(hosts.start(ELSEWHERE, 15, peer_secret_file=None))
    for home in ELSEWHERE:
        stop(host_folder(str(hosts.folder / home)))
    found = hosts.start(["third", "north"], 16)
    assert resumed(found) == [(15, True, {"store"})] * 2
    assert warned(found, "no longer belongs to this store")


@pytest.mark.parametrize("homes", [["west", "north"], ["north", "east"]], ids=["East is outside", "West is"])
def test_the_newest_is_used_wherever_it_is(hosts: Hosts, homes: list[str]) -> None:
    """East's memory of rank 0 is of step 13, West's copy of it of step 9. West alone has rank 1's memory."""
    hosts.cut_short(copied_at=9, peers_stop_at=9, flush_at=13, lost=[])
    assert resumed(hosts.start(homes)) == [(13, True, {"peer"})] * 2


def test_without_a_flush_it_is_at_most_two_intervals_behind(hosts: Hosts) -> None:
    hosts.cut_short()
    found = hosts.start(ELSEWHERE)
    kept, other = resumed(found)
    assert kept == other
    assert kept[0] >= 13 - 2 * INTERVAL
    assert kept[1:] == (True, {"peer"})
