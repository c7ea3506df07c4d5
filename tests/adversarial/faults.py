"""Faults at every call of the store, while a run trains and saves.

    python -m tests.adversarial.faults [--cases N] [--seed S] [--first N] [--only local|s3]

Every case is a short training run on a store that fails: on a disk at one call of one operation, or at one call in
ten of all; on S3 (moto's server behind a proxy) by wrong answers, lost ones, cut ones and none, for one request in ten
and, for a while, for all. Then the place is mended or not, and the run ends. What must hold: no exception reaches
training, no step waits for the store, no operation and no `close` takes longer than it may, and what was acknowledged
is in the store, with the bytes of its step.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scarctl
from scarctl.errors import ScarError
from scarctl.state.encodings import ENCODINGS, Encoding
from scarctl.state.version import step_of
from scarctl.store import Collector, Store, verify
from scarctl.store import store as store_module
from scarctl.store.backends.base import Blobs
from tests.adversarial.clocked import Clocked
from tests.support.faulty import OPERATIONS, OTHERS, FaultyBlobs
from tests.support.places import KEY, SECRET, s3_client, s3_server
from tests.support.proxy import Fault, Proxy, Request, proxy

ERRNOS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE)
TIMEOUT = 2.0
"""Seconds that one operation may take on S3."""
DRAIN = 1.0
"""Seconds that `close` may wait for the store, where it is not mended."""
PATIENT = 40.0
"""The same where it is mended."""
GRACE = 1.0
"""Seconds by which a deadline may be exceeded."""
STEPS = 40
ROWS = 96
ROWS_PER = {"rows": 4, "dense": 4}
"""Rows of a partition."""

KINDS: dict[str, Fault] = {
    "500": Fault((500, "InternalError")),
    "503": Fault((503, "SlowDown")),
    "429": Fault((429, "TooManyRequests")),
    "409": Fault((409, "ConditionalRequestConflict")),
    "no answer": Fault(after=4 * TIMEOUT),
    "late": Fault(after=4 * TIMEOUT, done=True),
    "reset": Fault(),
    "lost": Fault(done=True),
    "500, done": Fault((500, "InternalError"), done=True),
    "cut": Fault(cut=True),
}


@dataclass(frozen=True)
class Case:
    """Everything that determines a case, except for the speed of the machine."""

    number: int
    place: str
    what: str
    operation: str = "*"
    call: int = 0
    rate: float = 0.1
    mended: bool = True
    outage: bool = False
    """For some steps every request fails."""
    daemon: bool = False
    encoding: Encoding = "exact"


class Violated(Exception):
    """A condition that must hold did not hold."""


def draw(seed: int, number: int, only: str | None = None) -> Case:
    """Draw case `number` of a seed."""
    rng = random.Random(f"{seed}/{number}")
    place = only or ("s3" if rng.random() < 0.2 else "local")
    if place == "s3":
        what = rng.choice([*KINDS, "mixed"])
        return Case(
            number,
            place,
            what,
            mended=rng.random() < 0.6,
            outage=rng.random() < 0.4,
            daemon=rng.random() < 0.15,
        )
    number_of = rng.choice(ERRNOS)
    what = errno.errorcode[number_of]
    encoding = ENCODINGS[:2][number % 2]
    if rng.random() < 0.2:
        case = Case(number, place, rng.choice([what, "mixed"]), mended=rng.random() < 0.5)
    else:
        operation, call = rng.choice([*OPERATIONS, *OTHERS]), rng.choice([1, 2, 3, 5, 8, 13, 21, 34])
        case = Case(number, place, what, operation, call)
    return replace(case, encoding=encoding)


# -- a run -------------------------------------------------------------------------------------------------------


class Run:
    """A state whose rows show at which step they were changed, with its values at every step."""

    def __init__(self, case: Case, seed: int) -> None:
        self.rng = np.random.default_rng([seed, case.number])
        self.state = {"rows": np.zeros((ROWS, 8), np.int64), "dense": np.zeros((24, 32), np.float32)}
        self.history: list[dict[str, np.ndarray[Any, Any]]] = [{}]
        self.longest = 0.0

    def train(self, session: scarctl.Session, steps: int) -> None:
        for _ in range(steps):
            step = len(self.history)
            changed = self.rng.choice(ROWS, 12, replace=False)
            self.state["rows"][changed] = step
            self.state["dense"][self.rng.integers(24)] += 1
            self.history.append({name: array.copy() for name, array in self.state.items()})
            started = time.monotonic()
            session.step()
            if self.rng.random() < 0.1:
                session.checkpoint(full=bool(self.rng.random() < 0.5))
            self.longest = max(self.longest, time.monotonic() - started)
            time.sleep(0.004)
            if step % 8 == 0 and session._engine is not None:
                session._engine.saver.drain(0.2)  # so that something is saved on a busy machine, too

    def check(self, store: Store, durable: np.ndarray[Any, Any] | None) -> int:
        """Check that the store holds what it reports, and all acknowledged copies. Return the partitions compared."""
        report = verify(store, read_data=True)
        if not report.intact:
            raise Violated(f"verify: {report.problems[:3]}")
        layout = store.current_layout()
        if layout is None:
            if durable is not None and (durable >= 0).any():
                raise Violated("acknowledged copies are in no store")
            return 0
        compared = 0
        for state in store.states(store.shards()).values():
            if durable is not None:
                lost = step_of(state.version) < step_of(durable[state.ids])
                if lost.any():
                    raise Violated(f"acknowledged, and not there: {layout.name(int(state.ids[lost][0]))}")
            corrupt: list[Any] = []
            for batch in store.read(state, state.ids[state.saved], corrupt=corrupt):
                group = layout.groups[batch.group]
                starts, stops = layout.row_ranges(batch.ids)
                at = 0
                steps = step_of(state.version[state.find(batch.ids)])
                for i, start, stop, step in zip(batch.ids, starts, stops, steps, strict=True):
                    rows = batch.tensors[0][at : at + stop - start]
                    at += int(stop - start)
                    if rows.tobytes() != self.history[int(step)][group.name][start:stop].tobytes():
                        raise Violated(f"{layout.name(int(i))} is not as it was at step {step}")
                    compared += 1
            if corrupt:
                raise Violated(f"cannot be read: {corrupt[0][1]}")
        return compared


@dataclass
class Outcome:
    """Sums over all cases."""

    counts: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    """Longest seconds of the S3 cases, by operation."""
    calls: Counter[str] = field(default_factory=Counter)

    def saw(self, name: str, seconds: float) -> None:
        self.worst[name] = max(self.worst.get(name, 0.0), seconds)


class Attack:
    """The places of cases: a folder, and an S3 server behind a proxy if one is needed."""

    def __init__(self, seed: int, folder: Path, stack: ExitStack, wire: Proxy | None = None) -> None:
        self.seed = seed
        self.folder = folder
        self.outcome = Outcome()
        self._stack = stack
        self._wire = wire
        self._clients: list[Any] = []

    def play(self, case: Case) -> None:
        """Play one case. Raises Violated."""
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            place = self.folder / str(case.number)
            (place / "arena").mkdir(parents=True)
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            patch.setenv("SCARCTL_ARENA_DIR", str(place / "arena"))
            assert Collector.__init__.__kwdefaults__ is not None
            patch.setitem(
                Collector.__init__.__kwdefaults__, "floor", 0
            )  # otherwise so small a store would never be collected
            (self._s3 if case.place == "s3" else self._local)(case, place, patch)
        self.outcome.counts["cases"] += 1
        self.outcome.counts[f"cases, {case.place}"] += 1

    def _local(self, case: Case, place: Path, patch: pytest.MonkeyPatch) -> None:
        made: list[FaultyBlobs] = []

        def faulty(address: Any) -> Blobs:
            made.append(FaultyBlobs(original(address)))
            return made[-1]  # type: ignore[return-value]

        original = store_module.blobs_at
        patch.setattr(store_module, "blobs_at", faulty)
        run = Run(case, self.seed)
        session = self._session(run, str(place / "store"), None, case)
        run.train(session, 6)
        run.longest = 0.0  # the first step makes the store
        (blobs,) = made
        if case.operation == "*":
            numbers = ERRNOS if case.what == "mixed" else (getattr(errno, case.what),)
            blobs.decay(random.Random(case.number), case.rate, numbers)
        else:
            blobs.fail(case.operation, getattr(errno, case.what), at=[case.call])
        run.train(session, STEPS)
        before = blobs.raised
        if case.mended:
            blobs.mend()
        durable = self._end(case, run, session)
        blobs.mend()
        patch.setattr(store_module, "blobs_at", original)
        self.outcome.counts["operations"] += sum(blobs.calls.values())
        self.outcome.counts["faults"] += max(blobs.raised, before)
        if case.operation != "*" and not blobs.raised:
            self.outcome.counts["not reached"] += 1
        self._after(case, run, str(place / "store"), None, durable)

    def _s3(self, case: Case, place: Path, patch: pytest.MonkeyPatch) -> None:
        wire = self._server()
        wire.reset()
        bucket = f"bucket-{uuid.uuid4().hex}"
        s3_client(wire.target).create_bucket(Bucket=bucket)
        url, options = f"s3://{bucket}/run", {"endpoint_url": wire.url, "key": KEY, "secret": SECRET}
        made: list[Clocked] = []

        def clocked(address: Any) -> Blobs:
            made.append(Clocked(original(address)))
            return made[-1]  # type: ignore[return-value]

        original = store_module.blobs_at
        patch.setattr(store_module, "blobs_at", clocked)
        run = Run(case, self.seed)
        session = self._session(run, url, {**options, "scarctl_timeout": TIMEOUT}, case)
        self._clients += [blobs.inner._fs for blobs in made]
        run.train(session, 6)
        if case.outage and session._engine is not None:
            session._engine.saver.drain(PATIENT)  # on a busy machine nothing else may get into the store
        run.longest = 0.0
        rng, lock, faults = random.Random(case.number), threading.Lock(), [0]
        kinds = list(KINDS.values()) if case.what == "mixed" else [KINDS[case.what]]

        def rule(rate: float) -> Callable[[Request], Fault | None]:
            def decide(_: Request) -> Fault | None:
                with lock:
                    found = rng.choice(kinds) if rng.random() < rate else None
                    faults[0] += found is not None
                    return found

            return decide

        wire.rule = rule(case.rate)
        run.train(session, STEPS // 2)
        if case.outage:
            wire.rule = rule(1.0)
            run.train(session, STEPS // 4)
            time.sleep(TIMEOUT)
            wire.rule = rule(case.rate)
        run.train(session, STEPS // 2)
        if case.mended:
            wire.rule = lambda request: None
        elif case.outage:
            wire.rule = rule(1.0)
        durable = self._end(case, run, session)
        wire.rule = lambda request: None
        for blobs in made:
            self.outcome.calls.update(blobs.calls)
            for name, seconds in blobs.worst.items():
                self.outcome.saw(name, seconds)
        self.outcome.counts["operations"] += sum(sum(blobs.calls.values()) for blobs in made)
        self.outcome.counts["requests"] += len(wire.seen)
        self.outcome.counts["faults"] += faults[0]
        late = {name: s for blobs in made for name, s in blobs.worst.items() if s > TIMEOUT + GRACE + _busy()}
        if late:
            raise Violated(f"operations that took longer than {TIMEOUT} s: {late}")
        patch.setattr(store_module, "blobs_at", original)
        if not case.daemon:  # a daemon may still be writing pending copies
            self._after(case, run, url, options, durable)

    def _session(self, run: Run, url: str, options: Any, case: Case) -> scarctl.Session:
        session = scarctl.attach(
            run.state,
            store=url,
            partitioning=scarctl.Partitioning(shards=2, rows=ROWS_PER),
            selection=scarctl.Selection(encoding=case.encoding),
            interval=2,
            fraction=0.25,
            settings=scarctl.Settings(
                daemon=case.daemon, timeout=PATIENT if case.mended else DRAIN, storage_options=options
            ),
        )
        # The steps after the one from which it continues never happened.
        del run.history[session.resume().step + 1 :]
        return session

    def _end(self, case: Case, run: Run, session: scarctl.Session) -> np.ndarray[Any, Any] | None:
        """End the session; return the steps that it reported as durable."""
        acknowledged: int | None = None
        if case.mended:
            try:
                session.checkpoint(full=True, wait=True)
                acknowledged = len(run.history) - 1
            except ScarError as error:
                # A disk that cannot be written to, or a permanent fault, has stopped saving.
                self.outcome.counts[f"gave up: {error.kind}"] += 1
        engine = session._engine
        durable = None if engine is None else engine.arena.durable.copy()
        started = time.monotonic()
        session.close()
        seconds = time.monotonic() - started
        if not case.mended:
            self.outcome.saw("close", seconds)
        if run.longest > 0.5 + _busy():
            raise Violated(f"a step took {run.longest:.2f} s")
        self.outcome.saw("step", run.longest)
        if not case.mended and seconds > DRAIN + GRACE + _busy():
            raise Violated(f"close took {seconds:.2f} s, timeout is {DRAIN} s")
        if acknowledged is not None and durable is not None and (step_of(durable) < 0).any():
            raise Violated(f"step {acknowledged} was acknowledged, and partitions are not durable")
        self.outcome.counts["acknowledged"] += acknowledged is not None
        return durable

    def _after(self, case: Case, run: Run, url: str, options: Any, durable: Any) -> None:
        store = Store.open(url, storage_options=options)
        self.outcome.counts["partitions compared"] += run.check(store, durable)
        # The next session continues with all of it.
        again = Run(case, self.seed)
        again.history = [*run.history]
        session = self._session(again, url, options, replace(case, daemon=False, mended=True))
        again.train(session, 2)
        session.close()
        self.outcome.counts["partitions compared"] += again.check(
            Store.open(url, storage_options=options), None
        )

    def _server(self) -> Proxy:
        if self._wire is None:
            self._wire = self._stack.enter_context(proxy(self._stack.enter_context(s3_server())))
        return self._wire


def _busy() -> float:
    """Return by how many seconds everything may take longer because the machine is shared."""
    return 0.5 * max(0.0, os.getloadavg()[0] / (os.cpu_count() or 1) - 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.faults", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="begin with this case")
    parser.add_argument("--only", choices=["local", "s3"])
    args = parser.parse_args()
    for name in [name for name in os.environ if name.startswith(("SCARCTL_", "AWS_"))]:
        del os.environ[name]
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    failed = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scarctl-faults-")))
        attack = Attack(args.seed, folder, stack)
        for number in range(args.first, args.first + args.cases):
            case = draw(args.seed, number, args.only)
            try:
                attack.play(case)
            except (Violated, ScarError, OSError, AssertionError) as error:
                failed += 1
                print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        outcome = attack.outcome
    worst = {name: round(seconds, 2) for name, seconds in sorted(outcome.worst.items())}
    print(json.dumps({**outcome.counts, "violations": failed, "worst seconds": worst}, indent=1))  # noqa: T201
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
