"""Hosts that are unlike the usual two: several ranks on one, one name for two, no room, fewer of them after a restart.

Two folders of arenas are two hosts, each with a daemon; they talk over the loopback interface.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.folder import host_folder
from scarctl.arena.owner import read_owner
from scarctl.daemon import client
from scarctl.daemon.status import NO_HOST
from tests.daemon.trainer import status, stop
from tests.distributed import hosted
from tests.distributed.launch import environment, free_port, launch
from tests.distributed.paced import END
from tests.distributed.test_replicas import hosts
from tests.support.forkserver import Program
from tests.support.waiting import wait_until

__all__ = ["hosts"]
# test_replicas loses the usual host.
pytestmark = pytest.mark.long
TRAIN = "tests.distributed.hosted:train"
STOPPED = {"store_stops_at": 7, "flush_at": 13, "copied_at": 13, "all_die_at": 13, "host_dies": 0}
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


@pytest.fixture
def small(hosts: Path) -> Iterator[Path]:
    """Yield a host whose memory is a small file system of its own."""
    west = hosts / "west"
    west.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "scarctl", str(west)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this user may not mount file systems: {error}")
    yield west
    stop(host_folder(str(west)))
    subprocess.run(["umount", "-l", str(west)], check=True)


def test_memory_that_becomes_full_on_the_peers_host(hosts: Path, small: Path) -> None:
    """Training continues on both, East's link says why, and the copy catches up when there is room again."""
    port, ranks = free_port(), []
    job = {"homes": ["east", "west"], "pace": 0.05}
    for rank in range(2):
        words = ["tests.distributed.paced:train", str(hosts), "100", json.dumps(["fsdp", str(hosts), job])]
        with (hosts / f"{rank}.err").open("wb") as errors:
            command = ["-m", "tests.distributed.launch", *words]
            ranks.append(Program(command, env=environment(rank, 2, port), stdout=errors, stderr=errors))

    def link(home: str = "east") -> str:
        said = status(host_folder(str(hosts / home)))
        runs = said["runs"] if said is not None else []
        return str(runs[0]["peers"]) if runs else ""

    def step() -> int:
        path = hosts / "step-0"
        return int(path.read_text() or 0) if path.exists() else 0

    try:
        wait_until(lambda: "up to date" in link())
        filler = small / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        was = step()
        wait_until(lambda: step() > was + 20)
        full = link()
        filler.unlink()
        wait_until(lambda: "up to date" in link())
        (hosts / END).touch()
        codes = [rank.wait(100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], (hosts / "0.err").read_text()[-2000:] + (hosts / "1.err").read_text()[-2000:]
    reports = [json.loads((hosts / f"{rank}.json").read_text()) for rank in range(2)]
    assert re.search(r":west: \w+, \d+ behind", full), full
    assert any("No space left" in text for text in reports[0]["warned"]), reports[0]["warned"]


def own_memory(rank: int, world: int, kind: str, folder: str, steps: int, options: dict[str, Any]) -> Any:
    """Train in a container of its own: all have one name, and the same folder, which is another one in each."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = Path(folder, options["homes"][rank])
    home.mkdir(exist_ok=True)
    if libc.unshare(0x00020000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "scarctl", str(home)], check=True)
    try:
        return hosted.train(rank, world, kind, folder, steps, options)
    finally:
        client.ask(host_folder(str(home)), "stop")


def test_containers_of_one_machine_that_share_name_and_folder_are_hosts(hosts: Path) -> None:
    if os.geteuid():
        pytest.skip("this user may not mount file systems")
    found = launch(
        "tests.distributed.test_odd_hosts:own_memory",
        2,
        "fsdp",
        str(hosts),
        8,
        {"homes": ["same", "same"], "copied_at": 8},
    )
    for report in found:
        (link,) = report["peers"]
        assert link.endswith("up to date"), link
        assert not [text for text in report["warned"] if "no other host" in text]
