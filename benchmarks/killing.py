"""Start, kill and restart the jobs of `killed.py`, and reckon with what they leave: for `kills.py` and `ettr.py`."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import mmap
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from timing import parser, scratch

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"
OVERHEAD = 0.01
"""Share of the training time that saving may take: the default of a session, given to the other ways too."""


class Board:
    """Numbers in a mapped file: what a killed process wrote last is still there.

    Times are those of `time.monotonic`, which all processes of a host share.
    """

    FIELDS = (
        "head",  # iterations finished
        "ready",  # when the newest start had its state back
        "resumed",  # the iteration at which it continues
        "whole",  # 1: all of its state is of that iteration
        "loss",  # on the evaluation batch, right after the resume
        "saves",  # checkpoints that were begun
        "stall",  # seconds in which they kept training waiting
        "stop",  # set by the parent: end after this iteration
        "end step",
        "end loss",
        "ended",
        "losses",  # how many follow in the list
    )
    STEPS, LOSSES = 1 << 20, 1 << 16
    _HEAD = 64

    def __init__(self, path: Path) -> None:
        size = 8 * (self._HEAD + self.STEPS + 2 * self.LOSSES)
        with open(path, "ab") as file:
            file.truncate(size)
        with open(path, "r+b") as file:
            self._values = memoryview(mmap.mmap(file.fileno(), size)).cast("d")

    def __getitem__(self, name: str) -> float:
        return float(self._values[self.FIELDS.index(name)])

    def __setitem__(self, name: str, value: float) -> None:
        self._values[self.FIELDS.index(name)] = value

    def step(self, number: int) -> None:
        """Note that iteration `number` has just ended."""
        self._values[self._HEAD + number % self.STEPS] = time.monotonic()
        self["head"] = number

    def time_of(self, number: int) -> float:
        """Return when iteration `number` ended last, 0 if it never did."""
        return float(self._values[self._HEAD + number % self.STEPS])

    def evaluated(self, step: int, loss: float) -> None:
        """Note the loss on the evaluation batch after that iteration."""
        count = int(self["losses"])
        if count < self.LOSSES:
            place = self._HEAD + self.STEPS + 2 * count
            self._values[place], self._values[place + 1] = step, loss
            self["losses"] = count + 1

    def curve(self) -> list[tuple[float, float]]:
        """Return all iterations and losses that were noted."""
        first = self._HEAD + self.STEPS
        found = self._values[first : first + 2 * int(self["losses"])].tolist()
        return list(zip(found[::2], found[1::2], strict=True))


class Job:
    """One or several processes of `killed.py` that start and end together."""

    def __init__(self, place: Path, arenas: str, options: Sequence[str], ranks: int = 1) -> None:
        self.board = Board(place / "board")
        self.ranks = ranks
        self._command = [sys.executable, str(HERE / "killed.py"), "--place", str(place), *options]
        self._environment = {
            **os.environ,
            "SCARCTL_ARENA_DIR": arenas,
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        # An installed package has its byte code; a checkout has it after the first start.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._log = place / "log"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str) -> None:
        """Start all processes."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with open(self._log, "ab") as log:
            for rank in range(self.ranks):
                ranked = {"RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(rank)}
                ranked |= {"LOCAL_WORLD_SIZE": str(self.ranks)}
                ranked |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                self._processes.append(
                    subprocess.Popen(
                        [*self._command, *options],
                        env=self._environment | (ranked if self.ranks > 1 else {}),
                        stdout=log,
                        stderr=log,
                    )
                )

    def kill(self, victim: int | None = None) -> float:
        """End one process, or all, by SIGKILL; then, as a launcher does, the others by SIGTERM. Return when."""
        chosen = self._processes if victim is None else [self._processes[victim]]
        at = time.monotonic()
        for process in chosen:
            process.kill()
        self.end()
        return at

    def end(self, grace: float = 30.0) -> None:
        """End what still runs by SIGTERM, and after `grace` seconds by SIGKILL."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + grace
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def failed(self) -> bool:
        """Return whether a process has ended without being killed here."""
        return any(process.poll() is not None for process in self._processes)

    def wait(self, found: Callable[[], bool], timeout: float = 300.0) -> None:
        """Wait until `found` returns True. Raises with the job's output if the job ends before."""
        end = time.monotonic() + timeout
        while not found():
            if self.failed() and not found():
                raise RuntimeError(f"the job ended: {self.said()}")
            if time.monotonic() > end:
                raise TimeoutError(f"nothing after {timeout} s: {self.said()}")
            time.sleep(0.002)

    def said(self) -> str:
        """Return the end of what the processes have printed."""
        return self._log.read_text(errors="replace")[-3000:]


@contextmanager
def isolated(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield a temporary folder, and one for arenas. At the end what still works there is killed, and both are gone."""
    base = Path("/dev/shm")
    with scratch(folder) as place, scratch(base if base.is_dir() else folder) as arenas:
        try:
            yield place, str(arenas)
        finally:
            _end_all_of(str(arenas))


def _end_all_of(arenas: str) -> None:
    """Kill processes that a job in this folder for arenas has left, such as its daemon."""
    mark = f"SCARCTL_ARENA_DIR={arenas}".encode()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


class Results:
    """Measurements in a file of JSON lines: what is there is not measured again."""

    def __init__(self, path: Path, again: bool) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if again:
            path.unlink(missing_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self._found: dict[str, dict[str, Any]] = {}
        self._used: list[dict[str, Any]] = []
        for line in lines:
            with suppress(ValueError):  # the last line of a run that was killed
                row = json.loads(line)
                self._found[json.dumps(row["key"], sort_keys=True)] = row

    def get(self, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the row of this key, measured unless the file has it."""
        name = json.dumps(key, sort_keys=True)
        if name not in self._found:
            row = {"key": key, **measure(), "load": os.getloadavg()[0]}
            row["time"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")
            self._found[name] = row
            if key.get("way") is not None:
                print(
                    "  ".join(f"{k} {_short(v)}" for k, v in {**key, **row}.items() if _plain(k, v)),
                    flush=True,
                )
        self._used.append(self._found[name])
        return self._found[name]

    def load(self) -> str:
        """Return the range of the load averages at the ends of all measurements."""
        loads = [row["load"] for row in self._used]
        return f"{min(loads):.1f} to {max(loads):.1f}"


def _plain(name: str, value: object) -> bool:
    return (
        name not in ("key", "version", "time", "seconds")
        and isinstance(value, (str, int, float))
        and value != ""
    )


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:160]


def version(product: bool = True) -> str:
    """Return a name for the sources of the jobs, and of scarctl: results of other sources do not count."""
    made = hashlib.sha256()
    folders = [HERE.parent / name for name in ("scarctl", "adapters")] if product else []
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    for path in sorted([HERE / "killed.py", *sources]):
        made.update(path.read_bytes())
    return made.hexdigest()[:12]


def options(doc: str | None, results: str) -> argparse.ArgumentParser:
    """Return a parser with the options that both benchmarks have. From then on SIGTERM ends what was started, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    made = parser(doc)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--threads", type=int, default=1, help="of torch in each process")
    made.add_argument(
        "--results", type=Path, default=BUILD / results, help="JSON lines (default: %(default)s)"
    )
    made.add_argument("--again", action="store_true", help="measure again what the results have")
    made.add_argument(
        "--version", default=version(), help="of the results that count (default: of the sources)"
    )
    return made


def resampled(values: Sequence[float], seed: int = 0, count: int = 4000) -> tuple[float, float]:
    """Return a 95 % interval of the mean by bootstrap."""
    draw = random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(count))
    return means[round(0.025 * count)], means[round(0.975 * count) - 1]


STUDENT = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
    2.12,
    2.11,
    2.10,
)
"""Quantiles of 97.5 %, from one degree of freedom on."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % interval of the mean by Student's t: a bootstrap of so few values is too narrow."""
    if len(values) < 2:
        return -math.inf, math.inf
    of = STUDENT[len(values) - 2] if len(values) - 2 < len(STUDENT) else 2.0
    middle, half = statistics.fmean(values), of * statistics.stdev(values) / math.sqrt(len(values))
    return middle - half, middle + half


def worth(curve: Sequence[tuple[float, float]], loss: float) -> float:
    """Return how many iterations the undisturbed run of this curve needs to reach a loss.

    A curve that is not monotonous reaches it several times: the middle between the first and the last time counts.
    """
    crossings = [
        step + (after - step) * (high - loss) / (high - low)
        for (step, high), (after, low) in itertools.pairwise(curve)
        if high >= loss > low
    ]
    if crossings:
        return (crossings[0] + crossings[-1]) / 2
    return curve[0][0] if loss >= curve[0][1] else curve[-1][0]


def daly(every: float, stall: float, back: float, mtbf: float) -> float:
    """Return the effective training time by Daly, of checkpoints `every` seconds of training apart that stall each.

    Failures come at random, also during restarts, which take `back` seconds.
    """
    if not every:
        return math.exp(-back / mtbf)
    return every / (mtbf * math.exp(back / mtbf) * math.expm1((every + stall) / mtbf))


def best_interval(stall: float, back: float, mtbf: float) -> float:
    """Return the seconds between checkpoints that are best by `daly`: Young's square root is near it."""
    young = math.sqrt(2 * stall * mtbf)
    return max(
        (young * k / 50 for k in range(5, 151)), key=lambda every: daly(every, stall, back, mtbf), default=0.0
    )


def remove(path: Path) -> None:
    """Remove a folder that may be gone."""
    shutil.rmtree(path, ignore_errors=True)
