"""Test members whose hosts keep copies of each other's memory: no process group, real daemons, folders as hosts."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from scarctl.state.version import step_of
from scarctl.store import Store, verify
from tests.support.certificates import Authority
from tests.support.copied_member import INTERVAL, PATIENCE, Hosts
from tests.support.member import ROWS
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.leaves_arena, pytest.mark.timeout(300)]


@pytest.mark.long
def test_a_host_dies_and_its_member_starts_on_another(alone: Hosts) -> None:
    """The store has had nothing for some time. What the other host lacks was copied in the last two intervals.

    Intervals are of 1 s here. A busy machine may take longer now and then: then the host dies later.
    """
    alone.options |= {"pace": 0.5}
    two = alone.both()
    two.order(0, "stop store")
    two.until_head(0, "east", 4 * INTERVAL)

    def follows() -> list[Any]:
        """Stop the member, and return the steps of its copies. If the other host lacks older ones, continue."""
        two.programs[0].send_signal(signal.SIGSTOP)
        here, there = (step_of(two.memory_of(0, home).version) for home in ("east", "west"))
        if (here[here > there] > here.max() - 2 * INTERVAL).all():
            return [here]
        two.programs[0].send_signal(signal.SIGCONT)
        return []

    (memory,) = wait_until(follows, PATIENCE)
    two.lose("east", 0)
    assert (step_of(two.memory_of(0, "west").version) <= memory).all()
    found = two.start(0, "north")
    assert found["tiers"].keys() == {"peer"}, found
    assert found["step"] >= memory.max() - 2 * INTERVAL
    assert found["torn"] == 0
    assert two.end(0) == two.end(1) == 0
    store = Store.open(two.store)
    assert verify(store, read_data=True).problems == []


@pytest.mark.parametrize("tls", [pytest.param(False, marks=pytest.mark.long), True])
def test_after_a_flush_that_the_other_host_has_it_is_exact(alone: Hosts, tmp_path: Path, tls: bool) -> None:
    if tls:
        alone.options["peer_tls"] = Authority(tmp_path).host("any")
    two = alone.both()
    two.order(0, "stop store")
    two.until_head(0, "east", 10)
    head = two.copy(0, stopped=True)
    two.lose("east", 0)
    found = two.start(0, "north")
    assert found == {"step": head, "consistent": True, "tiers": {"peer": ROWS + 1}, "torn": 0}


@pytest.mark.long
def test_copies_of_members_that_are_replaced(alone: Hosts) -> None:
    """What only copies have is taken over. They are never taken for memory of the new members."""
    alone.options["divided"] = 48
    two = alone.both()
    for number in (0, 1):
        two.order(number, "stop store")
    heads = [two.copy(number, stopped=True) for number in (0, 1)]
    two.kill(0)  # the daemon saves what it has
    two.lose("west", 1)
    wait_until(lambda: two.run_of(0, "east") == {})
    begun = [two.start(n, home, count=3, replaces=2) for n, home in enumerate(("north", "east", "south"))]
    assert [line["consistent"] for line in begun] == [False] * 3
    for number, line in enumerate(begun):
        steps = line["steps"]  # of each row, from the whole table's row 16 * number on
        assert steps == [heads[(16 * number + row) // 24] for row in range(16)], number
    new = {Store.open(two.store).of_shard(shard).run_id for shard in (2, 3, 4)}
    for number, home in enumerate(("north", "east", "south")):
        two.until_copied(number + 2, home)
    assert {run for home in ("north", "east", "south") for run in two.copies_on(home)} >= new
    two.count = 3
    two.order(2, "stop store")
    head = two.copy(2)
    two.kill_daemon("south")
    two.kill(2)
    shutil.rmtree(two.home("south"))
    found = two.start(2, "west", replaces=2)
    assert found["step"] >= head
    assert found["tiers"].keys() == {"peer"}
