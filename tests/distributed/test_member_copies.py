"""Test members whose hosts find each other through the store: no process group, real daemons, folders as hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scarctl.store import Store
from scarctl.store.hosts import read_hosts
from tests.support.copied_member import INTERVAL, Hosts, hosts
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.leaves_arena]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Yield hosts: member 0 trains on "east", member 1 on "west", and each has a copy on the other's host."""
    monkeypatch.delenv("SCARCTL_DAEMON")
    with hosts(tmp_path, tmp_path / "store") as made:
        made.start(0, "east")
        made.start(1, "west")
        for number, home in ((0, "east"), (1, "west")):
            made.until_copied(number, home)
        yield made


def test_a_host_dies_and_its_member_starts_on_another(two: Hosts) -> None:
    """The store has had nothing for some time. What the other host has is at most two intervals old."""
    two.order(0, "stop store")
    wait_until(lambda: two.run_of(0, "east")["head_step"] >= 60)
    two.lose("east", 0)
    head = two.run_of(1, "west")
    assert head
    found = two.start(0, "north")
    assert found["tiers"].keys() == {"peer"}
    assert found["step"] >= 60 - 2 * INTERVAL
    assert two.end(0) == two.end(1) == 0
