"""Test members on hosts with networks of their own: one is cut off, and its member starts elsewhere meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.copied_member import PATIENCE, Hosts
from tests.support.forkserver import Program
from tests.support.networks import Networks, Unavailable, networks
from tests.support.places import KEY, SECRET
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.leaves_arena, pytest.mark.timeout(400)]
HOMES = ("east", "west", "north")
STORE = len(HOMES)
"""The host of the store."""


class Apart(Hosts):
    """Hosts that have a network each."""

    def __init__(self, folder: Path, nets: Networks, address: str) -> None:
        access = {"endpoint_url": address, "key": KEY, "secret": SECRET}
        options = {"storage_options": access, "peer_address": None, "on_error": "raise"}
        super().__init__(folder, "s3://bucket/run", **options)
        self.nets = nets

    def run(self, home: str, words: list[str], errors: Path) -> Program:
        env = dict(os.environ)
        at = HOMES.index(home)
        env["SCARCTL_PEER_ADDRESS"] = self.nets.address(at)
        return self.nets.run(at, "tests.support.copied_member", *words, env=env, errors=errors)


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apart]:
    """Yield three hosts, and a store on a fourth. Skip if this user may not make networks, with the reason."""
    monkeypatch.delenv("SCARCTL_DAEMON")
    try:
        with networks(STORE + 1) as nets:
            address = f"http://{nets.address(STORE)}:9000"
            said = tmp_path / "s3.err"
            server = nets.run(STORE, "tests.support.s3_host", address, env=dict(os.environ), errors=said)
            wait_until(said.read_text)
            made = Apart(tmp_path, nets, address)
            try:
                yield made
            finally:
                made.close()
                server.kill()
                server.wait()
    except Unavailable as error:
        pytest.skip(str(error))


def test_a_member_that_was_cut_off_and_replaced_is_fenced(apart: Apart) -> None:
    """Its successor has the copy of the other host. What the older one did since is gone, and never comes back."""
    apart.start(0, "east")
    apart.start(1, "west")
    apart.until_copied(0, "east")
    apart.until_copied(1, "west")
    apart.copy(0)
    apart.nets.cut(HOMES.index("east"))
    before = apart.run_of(0, "east")["head_step"]
    wait_until(lambda: apart.run_of(0, "east")["head_step"] >= before + 10)
    old = apart.programs[0]
    found = apart.start(0, "north")
    assert found["tiers"].keys() <= {"peer", "store"}
    assert "peer" in found["tiers"], found
    assert found["step"] >= before - 10
    apart.until_copied(0, "north")
    apart.nets.heal(HOMES.index("east"))
    assert old.wait(PATIENCE) == 15
    said = [line for line in apart.told(0) if "error" in line]
    assert [line["error"] for line in said] == ["fenced"], said
    apart.copy(0)
    assert apart.end(0) == apart.end(1) == 0
