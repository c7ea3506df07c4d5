"""Lose a host with its memory while the store is too slow for whole saves, and measure what that costs. `make demo`.

The same training runs three times at once, with the same batches, on simulated hosts: each is a process with a folder
of its own as its memory. In each run one host's process is killed with SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("forkserver")
if __name__ == "__main__":  # its imports take as long as those of this process, next to them
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    FORK.set_forkserver_preload(["torch._dynamo", "scarctl.session.session", "scarctl_adapters.torch"])
    forkserver.ensure_running()

import train  # noqa: E402

import scarctl  # noqa: E402

HOSTS, LOST = 3, 1
STEP = 0.05
"""Least seconds of an iteration, as if it were a larger one: so all runs keep the same pace on two cores."""
FULL_EVERY, KILL_AT, ITERATIONS = 120, 300, 420
"""The kill is half way between two full checkpoints: so they have their average age."""
BY_HAND = 1 << 30
WIDTH, HEIGHT = 78, 15


@dataclass
class Run:
    """One training on simulated hosts."""

    name: str
    mark: str
    colour: str
    memory_lost: bool
    options: dict[str, Any]
    """Of `train.train`."""
    folder: Path = Path()
    hosts: list[Any] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """What its hosts have logged."""

    def play(self, pairs: train.Pairs, kill_at: int, iterations: int) -> None:
        """Train, kill a host, start all again as a cluster would, and train to the end."""
        self._start(0, pairs, iterations)
        while not any(event["step"] >= kill_at for event in self._log()) and self.hosts[0].is_alive():
            time.sleep(STEP / 5)
        self.hosts[LOST].kill()  # by SIGKILL
        if self.memory_lost:
            shutil.rmtree(self.folder / "memory" / str(LOST))
        for one in self.hosts:
            one.terminate()
            one.join()
        self._start(1, pairs, iterations)
        for one in self.hosts:
            one.join()
        if any(one.exitcode for one in self.hosts):
            raise SystemExit(f"{self.name} failed:\n{(self.folder / 'stderr').read_text()[-3000:]}")
        self.events = self._log()

    def _start(self, attempt: int, pairs: train.Pairs, iterations: int) -> None:
        arguments = [(self.folder, rank, attempt, pairs, iterations, self.options) for rank in range(HOSTS)]
        self.hosts = [FORK.Process(target=host, args=one) for one in arguments]
        for one in self.hosts:
            one.start()

    def _log(self) -> list[dict[str, Any]]:
        log = self.folder / "log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def losses(self, attempt: int) -> list[tuple[float, int, float]]:
        """Return (seconds since the first one, iteration, loss) of the first start (0) or the second (1)."""
        found = [event for event in self.events if event["loss"] is not None]
        return [(e["at"] - found[0]["at"], e["step"], e["loss"]) for e in found if e["attempt"] == attempt]

    def resumed(self) -> dict[str, Any]:
        """Return what the lost host has resumed."""
        found = (e for e in self.events if e["attempt"] and e["rank"] == LOST and e["loss"] is None)
        return next(found)


def host(folder: Path, rank: int, attempt: int, pairs: train.Pairs, iterations: int, options: Any) -> None:
    """Be one host: join the others, and train."""
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    logging.basicConfig(level="INFO")
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(step: int, what: float | scarctl.Resumed) -> None:
        event = {"at": time.time(), "attempt": attempt, "rank": rank, "step": step, "loss": None}
        if isinstance(what, scarctl.Resumed):
            event["shards"] = [] if what.report is None else what.report.to_json()["shards"]
        elif rank:
            return  # all hosts measure the same loss
        else:
            event["loss"] = what
        os.write(log, f"{json.dumps(event)}\n".encode())

    meeting = f"file://{folder}/meeting-{attempt}"
    train.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=HOSTS)
    memory = folder / "memory" / str(rank)
    memory.mkdir(parents=True, exist_ok=True)
    settings = scarctl.Settings(arena_dir=memory, daemon=False, **options["settings"])
    options = {**options, "store": folder / "store", "settings": settings}
    train.train(pairs, iterations, say, rank=rank, ranks=HOSTS, seconds=STEP, **options)


def main() -> None:
    """Play all runs at once, and show what the failure has cost in each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with movielens-small (default: words)")
    parser.add_argument("--picture", type=Path, default=Path("build/demo.svg"))
    parser.add_argument("--quick", action="store_true", help="a sixth of the iterations")
    arguments = parser.parse_args()
    part = 6 if arguments.quick else 1
    full_every, kill_at, iterations = (count // part for count in (FULL_EVERY, KILL_AT, ITERATIONS))
    began, pairs = time.monotonic(), train.load(arguments.data)
    state = sum(one.numel() * one.element_size() for one in train.Model(pairs.names).parameters())
    whole = full_every * STEP  # seconds of a whole save
    slow = {"max_bandwidth": state / whole / HOSTS, "max_lag": whole / 6, "overhead": 0.05}
    full = {"interval": BY_HAND, "full_every": full_every, "settings": {}}
    runs = [
        Run("scarctl", "#", "#0a7d3c", True, {"mode": "partial", "settings": slow}),
        Run("full checkpoints", "o", "#c2410c", True, {"mode": "rollback", **full}),
        Run("kill -9 only", ".", "#1d4ed8", False, {"mode": "partial", "settings": slow}),
    ]
    print(
        f"""{HOSTS} hosts train together, each with 1/{HOSTS} of a model of {state / 1e6:.1f} MB.
{pairs}.
The store is throttled to {state / whole / 1e6:.2f} MB/s: a whole save takes all of that for {whole:g} s.
Time is scaled down to fit: scarctl sends parts if a whole save takes more than {slow["max_lag"]:g} s (default: 30),
and may use 5 % of the time to copy into memory (default: 1).

After iteration {kill_at} host {LOST + 1} gets kill -9, in three runs with the same batches:
  #  scarctl: its memory is lost, too. Its part comes back from the store, the others keep theirs
  o  full checkpoints, one every {whole:g} s: the same host is lost, and all go back to the newest one
  .  scarctl, and the commoner case: the process is killed, its host's memory is alive
""",
        flush=True,
    )
    memory = Path("/dev/shm")
    shared = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="scarctl-demo-")
    with shared as folder, ThreadPoolExecutor(len(runs)) as pool:
        for number, run in enumerate(runs):
            run.folder = Path(folder, str(number))
            run.folder.mkdir()
        list(pool.map(lambda run: run.play(pairs, kill_at, iterations), runs))
    print(f"{curves(runs)}\n\n{costs(runs)}")
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    arguments.picture.write_text(svg(runs))
    print(f"\nThe picture: {arguments.picture.resolve()}. It took {time.monotonic() - began:.0f} s.")


def costs(runs: list[Run]) -> str:
    """Return a table of what the failure has cost each run, and where the lost part came from."""
    lines = ["                    loss before  after  goes on after  trained again until it is as low"]
    for run in runs:
        (at, done, before), after = run.losses(0)[-1], run.losses(1)
        found = run.resumed()
        again = next((step - found["step"] for _, step, loss in after if loss <= before), None)
        cost = (
            "more than this run has" if again is None else f"{again} iterations ({again * at / done:.1f} s)"
        )
        lines.append(
            f"{run.mark} {run.name:<18}{before:>11.3f}{after[0][2]:>7.3f}{found['step']:>15}  {cost}"
        )
    for run in runs:
        at, done, _ = run.losses(0)[-1]
        for shard in run.resumed()["shards"]:
            new, old = ((done - shard[key]) * at / done for key in ("newest_step", "oldest_step"))
            source = ", ".join(f"{count} partitions from {tier}" for tier, count in shard["tiers"].items())
            lines.append(
                f"{run.mark} host {LOST + 1} got back {source}: {max(0, new):.1f} to {max(0, old):.1f} s old"
            )
    return "\n".join(lines)


def points(runs: list[Run], width: float, height: float) -> list[list[tuple[float, float]]]:
    """Return each run's losses over time, as points of a picture of this size, from its upper left corner."""
    curves = [[(at, loss) for start in (0, 1) for at, _, loss in run.losses(start)] for run in runs]
    end = max(at for curve in curves for at, _ in curve)
    losses = [loss for curve in curves for _, loss in curve]
    low, high = min(losses), max(losses)
    return [
        [(at / end * width, (high - loss) / (high - low) * height) for at, loss in curve] for curve in curves
    ]


def curves(runs: list[Run]) -> str:
    """Return the loss curves as text."""
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for run, curve in reversed(list(zip(runs, points(runs, WIDTH - 1, HEIGHT - 1), strict=True))):
        for x, y in curve:
            grid[round(y)][round(x)] = run.mark
    return "loss\n" + "\n".join(f"|{''.join(row)}" for row in grid) + f"\n+{'-' * WIDTH}> time"


def svg(runs: list[Run]) -> str:
    """Return the loss curves as a picture."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 420" font-family="sans-serif" font-size="14">'
    ]
    parts += [
        '<rect width="860" height="420" fill="white"/><path d="M40 20V380H840" fill="none" stroke="gray"/>'
    ]
    parts += ['<text x="40" y="14">loss</text><text x="800" y="400">time</text>']
    for number, (run, curve) in enumerate(zip(runs, points(runs, 790, 350), strict=True)):
        line = " ".join(f"{45 + x:.1f},{25 + y:.1f}" for x, y in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{run.colour}" stroke-width="2"/>')
        parts.append(f'<text x="640" y="{40 + 20 * number}" fill="{run.colour}">{run.name}</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    main()
