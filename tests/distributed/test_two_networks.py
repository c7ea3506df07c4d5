"""Two hosts with networks of their own, joined by a cable: daemons find each other where the master is reached."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.folder import host_folder
from tests.daemon.trainer import status, stop
from tests.distributed.launch import environment
from tests.distributed.test_replicas import ELSEWHERE, HOMES, STOPPED, TRAIN
from tests.support.forkserver import Program

EAST, WEST = "10.213.77.1", "10.213.77.2"
LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""
ENTER = """
import ctypes, os, runpy, sys
network, sys.argv[:] = sys.argv[1], sys.argv[2:]
libc = ctypes.CDLL(None, use_errno=True)
if libc.setns(os.open(network, os.O_RDONLY | os.O_CLOEXEC), 0x40000000):  # CLONE_NEWNET
    raise OSError(ctypes.get_errno(), "setns")
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of two network namespaces. Skips where this user may not make any."""
    monkeypatch.delenv("SCARCTL_DAEMON")
    names = [f"scarctl-{os.getpid()}-{side}" for side in ("east", "west")]
    cables = [f"sc{os.getpid()}{side}" for side in ("e", "w")]
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            cables[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            cables[1],
            "netns",
            names[1],
        )
        for name, cable, address in zip(names, cables, (EAST, WEST), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            for device in (cable, "lo"):
                ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        remove(names)
        pytest.skip(f"this user may not make network namespaces: {error}")
    yield names
    for home in ("east", "west", "north"):
        stop(host_folder(str(tmp_path / home)))
    remove(names)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def remove(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            ip("netns", "delete", name)


def train(networks: list[str], folder: Path, steps: int, options: dict[str, Any]) -> list[tuple[int, Any]]:
    """Exit code of each rank, and what it returned."""
    running = []
    for rank, network in enumerate(networks):
        env = environment(rank, 2, 29511) | {"MASTER_ADDR": EAST}
        env["GLOO_SOCKET_IFNAME"] = f"sc{os.getpid()}{'ew'[rank]}"
        arguments = [TRAIN, str(folder), "100", json.dumps(["fsdp", str(folder), steps, options])]
        with (folder / f"{rank}.err").open("wb") as errors:
            command = ["-c", ENTER, f"/run/netns/{network}", "tests.distributed.launch", *arguments]
            running.append(Program(command, env=env, stdout=errors, stderr=errors))
    codes = [process.wait(timeout=110) for process in running]
    found = [folder / f"{rank}.json" for rank in range(2)]
    return [
        (
            code,
            json.loads(path.read_text()) if path.exists() else (folder / f"{rank}.err").read_text()[-3000:],
        )
        for rank, (code, path) in enumerate(zip(codes, found, strict=True))
    ]


def listening(pid: int, port: int) -> set[str]:
    """Addresses at which anything in a process's network listens at this port."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == LISTENS]
    return {
        ".".join(str(byte) for byte in reversed(bytes.fromhex(address)))
        for address, at in ends
        if int(at, 16) == port
    }


def test_a_host_is_lost_with_its_network(tmp_path: Path, networks: list[str]) -> None:
    job = {**STOPPED, "homes": HOMES, "flush_at": 13, "copied_at": 13, "all_die_at": 13}
    ended = train(networks, tmp_path, 20, job)
    assert [code for code, _ in ended] == [-9, -9], ended
    folder = host_folder(str(tmp_path / "west"))
    said = re.search(r"listens at (\S+) port (\d+)", (folder / "daemon.log").read_text())
    assert said is not None
    assert said[1] == WEST
    daemon = status(folder)
    if daemon is not None:  # it ends when it has saved all that it can
        assert listening(daemon["pid"], int(said[2])) <= {WEST}
    found = train(networks, tmp_path, 14, {"homes": ELSEWHERE})
    assert [code for code, _ in found] == [0, 0], found
    assert [(report["step"], report["exact"]) for _, report in found] == [(13, True)] * 2
