"""Measure the start of the host's daemon, and its memory without an arena.

python benchmarks/daemon.py [--rounds 11] [--folder DIR]

start     from nothing until it has answered its first question, as the first session on a host waits for it (aim:
          under 300 ms)
again     the same after kill -9 of the one before
session   from kill -9 of the daemon until another one serves the session that lives (aim: under 1 s)
memory    resident and private memory after that (aim: resident under 80 MB), and threads

Byte code is cached, as it is after a package's first use, whatever PYTHONDONTWRITEBYTECODE says: in a temporary folder.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from pathlib import Path

from timing import parser, print_table, scratch, spread

from scarctl.daemon.client import ask, connect, request
from scarctl.daemon.saver import DaemonSaver
from scarctl.errors import Unavailable
from scarctl.store import Store


def started(folder: Path) -> tuple[float, int]:
    """Start a daemon; returns the seconds until its first answer, and its process id."""
    before = time.perf_counter()
    with connect(folder) as connection:
        pid = int(request(connection, "status")["pid"])
    return time.perf_counter() - before, pid


def stopped(folder: Path) -> None:
    """Stop the daemon and wait until it is gone."""
    ask(folder, "stop")
    while True:
        try:
            ask(folder, "status")
        except Unavailable:
            return
        time.sleep(0.01)


def taken_over(folder: Path, store: Store) -> float:
    """Kill the daemon under a session; returns the seconds until another one serves it."""
    saver = DaemonSaver(str(store.root), store.run_id, folder, lambda full: None)
    saver.claim()
    pid = int(ask(folder, "status")["pid"])
    before = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    while True:
        try:
            told = ask(folder, "status")
            if told["pid"] != pid and told["runs"]:
                break
        except Unavailable:
            pass
        time.sleep(0.001)
    seconds = time.perf_counter() - before
    saver.close()
    return seconds


def memory(pid: int) -> dict[str, float]:
    """Return MB (10**6 bytes) and threads of a process; {} without /proc."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text() + Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return {}
    found = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", text, re.MULTILINE)}
    private = found["Private_Clean"] + found["Private_Dirty"]
    return {
        "resident": found["Rss"] * 1024 / 1e6,
        "private": private * 1024 / 1e6,
        "threads": found["Threads"],
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=11)
    args = options.parse_args()
    cold: list[float] = []
    again: list[float] = []
    served: list[float] = []
    sizes: list[dict[str, float]] = []
    with scratch(args.folder) as base:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(base / "bytecode")
        folder = base / f"scarctl-{os.getuid()}"
        store = Store.create(base / "store")
        for number in range(args.rounds + 1):
            seconds, pid = started(folder)
            os.kill(pid, signal.SIGKILL)
            while Path(f"/proc/{pid}").exists():
                time.sleep(0.001)
            seconds_again, pid = started(folder)
            size = memory(pid)
            seconds_served = taken_over(folder, store)
            if number:  # the first round warms up
                cold.append(seconds)
                again.append(seconds_again)
                sizes.append(size)
                served.append(seconds_served)
            stopped(folder)
    rows = [
        ("start", spread(cold, 1e-3, 0), "ms (range)"),
        ("start after kill -9", spread(again, 1e-3, 0), "ms (range)"),
        ("session served again", spread(served, 1e-3, 0), "ms (range)"),
    ]
    for name in sizes[0]:
        unit = "" if name == "threads" else "MB"
        rows.append((name, f"{statistics.median(size[name] for size in sizes):.0f}", unit))
    print_table(("daemon", "median", ""), rows)


if __name__ == "__main__":
    main()
