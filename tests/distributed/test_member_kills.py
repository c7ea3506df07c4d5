"""Test members as processes: kills, freezes and simultaneous starts do not affect the other members."""

from __future__ import annotations

import shutil
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from scarctl.store import Store, verify
from tests.support.member import Members, epochs, owners
from tests.support.places import Place

pytestmark = [pytest.mark.slow, pytest.mark.leaves_arena]
WORLD = 8
VICTIM = 2
OTHERS = [number for number in range(WORLD) if number != VICTIM]


@pytest.mark.parametrize(
    "kills",
    [
        2,
        pytest.param(25, marks=pytest.mark.long),
    ],
)
def test_a_member_that_is_killed_again_and_again_is_its_own_affair(
    kills: int, tmp_path: Path, arena_dir: Path
) -> None:
    with Members(tmp_path / "s", tmp_path / "told", WORLD) as members:
        members.start(range(WORLD))
        members.until(lambda: min(members.steps()) >= 6, "all train")
        for kill in range(kills):
            started = len(members.told(VICTIM))
            members.kill(VICTIM)
            # No member waits for the dead one, however long it is away.
            members.until_steps(2, OTHERS)
            if kill % 5 == 4:  # its host is lost as well
                store = Store.open(tmp_path / "s").of_shard(VICTIM)
                shutil.rmtree(next(arena_dir.glob(f"*/{store.run_id}")))
            members.start([VICTIM])
            members.until(lambda n=started: len(members.told(VICTIM)) > n, "the killed one has resumed")
            members.until_steps(2 + kill % 5, [VICTIM])
        assert members.stop() == [0] * WORLD
        told = members.told(VICTIM)
    assert all("error" not in line and line["torn"] == 0 for line in told)
    assert len(told) == kills + 1
    for kill, (before, line) in enumerate(pairwise(told)):
        if kill % 5 == 4:
            assert line["tiers"].keys() == {"store"}
        else:
            assert "memory" in line["tiers"]
            assert line["step"] >= before["step"], "what was in memory is not lost"
    assert all(len(members.told(number)) == 1 for number in OTHERS)
    store = Store.open(tmp_path / "s")
    assert epochs(store) == {number: 1 if number in OTHERS else kills + 1 for number in range(WORLD)}
    assert verify(store, read_data=True).problems == []


@pytest.mark.long
def test_a_frozen_member_is_fenced_by_its_successor(s3_place: Place, tmp_path: Path) -> None:
    """Start on another host: on its own host the frozen member still has its memory."""
    hosts = [tmp_path / name for name in ("a", "b")]
    for host in hosts:
        host.mkdir()
    with Members(s3_place.url, tmp_path / "told", 2, storage_options=s3_place.options) as members:
        members.start([0, 1], env={"SCARCTL_ARENA_DIR": str(hosts[0])})
        members.until(lambda: min(members.steps()) >= 6, "both train")
        old = members.programs[1]
        old.send_signal(signal.SIGSTOP)
        members.start([1], env={"SCARCTL_ARENA_DIR": str(hosts[1])})
        members.until(lambda: len(members.told(1)) == 2, "the successor has resumed")
        members.until_steps(4, [0, 1])
        old.send_signal(signal.SIGCONT)
        assert old.wait(90) == 15
        assert members.told(1)[-1]["error"] == "fenced"
        members.until_steps(2, [0, 1])
        assert members.stop() == [0, 0]
    store = Store.open(s3_place.url, storage_options=s3_place.options)
    found = list(owners(store, 1))
    assert found == sorted(found), "no record of the older one follows one of the newer one"
    assert epochs(store) == {0: 1, 1: 2}
    assert (store.state(1).version >> 40 == 2).all()
    assert verify(store, read_data=True).problems == []
