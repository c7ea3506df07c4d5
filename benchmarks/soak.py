"""Train for long, and test whether the memory of training and daemon stays flat, and whether descriptors leak.

python benchmarks/soak.py [--minutes 30] [--step 0.1] [--folder DIR]

A training process takes a step every `--step` seconds, with a checkpoint after each, saved by the daemon. Every few
seconds this script reads from /proc, for both processes: private memory (RssAnon), shared memory (RssShmem and RssFile:
mostly the arena), open descriptors, threads. The first fifth of the time is for warming up.

One line per figure: at the end of the warming up, at the end, the slope of a straight line through what is between
them, per hour. Private memory is flat when the slope over the rest of the time is below 1 % or 1 MB, whichever is more;
descriptors and threads when on average the rest of the time has not one more than the warming up.
Exit status 1 when something is not flat.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from timing import arenas, parser, print_table, scratch
from torch import nn

import scarctl
from scarctl.arena.folder import arena_folder
from scarctl.daemon.client import ask
from scarctl.errors import Unavailable

STATE_ROWS = 4096  # of 64 values, three times: 3 MB
FIGURES = ("private, MB", "shared, MB", "descriptors", "threads")


def train(folder: Path, arena_dir: str, step: float) -> None:
    """Train until SIGTERM."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    torch.manual_seed(0)
    model = nn.Embedding(STATE_ROWS, 64)
    optimizer = torch.optim.Adam(model.parameters())
    session = scarctl.attach(
        model,
        optimizer,
        store=folder / "store",
        settings=scarctl.Settings(arena_dir=arena_dir, on_error="raise"),
        interval=1,
        partitioning=scarctl.Partitioning(shards=4),
    )
    while not ended:
        model(torch.randint(0, STATE_ROWS, (256,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        time.sleep(step)
    session.close()


def figures(pid: int) -> list[float]:
    """Return the four figures of a process."""
    status = dict(re.findall(r"(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text()))
    shared = int(status["RssShmem"]) + int(status["RssFile"])
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return [int(status["RssAnon"]) / 1024, shared / 1024, descriptors, int(status["Threads"])]


def daemon_of(folder: Path) -> int:
    """Process number of the daemon that has a run, 0 if it does not run."""
    try:
        status = ask(folder, "status")
    except Unavailable:
        return 0
    return int(status["pid"]) if status["runs"] else 0


def flat(name: str, times: np.ndarray, values: np.ndarray, warm: np.ndarray) -> tuple[bool, float]:
    """Return whether a figure is flat after the warming up, and its growth per hour."""
    slope = float(np.polyfit(times[~warm], values[~warm], 1)[0])
    if name == "private, MB":
        growth = slope * (times[-1] - times[~warm][0])
        return growth < max(1.0, 0.01 * values[~warm][0]), slope * 3600
    if name == "shared, MB":
        return True, slope * 3600  # what the process has touched of the arena and its libraries
    return values[~warm].mean() < values[warm].mean() + 1, slope * 3600


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument("--step", type=float, default=0.1, help="seconds of a training step")
    args = options.parse_args()
    os.environ["SCARCTL_DAEMON"] = "1"
    samples: list[list[float]] = []
    times: list[float] = []
    with scratch(args.folder) as folder, arenas(folder) as arena_dir:
        trainer = os.fork()
        if trainer == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                train(folder, arena_dir, args.step)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        started = time.monotonic()
        base = arena_folder(arena_dir, "x").parent
        while (daemon := daemon_of(base)) == 0 and time.monotonic() - started < 60:
            time.sleep(0.1)
        while time.monotonic() - started < 60 * args.minutes:
            samples.append([*figures(trainer), *figures(daemon)])
            times.append(time.monotonic() - started)
            time.sleep(min(5.0, args.minutes))
        again = daemon_of(base)
        os.kill(trainer, signal.SIGTERM)
        _, ended = os.waitpid(trainer, 0)
        records = len(list((folder / "store/lanes/0/log").glob("*/*")))
    assert again == daemon, "the daemon was replaced"
    assert ended == 0, f"the trainer ended with {ended}"
    at, table = np.array(times), np.array(samples)
    warm = at < at[0] + (at[-1] - at[0]) / 5
    rows, good = [], True
    for column in range(2 * len(FIGURES)):
        name = FIGURES[column % len(FIGURES)]
        values = table[:, column]
        fine, slope = flat(name, at, values, warm)
        good &= fine
        rows.append(
            (
                f"{'trainer' if column < len(FIGURES) else 'daemon'}: {name}",
                f"{values[~warm][0]:.1f}",
                f"{values[-1]:.1f}",
                f"{values.max():.1f}",
                f"{slope:+.2f}",
                "flat" if fine else "GROWS",
            )
        )
    print(f"{(at[-1] - at[0]) / 60:.0f} minutes, {records} records of shard 0")
    print_table(("figure", "warm", "end", "highest", "per hour", ""), rows)
    return not good


if __name__ == "__main__":
    sys.exit(main())
