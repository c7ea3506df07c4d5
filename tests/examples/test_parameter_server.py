"""Test the examples' parameter server: its roles under kills, freezes and cuts, and its experiment, small."""

from __future__ import annotations

import multiprocessing.forkserver
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from examples.parameter_server.control import FolderControl
from examples.parameter_server.node import Network, Worker
from examples.parameter_server.roles import SESSION, Push, Record, Role, Sent, Server, Swap, successor
from tests.examples.chaos import one
from tests.support.forkserver import Program

CHAIN = Record(3, ("a", "b", "c"), frozenset("abc"))


def member(name: str, record: Record = CHAIN) -> Server:
    """Return a server that has been in the chain for a long time."""
    server = Server(name, _joined=True)
    server.reached(record, 0.0, record.chain)
    return server


def push(number: int, epoch: int = 3) -> Sent:
    return Sent("a", "push", epoch, Push("w", number, number), "w")


def test_the_last_one_acknowledges_with_the_epoch() -> None:
    a, b, c = (member(name) for name in "abc")
    (to_b,) = a.received(push(0), 0.1)
    (to_c,) = b.received(to_b, 0.1)  # type: ignore[arg-type]
    (ack,) = c.received(to_c, 0.1)  # type: ignore[arg-type]
    assert ack == Sent("w", "ack", 3, Push("w", 0, 0), "c")
    assert (a.role, b.role, c.role) == (Role.PRIMARY, Role.REPLICA, Role.REPLICA)
    (again,) = a.received(push(0), 0.1)
    assert len(a.log) == 1, "a repeated push is applied once"
    assert isinstance(again, Sent)
    assert again.what == "forward"


def test_a_worker_and_a_server_of_an_older_epoch_are_refused() -> None:
    a, b = member("a"), member("b")
    for actions in (a.received(push(0, epoch=2), 0.1), b.received(push(0), 0.1)):
        (answer,) = actions
        assert isinstance(answer, Sent)
        assert (answer.to, answer.what, answer.body) == ("w", "refused", 3)
    (answer,) = b.received(Sent("b", "forward", 2, (0, [Push("w", 0, 0)], None), "a"), 0.1)
    assert isinstance(answer, Sent)
    assert (answer.to, answer.what, b.log) == ("a", "refused", [])


def test_a_primary_without_the_control_plane_stops_before_another_one_is_promoted() -> None:
    a = member("a")
    (forward,) = a.received(push(0), SESSION * 0.99)
    assert isinstance(forward, Sent)
    (refused,) = a.received(push(1), SESSION)
    assert isinstance(refused, Sent)
    assert (refused.what, a.role) == ("refused", Role.FENCED)
    a.reached(CHAIN, 9.0, "abc")
    assert a.role is Role.PRIMARY


def test_the_one_with_everything_takes_over_and_one_without_does_not() -> None:
    assert successor(CHAIN, "abc") is None
    assert successor(CHAIN, "bc") == Record(4, ("b", "c"), frozenset("bc"))
    unsynced = Record(3, ("a", "b"), frozenset("a"))
    assert successor(unsynced, "b") is None, "what a has acknowledged would be lost"
    b = member("b")
    (swap,) = b.reached(CHAIN, 1.0, "bc")
    assert swap == Swap(3, Record(4, ("b", "c"), frozenset("bc")))
    b.reached(Record(4, ("b", "c"), frozenset("bc")), 1.1, "bc")
    assert b.role is Role.PRIMARY


def test_one_that_was_started_again_is_no_member_under_its_old_name() -> None:
    new = Server("b")
    (swap,) = new.reached(CHAIN, 0.0, "abc")
    assert swap == Swap(3, Record(4, ("a", "c"), frozenset("ac")))
    assert new.role is Role.RECOVERING
    (copy,) = new.reached(Record(4, ("a", "c"), frozenset("ac")), 0.1, "abc")
    assert copy == Sent("c", "copy", 4, None, "b")


@pytest.mark.parametrize("runs", [20, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_nothing_that_the_tail_acknowledged_is_lost_in_kills_freezes_and_cuts(runs: int) -> None:
    outcomes = [one(seed) for seed in range(runs)]
    assert sum(sum(outcome.faults.values()) for outcome in outcomes) >= runs * 6
    assert [(o.lost, o.twice, o.split, o.two) for o in outcomes] == [(0, 0, 0, 0)] * runs
    assert min(outcome.acknowledged for outcome in outcomes) > 100
    assert sum(outcome.refused for outcome in outcomes) > runs, (
        "servers that were replaced have tried to write"
    )


def test_the_simulation_finds_what_is_lost_without_the_tail() -> None:
    outcomes = [one(seed, acknowledge="now", every=10) for seed in range(6)]
    assert sum(outcome.lost for outcome in outcomes) > 0


@pytest.fixture
def forks() -> Iterator[None]:
    """Let the server that starts the processes end with the test."""
    yield
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.leaves_arena
@pytest.mark.usefixtures("forks")
@pytest.mark.long
def test_six_ways_in_small(tmp_path: Path) -> None:
    """Servers are processes that are killed with -9; the network is a straight line."""
    from examples.parameter_server.experiment import WAYS, Plan, Run

    class Line:
        """Least squares of 4,096 values, whose gradient points to 1."""

        def vector(self) -> np.ndarray:
            return np.zeros(4096, np.float32)

        def gradient(self, weights: np.ndarray, batch: int) -> np.ndarray:
            found: np.ndarray = weights - 1
            return found

        def accuracy(self, weights: np.ndarray) -> float:
            return float(weights.mean())

    plan = Plan(ticks=16, kills=(6, 11), away=3, promoted=1, look=2)
    for number, way in enumerate(WAYS):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = Run(way, Line(), folder, plan, 1).run()  # type: ignore[arg-type]
        assert len(found["accuracy"]) == 8
        before, after = found["accuracy"][2], found["accuracy"][4]
        if way.endswith("checkpointing"):
            assert after < 1.2 * before, "back to the last checkpoint"
            assert min(found["busy"]) < 1.0
        if way in ("stateless", "ours"):
            assert found["busy"] == [1.0] * 8
            assert after > before
        assert (found["starts"] == []) == way.endswith("chain")
        assert found["accuracy"][-1] > 0.3


# -- servers as processes, with a folder as control plane -----------------------------------------------------------


class Nodes:
    """Three servers of one shard, and a worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        FolderControl.make(folder / "control")
        self.control, self.worker = FolderControl(folder / "control"), Worker(folder, "w")
        self.programs = {name: self.start(name) for name in "abc"}

    def start(self, name: str) -> Program:
        return Program(["-m", "examples.parameter_server.node", str(self.folder), name])

    def until_all_have_everything(self) -> None:
        deadline = time.monotonic() + 60
        while len(self.control.read().synced) < 3:
            assert time.monotonic() < deadline, self.control.read()
            self.worker.push(0.0)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    folder = Path(tempfile.mkdtemp(prefix="n-"))  # paths of sockets must be short
    made = Nodes(folder)
    yield made
    made.worker.close()
    for program in made.programs.values():
        program.kill()
        program.wait()
    shutil.rmtree(folder)


def test_a_server_that_does_not_read_loses_messages_and_stops_nobody(tmp_path: Path) -> None:
    here, there = Network(tmp_path, "here"), Network(tmp_path, "there")
    assert here.receive(0.01) is None, "from now on its socket has a timeout"
    for number in range(100):
        here.send(Sent("there", "push", 3, Push("w", number, number), "here"))
    first = there.receive(1.0)
    assert first is not None
    assert first.body.number == 0
    here.close()
    there.close()


@pytest.mark.slow
@pytest.mark.parametrize("faults", [pytest.param(40, marks=pytest.mark.timeout(1800))])
@pytest.mark.long
def test_a_primary_that_is_killed_or_frozen_is_replaced_and_nothing_is_lost(
    faults: int, nodes: Nodes
) -> None:
    nodes.worker.push(1.0)
    for fault in range(faults):
        nodes.until_all_have_everything()
        head = nodes.control.read().chain[0]
        old = nodes.programs[head]
        if fault % 2:
            old.kill()
            old.wait()
        else:
            old.send_signal(signal.SIGSTOP)
        nodes.worker.push(2.0)
        assert nodes.control.read().chain[0] != head
        nodes.worker.push(3.0)
        if fault % 2:
            nodes.programs[head] = nodes.start(head)
        else:
            old.send_signal(signal.SIGCONT)
    nodes.until_all_have_everything()
    there = nodes.worker.log_of(nodes.control.read().chain[-1])
    assert there == [("w", number) for number in range(nodes.worker.number)]
