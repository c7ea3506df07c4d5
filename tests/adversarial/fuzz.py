"""Hostile bytes for everything that reads some: only scarctl's own errors come out, soon, and without much memory.

    python -m tests.adversarial.fuzz [TARGET ...] [--cases N] [--seed S] [--jobs 2]

Each job is a process, one job this one, that may take 256 MiB more than it has at the start; a case takes at most a
second. A case is made from the seed, its target's name and its number alone: `--first N --cases 1 TARGET` repeats it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from scarctl.errors import ScarError
from tests.adversarial.targets import Target, Targets

PARTS = 50
MEMORY = 256 << 20
SECONDS = 1.0
HANG = 20.0
"""Wall-clock seconds after which a case is interrupted. On a busy machine a case of SECONDS takes longer."""


class Hang(BaseException):
    """A case does not end."""


class Result(dict[str, object]):
    """Of one job: `cases` by target, `raised` by target and error, `violations`, `slowest` in seconds, `seconds`."""


def run(names: list[str], first: int, cases: int, seed: int, seconds: float, job: int, jobs: int) -> Result:
    """Run every `jobs`-th case; targets in proportion to their shares."""
    logging.disable()
    warnings.simplefilter("ignore")
    folder = Path(
        tempfile.mkdtemp(prefix="scarctl-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    )
    targets = Targets(folder)
    shares = {name: one for name, one in targets.all().items() if not names or name in names}
    whole = sum(share for share, _ in shares.values())
    done: Counter[str] = Counter()
    raised: Counter[str] = Counter()
    violations: list[str] = []
    slowest = (0.0, "")
    started = time.monotonic()
    before = signal.signal(signal.SIGALRM, _hang)
    for name, (
        _,
        target,
    ) in shares.items():  # late imports, and torch's pools, do not count as a case's memory
        _play(target, f"warm/{name}")
    limits = _limit_memory()
    try:
        for name, number, target in _in_turns(shares, range(first, first + cases), whole):
            if number % jobs == job:
                if time.monotonic() - started > seconds:
                    break
                faulthandler.dump_traceback_later(HANG + 10, exit=True)
                signal.setitimer(signal.ITIMER_REAL, HANG)
                spent = time.process_time()
                reason, error = _play(target, f"{seed}/{name}/{number}")
                spent = time.process_time() - spent
                signal.setitimer(signal.ITIMER_REAL, 0)
                done[name] += 1
                raised[f"{name}: {error}"] += 1
                slowest = max(slowest, (spent, f"{name} {number}"))
                if spent > SECONDS:
                    reason = f"{spent:.1f} s"
                if reason:
                    violations.append(f"{name}, case {number}: {reason}")
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        targets.close()
        shutil.rmtree(folder)
    return Result(
        cases=done, raised=raised, violations=violations, slowest=slowest, seconds=time.monotonic() - started
    )


def _in_turns(
    shares: dict[str, tuple[int, Target]], numbers: range, whole: int
) -> Iterator[tuple[str, int, Target]]:
    """Yield the cases of all targets in turn, so that an early end leaves some of each."""
    for part in range(PARTS):
        for name, (share, target) in shares.items():
            count = max(1, len(numbers) * share // whole)
            for number in range(count * part // PARTS, count * (part + 1) // PARTS):
                yield name, numbers.start + number, target


def _play(target, seed: str) -> tuple[str, str]:  # type: ignore[no-untyped-def]
    """Return `(why it is a violation or "", the outcome)`."""
    try:
        target(random.Random(seed))
    except ScarError as error:
        if error.kind in ("defect", "unexpected"):
            return f"{error.message}", "defect"
        return "", error.kind
    except (Exception, Hang) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return f"{type(error).__name__}: {str(error)[:200]} at {where}", type(error).__name__
    return "", "accepted"


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang(f"more than {HANG:g} s")


def _limit_memory() -> tuple[int, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    return before


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.fuzz", description=__doc__)
    parser.add_argument("target", nargs="*", help="default: all")
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each target")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end when this time is over")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    given = [
        (args.target, args.first, args.cases, args.seed, args.seconds, job, args.jobs)
        for job in range(args.jobs)
    ]
    if args.jobs == 1:
        results = [run(*given[0])]
    else:
        context = multiprocessing.get_context("spawn")  # each has its own memory, and torch's threads
        with context.Pool(args.jobs) as pool:
            results = [one.get() for one in [pool.apply_async(run, arguments) for arguments in given]]
    cases, raised = Counter[str](), Counter[str]()
    violations: list[str] = []
    for result in results:
        cases += result["cases"]
        raised += result["raised"]
        violations += result["violations"]
    seconds = max(result["seconds"] for result in results)
    slowest = max(result["slowest"] for result in results)
    if args.json:
        print(json.dumps({"cases": cases, "violations": violations}))  # noqa: T201
        return bool(violations)
    for name, count in cases.items():
        kinds = {k.partition(": ")[2]: n for k, n in raised.most_common() if k.startswith(f"{name}: ")}
        told = ", ".join(f"{kind} {n}" for kind, n in kinds.items())
        print(f"{name:26}{count:>9}  {told!a}")  # noqa: T201
    places = {}
    for line in violations:  # the first of each place
        places.setdefault((line.partition(",")[0], line.rpartition(" at ")[2]), line)
    for line in list(places.values())[:50]:
        print(f"VIOLATION {line!a}")  # noqa: T201
    print(  # noqa: T201
        f"seed {args.seed}: {cases.total():,} cases in {seconds:.0f} s, {cases.total() / seconds:,.0f} a second, "
        f"slowest {slowest[0]:.2f} s ({slowest[1]}), {len(violations)} violations"
    )
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
