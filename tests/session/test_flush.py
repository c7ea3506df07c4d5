"""What is flushed when a signal, an exception or a call asks for it, in real processes with real signals."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import scarctl
import scarctl.session.departure
from scarctl.checkpoint.live_state import LiveState
from scarctl.errors import UsageError
from scarctl.session.signals import TOGETHER
from scarctl.store import Store, verify
from tests.support import stepper
from tests.support.forkserver import Program
from tests.support.process import Forked, Tell
from tests.support.training import Loop, differing

STEPS, MORE = 7, 5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums come out the same in every process; a forked child could not use its parent's threads anyway."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The state after all steps of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    loop = Loop(folder / "store", arena_dir=folder, daemon=False)
    loop.train(STEPS + MORE)
    loop.session.close()
    return loop.state()


def half_an_iteration(loop: Loop) -> torch.Tensor:
    """The next batch and its forward pass: random numbers, data position and buffers are no longer the step's."""
    ids = torch.randint(0, 64, (16,))
    loop.position["batches"] += 1
    loss = loop.model(ids).square().mean()
    loop.optimizer.zero_grad()
    return loss


def trained(store: Path, **options: Any) -> Loop:
    loop = Loop(store, **options)
    loop.train(STEPS)
    half_an_iteration(loop)
    return loop


def assert_goes_on_exactly(
    store: Path, expected: dict[str, torch.Tensor], tier: str | None = "memory"
) -> None:
    """Another process resumes at the newest step, and ends where the uninterrupted run ended."""
    loop = Loop(store, seed=99)
    resumed = loop.session.resume()
    assert (resumed.step, resumed.exact) == (STEPS, True)
    assert resumed.report is not None
    assert tier is None or set(resumed.report.tiers) == {tier}
    assert loop.position == {"batches": STEPS}
    loop.train(MORE)
    assert differing(loop.state(), expected) == []
    loop.session.close()
    assert loop.session.stats.errors == 0
    opened = Store.open(str(store))
    assert verify(opened, read_data=True).problems == []
    opened.close()


# -- a signal ends the process -----------------------------------------------------------------------------------


def computes() -> None:
    for _ in itertools.count():
        pass


def sleeps() -> None:
    while True:
        time.sleep(600)


def is_stuck() -> None:
    """A call that does not return, whatever signals come."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


@pytest.mark.parametrize("blocked", [computes, sleeps, is_stuck])
def test_sigterm(
    tmp_path: Path, both_savers: str, expected: dict[str, torch.Tensor], blocked: Callable[[], None]
) -> None:
    def body(tell: Tell) -> None:
        loop = trained(tmp_path / "store")
        tell("ready")
        blocked()
        del loop

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
    assert_goes_on_exactly(tmp_path / "store", expected)


def test_sigterm_in_a_collective_that_the_other_rank_never_joins(
    tmp_path: Path, both_savers: str, expected: dict[str, torch.Tensor]
) -> None:
    def body(rank: int, tell: Tell) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        if rank:
            time.sleep(600)
        loop = trained(tmp_path / "store", ranks=False)  # as rank 0 of a data-parallel job may do
        tell("ready")
        dist.all_reduce(loop.model.embed.weight.detach().clone())

    with Forked(lambda tell: body(0, tell)) as child, Forked(lambda tell: body(1, tell)):
        child.expect("ready")
        time.sleep(0.1)
        child.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
    assert_goes_on_exactly(tmp_path / "store", expected)


def test_the_flush_needs_no_store(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    """The store takes nothing any more: the next process has it from memory all the same, and still exactly."""

    def body(tell: Tell) -> None:
        loop = Loop(tmp_path / "store")
        loop.train(3)
        loop.session._saver.stop()
        loop.train(STEPS - 3)
        half_an_iteration(loop)
        tell("ready")
        is_stuck()

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
    assert_goes_on_exactly(tmp_path / "store", expected)


def test_what_was_flushed_becomes_durable_without_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor], arena_dir: Path
) -> None:
    monkeypatch.setenv("SCARCTL_DAEMON", "1")

    def body(tell: Tell) -> None:
        trained(tmp_path / "store")
        tell("ready")
        sleeps()

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
    deadline = time.monotonic() + 20
    while newest_sealed(tmp_path / "store") < STEPS:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert_goes_on_exactly(tmp_path / "store", expected)


def newest_sealed(folder: Path) -> int:
    store = Store.open(str(folder))
    try:
        sealed = store.state(0).sealed
        return sealed[-1][2] if sealed else -1
    finally:
        store.close()


# -- steps -------------------------------------------------------------------------------------------------------


class Slow(stepper.Stepper):
    """Leaves parameters half changed for a while."""

    seconds = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].setdefault("count", torch.zeros_like(p))
                count.add_(1)
                p[:, ::2] += 1
        time.sleep(self.seconds)
        for group in self.param_groups:
            for p in group["params"]:
                p[:, 1::2] += 1


@pytest.mark.parametrize("seconds", [0.5, 600.0], ids=["that ends", "that does not"])
def test_sigterm_in_the_middle_of_a_step(
    tmp_path: Path, both_savers: str, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(scarctl.session.departure, "FLUSH_SECONDS", 5.0 if seconds < 1 else 0.5)

    def body(tell: Tell) -> None:
        model, _ = stepper.build()
        optimizer = Slow(model.parameters())
        session = stepper.attach(model, optimizer, str(tmp_path / "store"))
        for _ in range(4):
            optimizer.step()
        session.checkpoint(full=True)
        Slow.seconds = seconds
        threading.Timer(0.1, tell, ["ready"]).start()
        optimizer.step()
        sleeps()

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
    model, _ = stepper.build()
    optimizer = Slow(model.parameters())
    session = stepper.attach(model, optimizer, str(tmp_path / "store"))
    resumed = session.resume()
    assert (resumed.step, resumed.exact) == (5 if seconds < 1 else 4, True)
    assert stepper.torn_rows(model, optimizer) == []  # type: ignore[arg-type]
    assert {int(v) for p in model.parameters() for v in p[:, 0]} == {resumed.step}
    session.close()


def test_signals_at_any_moment_of_a_loop(tmp_path: Path, both_savers: str) -> None:
    """Steps as fast as they go, and every time another moment."""
    step = 0
    for round_ in range(5):

        def body(tell: Tell) -> None:
            model, optimizer = stepper.build()
            session = stepper.attach(model, optimizer, str(tmp_path / "store"))
            session.resume()
            optimizer.step()
            tell("ready")
            while True:
                optimizer.step()

        with Forked(body) as child:
            child.expect("ready")
            time.sleep(0.037 * round_)
            child.signal(signal.SIGTERM)
            assert child.wait() == -signal.SIGTERM
        model, optimizer = stepper.build()
        session = stepper.attach(model, optimizer, str(tmp_path / "store"))
        resumed = session.resume()
        assert resumed.exact
        assert resumed.step > step
        assert stepper.torn_rows(model, optimizer) == []
        assert {int(v) for p in model.parameters() for v in p[:, 0]} == {resumed.step}
        step = resumed.step
        session.close()


def test_a_loop_that_says_itself_when_a_step_is_over(tmp_path: Path) -> None:
    """Between two calls of step() its arrays may be half changed: the flush waits for the next call."""

    def body(tell: Tell) -> None:
        state = {"w": torch.zeros(64, 8).numpy()}
        session = scarctl.attach(
            state, store=tmp_path / "store", interval=100, partitioning=scarctl.Partitioning(rows={"*": 1})
        )
        for step in itertools.count(1):
            state["w"][:32] += 1
            if step == 4:
                tell("ready")
            time.sleep(0.0 if step < 4 else 0.3)
            state["w"][32:] += 1
            session.step()

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
    state = {"w": torch.ones(64, 8).numpy()}
    session = scarctl.attach(
        state, store=tmp_path / "store", partitioning=scarctl.Partitioning(rows={"*": 1})
    )
    resumed = session.resume()
    assert resumed.exact
    assert resumed.step >= 4
    assert set(state["w"].flat) == {resumed.step}
    session.close()


# -- what comes after the flush ----------------------------------------------------------------------------------


def test_sigint_is_a_keyboard_interrupt_after_a_flush(
    tmp_path: Path, both_savers: str, expected: dict[str, torch.Tensor]
) -> None:
    def body(tell: Tell) -> None:
        loop = trained(tmp_path / "store")
        with pytest.raises(KeyboardInterrupt), loop.session:  # noqa: PT012
            try:
                tell("ready")
                time.sleep(600)
            finally:
                tell(f"flushed {loop.session._saving.flushed}")

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGINT)
        child.expect(f"flushed {STEPS}")
        assert child.wait() == 0
    assert_goes_on_exactly(tmp_path / "store", expected, tier=None)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path, signum: int) -> None:
    def body(tell: Tell) -> None:
        loop = trained(tmp_path / "store")

        def never(moment: object) -> bool:
            tell("flushing")
            time.sleep(600)
            return False

        loop.session._saving.seal = never  # type: ignore[method-assign, assignment]
        tell("ready")
        is_stuck()

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signum)
        child.expect("flushing")
        child.signal(signum)  # together with the first: counts once
        time.sleep(2 * TOGETHER)
        os.kill(child.pid, 0)
        assert child.status is None
        child.signal(signum)
        assert child.wait(2.0) == -signum
    loop = Loop(tmp_path / "store", seed=99)
    assert loop.session.resume().step <= STEPS
    loop.session.close()


def test_a_handler_of_the_users_own_runs_after_the_flush(tmp_path: Path, both_savers: str) -> None:
    def body(tell: Tell) -> None:
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda signum, frame: stop.append(signum))
        loop = trained(tmp_path / "store")
        tell("ready")
        while not stop:
            time.sleep(0.01)
        tell(f"handled after {loop.session._saving.flushed}")
        loop.train(2)  # it goes on for as long as it likes
        loop.session.close()
        assert signal.getsignal(signal.SIGTERM).__name__ == "<lambda>"  # type: ignore[union-attr]

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGTERM)
        child.expect(f"handled after {STEPS}")
        assert child.wait() == 0
    loop = Loop(tmp_path / "store", seed=99)
    assert loop.session.resume().step == STEPS + 2
    loop.session.close()


def test_a_handler_installed_later_takes_over(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    def body(tell: Tell) -> None:
        loop = trained(tmp_path / "store")
        earlier = signal.getsignal(signal.SIGTERM)

        def handler(signum: int, frame: object) -> None:
            earlier(signum, frame)  # type: ignore[operator, misc]
            raise SystemExit(5)

        signal.signal(signal.SIGTERM, handler)
        with pytest.raises(SystemExit), loop.session:  # noqa: PT012
            tell("ready")
            sleeps()
        assert signal.getsignal(signal.SIGTERM) is handler

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGTERM)
        assert child.wait() == 0
    assert_goes_on_exactly(tmp_path / "store", expected, tier=None)


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        loop = trained(tmp_path / "store")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        assert loop.session._saving.flushed is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        loop.session.close()

    with Forked(body) as child:
        assert child.wait() == 0


# -- exceptions and calls ----------------------------------------------------------------------------------------


def test_an_exception_in_the_loop(
    tmp_path: Path, both_savers: str, expected: dict[str, torch.Tensor]
) -> None:
    loop = trained(tmp_path / "store")
    with pytest.raises(RuntimeError, match="broken batch"), loop.session:
        raise RuntimeError("broken batch")
    # The daemon has the rest of the work, and the arena stays; alone, the session has waited for the store.
    assert_goes_on_exactly(tmp_path / "store", expected, "memory" if both_savers == "daemon" else "store")


def test_a_handler_of_somebody_else_raises_in_the_middle_of_closing(
    tmp_path: Path, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lightning's does, which tells other ranks of a SIGTERM: they may be dead."""
    loop = trained(tmp_path / "store")
    engine = loop.session._started()
    hand_over, calls = engine.hand_over, []

    def interrupted(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("connection closed by peer")
        hand_over(*arguments)

    monkeypatch.setattr(engine, "hand_over", interrupted)
    with pytest.raises(RuntimeError, match="broken batch"), loop.session:
        raise RuntimeError("broken batch")
    assert len(calls) == 2
    assert_goes_on_exactly(tmp_path / "store", expected, tier=None)


def test_it_raises_while_closing_waits_for_the_copy(
    tmp_path: Path, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been copied by then is a part of what is sealed."""
    loop = trained(tmp_path / "store")
    save, calls, main = LiveState.save, [], threading.get_ident()

    def slowly(live: LiveState, ids: np.ndarray, *arguments: Any) -> None:
        calls.append(ids.size)
        half = ids.size // 2
        save(live, ids[:half], *arguments)
        if len(calls) == 1:
            signal.pthread_kill(main, signal.SIGALRM)
            time.sleep(0.5)
        save(live, ids[half:], *arguments)

    def raises(*_: object) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(LiveState, "save", slowly)
    before = signal.signal(signal.SIGALRM, raises)
    try:
        with pytest.raises(RuntimeError, match="broken batch"), loop.session:
            raise RuntimeError("broken batch")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert calls
    assert calls[0] > 1
    assert "closed by peer" in str(loop.session.stats.last_error)
    assert_goes_on_exactly(tmp_path / "store", expected, tier=None)


def test_close_in_a_finally_clause(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    loop = trained(tmp_path / "store")
    with pytest.raises(RuntimeError, match="broken batch"):  # noqa: PT012
        try:
            raise RuntimeError("broken batch")
        finally:
            loop.session.close()
    assert_goes_on_exactly(tmp_path / "store", expected, tier=None)


def test_a_program_that_just_ends(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    ends = {"raise RuntimeError('broken batch')": 1, "sys.exit(3)": 3, "": 0}
    running = []
    for number, end in enumerate(ends):
        program = f"""
            import sys, torch
            from pathlib import Path
            from tests.session.test_flush import trained
            torch.set_num_threads(1)
            loop = trained(Path({str(tmp_path / str(number))!r}))
            {end}
        """
        running.append(Program(["-c", textwrap.dedent(program)]))
    assert [process.wait(60) for process in running] == list(ends.values())
    for number in range(len(ends)):
        assert_goes_on_exactly(tmp_path / str(number), expected, tier=None)


def test_by_hand(tmp_path: Path, both_savers: str, expected: dict[str, torch.Tensor]) -> None:
    loop = Loop(tmp_path / "store")
    with pytest.raises(UsageError, match="before the first step"):
        loop.session.flush()
    loop.train(STEPS)
    half_an_iteration(loop)
    assert loop.session.flush()
    # In memory and queued: a process that dies here has lost nothing.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    from_thread: list[bool] = []
    thread = threading.Thread(target=lambda: from_thread.append(loop.session.flush()))
    thread.start()
    thread.join()
    assert from_thread == [True]

    def closure() -> torch.Tensor:
        assert not loop.session.flush(), "not within a step"
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        loop.optimizer.step(closure)
    loop.session.close()
    assert_goes_on_exactly(tmp_path / "store", expected, tier=None)


def test_values_that_are_not_finite_are_not_flushed(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval=100)
    loop.train(3)
    with torch.no_grad():
        loop.model.out.weight[:] = float("nan")
    assert not loop.session.flush()
    loop.session.recover("out.weight")
    assert torch.isfinite(loop.model.out.weight).all()
    assert loop.session.flush()
    loop.session.close()
