"""Hosts with networks of their own that die, lose a cable, or lose the store: what other hosts' memory is worth then.

Each host is a network namespace with a daemon, on one switch. Its ranks' collectives have a cable of their own, so that
training goes on while daemons do not reach each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.folder import host_folder
from scarctl.arena.owner import read_owner
from scarctl.state.version import step_of
from tests.daemon.trainer import status, stop
from tests.distributed.hosted import END
from tests.support.networks import CONTROL, Networks, Unavailable, networks, outcome
from tests.support.places import KEY, SECRET
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

TRAIN = "tests.distributed.hosted:train"
ENDLESS = 10**6
HOMES, ELSEWHERE = ["east", "west", "north"], ["there", "west", "north"]
INTERVAL = 5
LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Iterator[Networks]:
    """Yield as many hosts as the test's parameter. Skip if this user may not make any, with the reason."""
    monkeypatch.delenv("SCARCTL_DAEMON")
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(networks(request.param))
        except Unavailable as error:
            pytest.skip(str(error))
        yield made
        for home in {*HOMES, *ELSEWHERE}:
            stop(host_folder(str(tmp_path / home)))


two_hosts = pytest.mark.parametrize("hosts", [2], indirect=True, ids=[""])
three_hosts = pytest.mark.parametrize("hosts", [3], indirect=True, ids=[""])


def resume(hosts: Networks, folder: Path, kind: str, homes: list[str], **options: Any) -> list[Any]:
    """Start the job again on some hosts, and return what each rank resumed."""
    again = {"homes": homes, **options}
    ended = outcome(hosts.start(TRAIN, folder, kind, str(folder), 16, again), folder)
    assert [code for code, _ in ended] == [0] * len(homes), ended
    return [report for _, report in ended]


@contextlib.contextmanager
def training(
    hosts: Networks, folder: Path, world: int = 0, **options: Any
) -> Iterator[Callable[[], list[Any]]]:
    """Train on all hosts, until the function is called that ends the job and returns the reports."""
    job = {"homes": HOMES, "pace": 0.1, "fraction": 1.0, **options}
    ranks = hosts.start(TRAIN, folder, "fsdp", str(folder), ENDLESS, job, world=world, seconds=300)

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


def trains_on(folder: Path) -> None:
    """Wait until training has gone on for three intervals."""
    before = step_at(folder, 0)
    wait_until(lambda: step_at(folder, 0) >= before + 3 * INTERVAL)


def catches_up(folder: Path) -> None:
    was = step_at(folder, 0)
    wait_until(lambda: step_of(replica_at(folder, "west").newest()).min() >= was - INTERVAL)


def run_of(folder: Path, home: str) -> dict[str, Any]:
    """Return the daemon's status of its own rank on a host; empty before there is one."""
    said = status(host_folder(str(folder / home)))
    return said["runs"][0] if said is not None and said["runs"] else {}


def step_at(folder: Path, rank: int) -> int:
    path = folder / f"step-{rank}"
    return int(path.read_text()) if path.exists() else 0


def replica_at(folder: Path, home: str) -> Arena:
    """Return the replica that a host keeps."""
    (place,) = [p for p in host_folder(str(folder / home)).iterdir() if p.is_dir() and read_owner(p)]
    found = Arena.share(place, run_id=place.name)
    assert found is not None
    return found


def listening(pid: int, port: int) -> set[str]:
    """Return the addresses at which a process in this network listens at this port."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == LISTENS]
    return {
        ".".join(str(byte) for byte in reversed(bytes.fromhex(address)))
        for address, at in ends
        if int(at, 16) == port
    }


@two_hosts
def test_a_host_dies_with_its_ranks_daemon_and_memory(hosts: Networks, tmp_path: Path) -> None:
    """Without a flush, its peer has the memory of two intervals before, or newer. The store has none of it."""
    job = {"homes": HOMES, "pace": 0.25, "fraction": 1.0, "store_stops_at": 7, "all_die_at": 33, "lost": [0]}
    ended = outcome(hosts.start(TRAIN, tmp_path, "fsdp", str(tmp_path), ENDLESS, job), tmp_path)
    assert [code for code, _ in ended] == [-9, -9], ended
    assert not (tmp_path / "east").exists()
    memory = np.array(json.loads((tmp_path / "memory-0").read_text()))
    assert memory.max() > 25, "memory stays young without the store"
    replica = replica_at(tmp_path, "west")
    assert replica.intact().all()
    behind = memory - step_of(replica.newest())
    assert behind.max() <= 2 * INTERVAL, behind
    said = re.search(
        r"listens at (\S+) port (\d+)", (host_folder(str(tmp_path / "west")) / "daemon.log").read_text()
    )
    assert said is not None
    assert said[1] == f"{CONTROL}.2", "it listens at the address that reaches the master"
    daemon = status(host_folder(str(tmp_path / "west")))
    if daemon is not None:  # it ends when it has saved as much as it can
        assert listening(daemon["pid"], int(said[2])) <= {f"{CONTROL}.2"}
    found = resume(hosts, tmp_path, "fsdp", ELSEWHERE[:2])
    assert found[0]["step"] == found[1]["step"] > 33 - 1 - 2 * INTERVAL
    assert set(found[0]["tiers"]) == {"peer"}


@three_hosts
def test_two_of_three_hosts_die_at_once(hosts: Networks, tmp_path: Path) -> None:
    settings = {"peers": 2}
    job = {"homes": HOMES, "store_stops_at": 7, "flush_at": 13, "copied_at": 13, "all_die_at": 13}
    job |= {"lost": [0, 1], "settings": settings}
    ended = outcome(hosts.start(TRAIN, tmp_path, "fsdp", str(tmp_path), ENDLESS, job), tmp_path)
    assert [code for code, _ in ended] == [-9] * 3, ended
    found = resume(hosts, tmp_path, "fsdp", ["there", "elsewhere", "north"], settings=settings)
    assert [(report["step"], report["consistent"]) for report in found] == [(13, True)] * 3
    assert [set(report["tiers"]) for report in found] == [{"peer"}, {"peer"}, {"memory"}]


@two_hosts
@pytest.mark.parametrize("seconds", [3.0, 45.0])
def test_a_cable_is_cut_shaped_and_healed(hosts: Networks, tmp_path: Path, seconds: float) -> None:
    with training(hosts, tmp_path) as end:
        hosts.cut(0)
        time.sleep(seconds)
        trains_on(tmp_path)
        behind = re.search(r"(\d+) behind", link_of(tmp_path))
        assert behind is not None, link_of(tmp_path)
        assert int(behind[1]) >= INTERVAL
        hosts.shape(0, "4mbit")
        hosts.heal(0)
        catches_up(tmp_path)
        hosts.unshape(0)
        reports = end()
    assert any("not kept up to date" in text for report in reports for text in report["warned"]) == (
        seconds > 30
    )


@pytest.fixture
def bucket(hosts: Networks, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Yield options of `attach` for a store on a host of its own, the last one."""
    last = len(hosts.names) - 1
    address = f"http://{hosts.address(last)}:9000"
    server = hosts.run(
        last, "tests.support.s3_host", address, env=dict(os.environ), errors=tmp_path / "s3.err"
    )
    wait_until((tmp_path / "s3.err").read_text)
    yield {"store": "s3://bucket/run", "settings": {"storage_options": options_of(address)}}
    server.kill()
    server.wait()


def options_of(address: str) -> dict[str, Any]:
    return {"endpoint_url": address, "key": KEY, "secret": SECRET}


@three_hosts
def test_the_store_and_a_peer_are_away_at_once(
    hosts: Networks, bucket: dict[str, Any], tmp_path: Path
) -> None:
    """The run continues, reports both, and catches up when they are back."""
    with training(hosts, tmp_path, world=2, **bucket) as end:
        wait_until(lambda: run_of(tmp_path, "east").get("durable_step", -1) > 0)
        hosts.cut(2)
        hosts.cut(1)
        before, durable = step_at(tmp_path, 0), run_of(tmp_path, "east")["durable_step"]
        wait_until(lambda: step_at(tmp_path, 0) >= before + 4 * INTERVAL)
        away = run_of(tmp_path, "east")
        assert away["head_step"] >= before + 3 * INTERVAL
        assert away["queued_partitions"] > 0
        assert away["durable_step"] <= before
        assert durable <= before
        assert re.search(r"\d+ behind", away["peers"][0]), away
        hosts.heal(1)
        hosts.heal(2)
        was = step_at(tmp_path, 0)
        catches_up(tmp_path)
        wait_until(lambda: run_of(tmp_path, "east")["oldest_durable_step"] >= was - 2 * INTERVAL, 90)
        end()
