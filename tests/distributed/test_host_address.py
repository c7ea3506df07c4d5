"""Test the address at which a host listens, and the order in which hosts are searched for memory."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from scarctl.config import SessionSettings
from scarctl.distributed.copies import _address
from scarctl.distributed.host_address import address_among, is_local, is_near, machine, reaching
from scarctl.distributed.memory_search import candidates_of
from scarctl.store.hosts import HostRecord


def test_the_address_is_local_only_if_all_are_on_this_machine() -> None:
    assert address_among(["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    alone = address_among([])
    if not is_local(alone):  # this machine has a network
        assert address_among(["127.0.0.1", alone]) == alone
    assert is_local(reaching("127.0.0.1"))
    assert is_local("::1")


def test_a_container_of_this_machine_is_near_unless_its_address_is_local() -> None:
    assert is_near(machine(), "10.0.0.7")
    assert not is_near(machine(), "127.0.0.1")
    assert not is_near("rack 7", "10.0.0.7")
    assert not is_near("", "10.0.0.7")


class _Team:
    """What one rank's exchange with another rank returns, which is on a machine of this name."""

    def __init__(self, other: str) -> None:
        self._other = other

    def gather(self, value: list[str]) -> list[list[str]]:
        return [value, ["127.0.0.1", self._other]]


def test_machines_that_know_their_own_names_as_local_do_not_listen_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Debian a host's name is 127.0.1.1, and a job with `init_method` has no MASTER_ADDR."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    settings = SessionSettings(store="x")
    assert _address(settings, cast(Any, _Team("localhost"))) == "127.0.0.1"
    assert _address(settings, cast(Any, _Team("node2"))) == address_among(())
    given = SessionSettings(store="x", peer_address="127.0.0.1")
    assert _address(given, cast(Any, _Team("node2"))) == "127.0.0.1"


def test_hosts_are_searched_newest_first_and_this_one_never() -> None:
    now = 1_700_000_000
    records = [
        HostRecord(place * 16, place, "", "127.0.0.1", port, False, now - age)
        for place, port, age in (("a", 1, 50), ("b", 2, 0), ("c", 3, 700))
    ]
    found = candidates_of(records, "c" * 16, now)
    assert [one.port for one in found] == [2, 1]
    many = [replace(records[0], place=f"{number:016x}", port=1 + number) for number in range(200)]
    assert len(candidates_of([*many, records[1]], "c" * 16, now)) == 128
    assert candidates_of([*many, records[1]], "c" * 16, now)[0].port == 2


_PLACE = """
import sys
from scarctl.config import SessionSettings
from scarctl.distributed.host_address import machine, place_of
print(place_of(SessionSettings(store="x", arena_dir=sys.argv[1])), machine(), sep="|")
"""


def test_containers_with_the_same_name_and_path_are_two_places(tmp_path: Path) -> None:
    """They have the same boot, too, but other file systems at that path: each has a daemon, and arenas, of its own."""
    own_mounts = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = [*own_mounts, "mount", "-t", "tmpfs", "x", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount file systems")

    def found(*mounted: str) -> list[str]:
        run = [*mounted, sys.executable, "-c", _PLACE, str(tmp_path)]
        said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        return said.strip().split("|")

    inside = [*own_mounts, "sh", "-c", 'mount -t tmpfs x "$0" && exec "$@"', str(tmp_path)]
    (place, own), (other, same) = found(), found(*inside)
    assert found() == [place, own]
    assert other.split(":")[:2] == place.split(":")[:2]
    assert other.split(":")[2] != place.split(":")[2]
    assert own == same != ""
