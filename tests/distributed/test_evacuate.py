"""Test a host's shutdown: by a call, by Ray's notice, by SIGTERM. Copies reported as safe exist without the host.

In most tests the store accepts nothing, so that the job resumes from another host's memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.folder import host_folder
from tests.daemon.trainer import status, stop
from tests.distributed.launch import launch
from tests.distributed.test_replicas import hosts

__all__ = ["hosts"]
TRAIN = "tests.distributed.paced:train"
GOES: dict[str, Any] = {"steps": 20, "store_stops_at": 7, "all_die_at": 13, "settings": {"interval": 1000}}


def die(folder: Path, homes: list[str], **options: Any) -> Any:
    """Have rank 0's host evacuated at step 13, and the hosts `lost` die; return the report of the evacuation."""
    job = {**GOES, "homes": homes, **options}
    with pytest.raises(AssertionError, match="ended with -9"):
        launch(TRAIN, len(homes), "fsdp", str(folder), job)
    return json.loads((folder / "evacuated").read_text())


def resume(folder: Path, homes: list[str], kind: str = "fsdp") -> list[tuple[int, bool]]:
    found = launch(TRAIN, len(homes), kind, str(folder), {"homes": homes, "steps": 14})
    for home in homes:
        stop(host_folder(str(folder / home)))
    return [(report["step"], report["consistent"]) for report in found]


def test_to_the_host_that_keeps_the_copies(hosts: Path) -> None:
    said = die(hosts, ["east", "west"], evacuate=[13, 0, None], lost=[0])
    assert said["safe"], json.dumps(said)
    assert said["peer_sealed"]
    assert not said["sealed"]
    assert said["peer_partitions"] > 0, "the store stopped before"
    assert [peer.rpartition(":")[2] for peer in said["peers"]] == ["west"]
    assert resume(hosts, ["north", "west"]) == [(13, True)] * 2


@pytest.mark.long
def test_to_a_host_that_had_no_copy_when_the_one_that_has_goes_as_well(hosts: Path) -> None:
    """East's copy is at West, and both shut down. North, which is named, gets a copy."""
    homes = ["east", "west", "north"]
    named = f"{socket.gethostname()}:north"
    said = die(hosts, homes, evacuate=[13, 0, named], lost=[0, 1])
    assert said["safe"], json.dumps(said)
    assert said["peers"] == [named]
    assert all(name in said["known"] for name in ("west", "north"))
    assert resume(hosts, ["south", "middle", "north"]) == [(13, True)] * 3


@pytest.mark.long
def test_ray_takes_one_node(hosts: Path) -> None:
    """Other hosts count: the copy is not on that node."""
    said = die(hosts, ["east", "west"], notice=[13, 1, 60], lost=[0])
    assert said["safe"], json.dumps(said)
    assert said["peer_sealed"]
    assert resume(hosts, ["north", "west"]) == [(13, True)] * 2


@pytest.mark.long
def test_ray_takes_both_nodes(hosts: Path) -> None:
    """Only the store counts, although each node has the other one's copy. It has all of it afterwards."""
    said = die(hosts, ["east", "west"], notice=[13, 2, 60], lost=[0, 1], store_stops_at=0)
    assert said["safe"], json.dumps(said)
    assert said["sealed"]
    assert (said["peers"], said["peer_partitions"]) == ([], 0)
    assert resume(hosts, ["north", "south"]) == [(13, True)] * 2


@pytest.mark.long
def test_ray_takes_both_nodes_while_the_store_is_away(hosts: Path) -> None:
    """The copies are not called safe. The store may come back until the deadline."""
    said = die(hosts, ["east", "west"], notice=[13, 2, 4], lost=[])
    assert not said["safe"], json.dumps(said)
    assert said["lost_partitions"] > 0
    assert said["peers"] == []


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
@pytest.mark.long
def test_sigterm_with_a_grace_period_counts_the_copies(hosts: Path, kind: str) -> None:
    """Of the same state each rank takes the other's copy only if that one is dead, and sends nothing more."""
    job = {**GOES, "homes": ["east", "west"], "terminated_at": 13}
    job["settings"] = {**GOES["settings"], "grace": "40s"}
    with pytest.raises(AssertionError, match="rank 0 ended with -15"):
        launch(TRAIN, 2, kind, str(hosts), job)
    said = json.loads((hosts / "signal-0").read_text())
    assert "step 13 is safe in the store and" in said
    assert "MiB only in the memory of" in said
    end = (
        "exact)"
        if kind == "fsdp"
        else "whether these were equal is not known here, so that it may not be exact)"
    )
    assert said.endswith(end)
    assert "west (" in said
    daemon = status(host_folder(str(hosts / "east")))
    if daemon is not None:
        os.kill(daemon["pid"], signal.SIGKILL)
    shutil.rmtree(hosts / "east")
    assert resume(hosts, ["north", "west"], kind) == [(13, True)] * 2
