"""Test a host's shutdown: by a call, by SIGTERM. Copies reported as safe exist without the host.

In most tests the store accepts nothing, so that the job resumes from another host's memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
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


def resume(folder: Path, homes: list[str]) -> list[tuple[int, bool]]:
    found = launch(TRAIN, len(homes), "fsdp", str(folder), {"homes": homes, "steps": 14})
    for home in homes:
        stop(host_folder(str(folder / home)))
    return [(report["step"], report["consistent"]) for report in found]


@pytest.mark.long
def test_to_the_host_that_keeps_the_copies(hosts: Path) -> None:
    said = die(hosts, ["east", "west"], evacuate=[13, 0, None], lost=[0])
    assert said["safe"], json.dumps(said)
    assert said["peer_sealed"]
    assert not said["sealed"]
    assert said["peer_partitions"] > 0, "the store stopped before"
    assert [peer.rpartition(":")[2] for peer in said["peers"]] == ["west"]
    assert resume(hosts, ["north", "west"]) == [(13, True)] * 2


@pytest.mark.long
def test_sigterm_with_a_grace_period_counts_the_copies(hosts: Path) -> None:
    job = {**GOES, "homes": ["east", "west"], "terminated_at": 13}
    job["settings"] = {**GOES["settings"], "grace": "40s"}
    with pytest.raises(AssertionError, match="rank 0 ended with -15"):
        launch(TRAIN, 2, "fsdp", str(hosts), job)
    said = json.loads((hosts / "signal-0").read_text())
    assert "step 13 is safe in the store and" in said
    assert "MiB only in the memory of" in said
    assert said.endswith("exact)")
    assert "west (" in said
    daemon = status(host_folder(str(hosts / "east")))
    if daemon is not None:
        os.kill(daemon["pid"], signal.SIGKILL)
    shutil.rmtree(hosts / "east")
    assert resume(hosts, ["north", "west"]) == [(13, True)] * 2
