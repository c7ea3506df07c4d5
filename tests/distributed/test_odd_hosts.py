"""Hosts that are unlike the usual two: several ranks on one, one name for two, no room, fewer of them after a restart.

Two folders of arenas are two hosts, each with a daemon; they talk over the loopback interface.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.folder import host_folder
from scarctl.arena.owner import read_owner
from scarctl.daemon.status import NO_HOST
from tests.daemon.trainer import stop
from tests.distributed.launch import launch
from tests.distributed.test_replicas import hosts

__all__ = ["hosts"]
# test_replicas loses the usual host.
pytestmark = pytest.mark.long
TRAIN = "tests.distributed.hosted:train"
STOPPED = {"store_stops_at": 7, "flush_at": 13, "copied_at": 13, "all_die_at": 13, "lost": [0]}
"""The store has nothing after step 7, memory has step 13, and rank 0's host is lost."""


def die(folder: Path, homes: list[str], **options: Any) -> None:
    with pytest.raises(AssertionError, match="ended with -9"):
        launch(TRAIN, len(homes), "fsdp", str(folder), 20, {"homes": homes, **STOPPED, **options})


def resume(folder: Path, homes: list[str], steps: int = 14, **options: Any) -> list[Any]:
    found = launch(TRAIN, len(homes), "fsdp", str(folder), steps, {"homes": homes, **options})
    for home in set(homes):
        stop(host_folder(str(folder / home)))
    return found


def replicas_at(folder: Path, home: str) -> set[str]:
    places = host_folder(str(folder / home))
    return {path.name for path in places.iterdir() if path.is_dir() and read_owner(path) is not None}


def test_a_host_with_three_ranks_is_lost(hosts: Path) -> None:
    """The other host has a copy of each. Partitions need not be of one size on all ranks."""
    homes = ["east", "east", "east", "west"]
    die(hosts, homes)
    assert len(replicas_at(hosts, "west")) == 3
    found = resume(hosts, ["north", "north", "north", "west"])
    assert [(report["step"], report["consistent"]) for report in found] == [(13, True)] * 4
    assert [set(report["tiers"]) for report in found] == [{"peer"}] * 3 + [{"memory"}]


def test_more_copies_than_other_hosts(hosts: Path) -> None:
    """The only other host has one; a wait for one ends, and a wait for all says how many there are."""
    settings = {"peers": 3, "timeout": 1.0}
    (first, *_) = launch(
        TRAIN, 2, "fsdp", str(hosts), 8, {"homes": ["east", "west"], "settings": settings, "wait_at": 7}
    )
    assert any("peers=3, but only 2 hosts can keep copies" in text for text in first["warned"])
    assert [peer for peer in first["peers"] if peer != NO_HOST] == first["peers"][:1]
    assert first["said"] == []
    settings["peer_ack"] = "all"
    found = launch(
        TRAIN, 2, "fsdp", str(hosts), 16, {"homes": ["east", "west"], "settings": settings, "wait_at": 12}
    )
    for report in found:
        assert report["said"][0] == "peers-late"
        assert "1 of 3 hosts have acknowledged step 12" in report["said"][1]
