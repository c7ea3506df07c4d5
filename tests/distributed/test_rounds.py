"""Test selection rounds between ranks that are real processes, over gloo on the loopback interface."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from scarctl.distributed.rounds import Exchange
from scarctl.distributed.selector import GlobalSelector
from scarctl.policy.select import Candidates, Selection
from tests.support.process import Forked, Tell

N, BYTES = 400, 1000
BUDGET = N * BYTES // 8
"""The budget of one rank."""
GENEROUS = 60.0
"""Patience of ranks that should wait for each other, however busy the machine is."""


class Member:
    """One rank of a test, in its own process."""

    def __init__(self, rank: int, world: int, folder: Path, **more: Any) -> None:
        self.rank = rank
        self.folder = folder
        self.tell: Tell
        self.records: list[logging.LogRecord] = []
        patience = more.pop("patience", GENEROUS)
        store = dist.FileStore(str(folder / "rendezvous"), world)
        group = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=120))
        self.exchange = Exchange(group, rank, world, **more)
        del group
        self.selector = GlobalSelector(self.exchange, rank, patience=patience)
        handler = logging.Handler()
        handler.emit = self.records.append  # type: ignore[method-assign]
        logging.getLogger("scarctl").addHandler(handler)

    def expect(self, step: int) -> None:
        self.selector.expect(step, BUDGET)

    def select(self, step: int, policy: str = "priority", *, hurried: bool = True, **more: Any) -> Selection:
        """Do the worker's part. hurried: a training thread waits for it from the beginning."""
        if hurried:
            self.selector.hurry()
        among = Candidates(
            distance_sq=more.pop("distance_sq", values(self.rank, step)),
            nbytes=np.full(N, BYTES),
            staleness=np.full(N, step),
            eligible=np.ones(N, dtype=bool),
            step=step,
        )
        return self.selector.select(policy, among, BUDGET)

    def checkpoint(self, step: int, **more: Any) -> Selection:
        self.expect(step)
        chosen = self.select(step, **more)
        self.selector.settle()
        return chosen


def values(rank: int, step: int) -> NDArray[np.float64]:
    return np.random.default_rng([rank, step]).random(N) * (rank + 1)


Body = Callable[[Member], Any]


@contextlib.contextmanager
def ranks(folder: Path, bodies: list[Body], **more: Any) -> Iterator[list[Forked]]:
    """Yield a process per body; `results` has their return values."""

    def run(rank: int) -> Callable[[Tell], None]:
        def program(tell: Tell) -> None:
            signal.alarm(150)
            if "lo" in [name for _, name in socket.if_nameindex()]:
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            member = Member(rank, len(bodies), folder, **more)
            member.tell = tell
            result = bodies[rank](member)
            (folder / f"{rank}.json").write_text(json.dumps(result))
            # Until all have what they need: leaving earlier counts as a failure to the others.
            member.selector.close()
            assert not [t for t in threading.enumerate() if t.name == "scarctl-exchange"]

        return program

    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Forked(run(rank))) for rank in range(len(bodies))]


def results(folder: Path, bodies: list[Body], *, dead: tuple[int, ...] = (), **more: Any) -> list[Any]:
    """Return what the bodies return, None for those that are `dead`."""
    with ranks(folder, bodies, **more) as processes:
        codes = [process.wait() for process in processes]
    assert codes == [-signal.SIGKILL if rank in dead else 0 for rank in range(len(bodies))]
    return [
        None if rank in dead else json.loads((folder / f"{rank}.json").read_text())
        for rank in range(len(bodies))
    ]


def until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def at_once(world: int, step: int, budget: int) -> list[list[int]]:
    """Return what the ranks should pick: the best partitions of all ranks."""
    every = np.concatenate([values(rank, step) for rank in range(world)])
    best = np.sort(np.argsort(every)[::-1][: budget // BYTES])
    return [(best[best // N == rank] % N).tolist() for rank in range(world)]


def test_ranks_pick_together_what_one_would(tmp_path: Path) -> None:
    def body(member: Member) -> Any:
        picks = [member.checkpoint(step).ids.tolist() for step in range(10, 60, 10)]
        return picks, member.selector.late, member.exchange.failure

    got = results(tmp_path, [body] * 4)
    budget = 4 * BUDGET
    for i, step in enumerate(range(10, 60, 10)):
        best = at_once(4, step, budget)
        picks = [picks[i] for picks, _, _ in got]
        both = sum(len(set(a) & set(b)) for a, b in zip(picks, best, strict=True))
        assert abs(sum(map(len, picks)) - budget // BYTES) <= 0.02 * budget // BYTES
        assert both >= 0.97 * budget // BYTES
        assert len(picks[3]) > 2 * len(picks[0])
    assert [(late, failure) for _, late, failure in got] == [(0, None)] * 4


def test_a_slow_rank_holds_nobody_up(tmp_path: Path) -> None:
    """One rank is ten times slower: the others wait for it once, and not again while a round is still open."""

    def body(member: Member) -> Any:
        member.checkpoint(0)
        if member.rank == 2:
            for step in range(1, 5):
                time.sleep(0.8)
                member.checkpoint(step)
            return None
        waited, picked = [], 0
        for step in range(1, 5):
            started = time.monotonic()
            chosen = member.checkpoint(step)
            waited.append(time.monotonic() - started)
            picked += chosen.nbytes
            time.sleep(0.05)
        until(lambda: not member.exchange._rounds)
        return waited, picked, member.selector.late, member.exchange.failure

    got = results(tmp_path, [body] * 3, patience=0.1, linger=0.5)
    for waited, picked, late, failure in (got[0], got[1]):
        assert late >= 3
        assert sorted(waited)[-2] < 0.8  # the machine may be busy once
        assert picked <= 4 * 3 * BUDGET
        assert failure is None


def test_a_copy_that_nobody_waits_for_has_time(tmp_path: Path) -> None:
    def body(member: Member) -> Any:
        time.sleep(0.5 * member.rank)
        return member.checkpoint(0, hurried=False).ids.tolist(), member.selector.late

    got = results(tmp_path, [body] * 2, patience=0.001)
    assert [late for _, late in got] == [0, 0]
    assert [len(ids) for ids, _ in got] == [len(ids) for ids in at_once(2, 0, 2 * BUDGET)]


def test_a_killed_rank_leaves_the_others_to_themselves(tmp_path: Path) -> None:
    def body(member: Member) -> Any:
        picks = []
        for step in range(8):
            if step == 3 and member.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            picks.append(member.checkpoint(step))
        until(lambda: member.exchange.failure)
        warnings = [r.getMessage() for r in member.records if r.levelno == logging.WARNING]
        return [p.nbytes for p in picks], [p.ids.tolist() for p in picks], warnings

    started = time.monotonic()
    got = results(tmp_path, [body] * 4, dead=(1,))
    assert time.monotonic() - started < 60, "a dead rank counts as late for 300 s"
    for rank in (0, 2, 3):
        sizes, picks, warnings = got[rank]
        assert len(warnings) == 1
        assert "without the other ranks" in warnings[0]
        # From then on it uses its own best partitions and its own budget, and at first its part of the
        # credit.
        assert all(BUDGET * 0.97 <= size <= BUDGET * 1.03 for size in sizes[4:])
        own = np.argsort(values(rank, 7))[::-1][: len(picks[7])]
        assert sorted(own.tolist()) == picks[7]


def test_a_rank_that_skips_a_round_is_found_out_by_all(tmp_path: Path) -> None:
    def body(member: Member) -> Any:
        for step in range(5):
            if step == 2 and member.rank == 0:
                member.select(step)  # as if a round had been requested: there is no round
            else:
                member.checkpoint(step)
        until(lambda: member.exchange.failure)
        return member.exchange.failure, member.checkpoint(9).nbytes

    got = results(tmp_path, [body] * 3)
    for failure, size in got:
        assert failure == "some ranks are at the round of step 2 and others at that of step 3"
        assert BUDGET * 0.97 <= size <= BUDGET * 1.03


def test_a_rank_whose_copy_failed_joins_with_nothing(tmp_path: Path) -> None:
    def body(member: Member) -> Any:
        sizes = []
        for step in range(4):
            if member.rank == 1 and step in (1, 2):
                member.expect(step)  # and then a fault occurs
                if step == 1:
                    member.selector.settle()
                sizes.append(0)
            else:
                sizes.append(member.checkpoint(step).nbytes)
        return sizes, member.selector.late, member.exchange.failure

    got = results(tmp_path, [body] * 3)
    for sizes in zip(*(sizes for sizes, _, _ in got), strict=True):
        assert abs(sum(sizes) - 3 * BUDGET) <= 0.04 * 3 * BUDGET
    assert [rest for _, *rest in got] == [[0, None]] * 3


def test_closing_with_an_open_round_hangs_nobody(tmp_path: Path) -> None:
    """One rank stops permanently, one leaves in the middle of a round, and then so does the third."""

    def stopped(member: Member) -> Any:
        member.checkpoint(0)
        member.tell("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)

    def leaves(member: Member) -> Any:
        member.checkpoint(0)
        member.checkpoint(1)
        late = member.selector.late
        started = time.monotonic()
        member.selector.close()
        member.selector.close()
        assert member.checkpoint(2).nbytes > 0
        return late, time.monotonic() - started, [r.getMessage() for r in member.records]

    with ranks(tmp_path, [leaves, stopped, leaves], patience=0.1, linger=0.3) as processes:
        processes[1].expect("stopped")
        assert [processes[0].wait(), processes[2].wait()] == [0, 0]
    for rank in (0, 2):
        late, seconds, logged = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seconds < 60, "a dead rank counts as late for 300 s"
        # A rank that leaves gets no report of it; the other may have noticed before its own patience ended.
        assert late > 0 or len(logged) == 1


def test_a_rank_that_never_comes_counts_as_gone_after_a_while(tmp_path: Path) -> None:
    def body(member: Member) -> Any:
        member.checkpoint(0)
        if member.rank == 1:
            until(lambda: (member.folder / "gone").exists())
        else:
            member.checkpoint(1)
            until(lambda: member.exchange.failure)
            (member.folder / "gone").touch()
        return member.checkpoint(2).nbytes, member.exchange.failure is not None

    got = results(tmp_path, [body] * 3, timeout=1.0, patience=0.1)
    assert all(size >= 0.9 * BUDGET for size, _ in got)
    assert [failed for _, failed in got][::2] == [True, True]


@pytest.mark.parametrize(("policy", "differ"), [("priority", False), ("full", True)])
def test_samples_are_compared_with_every_policy(tmp_path: Path, policy: str, differ: bool) -> None:
    def body(member: Member) -> bool:
        member.selector._sample = lambda number: torch.full((1,), float(number + differ * member.rank))
        for step in range(5):
            member.selector.agreed()
            member.checkpoint(step, policy=policy)
        return member.selector.differs

    assert results(tmp_path, [body] * 2) == [differ] * 2


def test_samples_are_compared_also_where_nothing_is_selected(tmp_path: Path) -> None:
    """In most checkpoints it is not the store's turn."""

    def body(member: Member) -> bool:
        member.selector._sample = lambda number: torch.full((1,), float(number + member.rank))
        for step in range(5):
            member.selector.agreed()
            member.expect(step)
            member.selector.read_sample()
            member.selector.settle()
        return member.selector.differs

    assert results(tmp_path, [body] * 2) == [True] * 2


def test_ranks_that_agree_again_are_believed_after_a_while_and_later_ones_less(tmp_path: Path) -> None:
    """As with an average of the replicas now and then: one equal sample proves little."""
    differing = {3, 4, 17}

    def body(member: Member) -> list[bool]:
        member.selector._sample = lambda number: torch.full((1,), float((number in differing) * member.rank))
        found = []
        for step in range(45):
            member.selector.agreed()
            found.append(member.selector.differs)
            member.checkpoint(step)
        return found

    (first, second) = results(tmp_path, [body] * 2)
    assert first == second
    changes = [step for step in range(1, 45) if first[step] != first[step - 1]]
    # Found two rounds later; believed again after 8 equal samples, and then after 16.
    assert changes == [5, 14, 19, 35]


def test_a_sample_that_fails_is_said_and_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    def fails(step: int) -> torch.Tensor:
        raise RuntimeError("its memory is gone")

    selector = GlobalSelector(Exchange(None, 0, 1), 0, sample=fails)  # type: ignore[arg-type]
    try:
        for step in (1, 2):
            selector.expect(step, 5)
            selector.settle()
            assert not selector.expecting
        assert (
            caplog.text.count("rank 0 cannot compare its parameters with other ranks: its memory is gone")
            == 1
        )
    finally:
        selector.close()


def test_a_sample_that_cannot_be_read_leaves_the_round_to_be_joined() -> None:
    selector = GlobalSelector(
        Exchange(None, 0, 1),  # type: ignore[arg-type]
        0,
        sample=lambda step: torch.empty(1, device="meta"),
    )
    try:
        selector.expect(1, 5)
        selector.settle()
        selector.expect(2, 5)
        one = np.ones(1, dtype=np.int64)
        among = Candidates(distance_sq=np.ones(1), nbytes=one, staleness=one, eligible=one > 0)
        with pytest.raises(NotImplementedError):
            selector.select("priority", among, 5)
        assert selector.expecting
    finally:
        selector.close()


def test_one_rank_needs_no_group() -> None:
    exchange = Exchange(None, 0, 1)  # type: ignore[arg-type]
    selector = GlobalSelector(exchange, 0, patience=GENEROUS)
    try:
        selector.expect(1, 5)
        selector.hurry()
        among = Candidates(
            distance_sq=np.arange(10.0),
            nbytes=np.ones(10, dtype=np.int64),
            staleness=np.zeros(10, dtype=np.int64),
            eligible=np.ones(10, dtype=bool),
        )
        chosen = selector.select("priority", among, 5, credit=2)
        assert chosen.ids.tolist() == [3, 4, 5, 6, 7, 8, 9]
        assert (chosen.credit, selector.late) == (0, 0)
    finally:
        selector.close()
    assert not exchange._thread.is_alive()
