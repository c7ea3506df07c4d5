"""Train on several ranks under torchrun, kill one with -9, and report what that cost when all continue.

python examples/lost_rank.py fsdp_transformer --kill
python examples/lost_rank.py moe --kill --host      the rank's memory and daemon die with it, as with its host
python examples/lost_rank.py torchrec_movielens --kill --ranks 2 --data ml-latest-small      needs TorchRec
python examples/lost_rank.py deepspeed_transformer --kill --ranks 2      needs DeepSpeed
python examples/lost_rank.py torchtitan_llama --kill --ranks 2      needs torchtitan

The training is the train.py of that folder in examples, which knows nothing of being killed. It runs twice
with the same batches: undisturbed, and with a rank killed. Without --kill: once, undisturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INTERVAL = 2
PARTS = 8
"""A checkpoint writes 1 / PARTS of the state, so every PARTS of them are as many bytes as a full one."""
LAST = 8
"""Steps at the end whose losses are averaged."""
STEPS = {
    "fsdp_transformer": 40,
    "deepspeed_transformer": 40,
    "torchtitan_llama": 40,
    "moe": 64,
    "torchrec_movielens": 240,
}
LEAST = 32
"""Steps of a training, so that some are left after the kill."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Else ranks that torchrun starts again read addresses of those that are dead.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@dataclass(slots=True)
class Rank:
    """The log of one process of one rank."""

    pid: int = 0
    ready: float = 0.0
    """When it had its model and its process group, in seconds since 1970; so are the other times."""
    resumed_at: float = 0.0
    resumed: dict[str, Any] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    """By step: when it was done."""
    losses: dict[int, float] = field(default_factory=dict)
    work: dict[str, int] = field(default_factory=dict)
    """Bytes that each of its experts has read."""


class Job:
    """A training of several ranks by torchrun, in a folder of its own."""

    def __init__(self, script: Path, folder: Path, steps: int, ranks: int, more: Sequence[str]) -> None:
        self.folder = folder
        self.count, self.victim = ranks, ranks // 2
        for rank in range(ranks):
            # One rank's memory for each, as if they were on hosts of their own.
            (folder / "arena" / str(rank)).mkdir(parents=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        command += ["--local-addr", "127.0.0.1", "--redirects", "3", "--log-dir", str(folder / "log")]
        command += [str(script), "--store", str(folder / "store"), "--arena", str(folder / "arena")]
        command += ["--steps", str(steps), "--interval", str(INTERVAL), *more]
        with (folder / "torchrun.log").open("wb") as log:
            self.torchrun = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT}, stdin=subprocess.DEVNULL
            )

    def ranks(self, attempt: int) -> list[Rank]:
        """Return all ranks of the first start (0), or the second."""
        return [self._rank(attempt, rank) for rank in range(self.count)]

    def _rank(self, attempt: int, number: int) -> Rank:
        rank = Rank()
        for path in self.folder.glob(f"log/*/attempt_{attempt}/{number}/stdout.log"):
            for line in path.read_text().splitlines():
                found = re.fullmatch(r"([0-9.]+) (\d+) train (ready|resumed|step)( .*)?", line)
                if found is None:
                    continue  # of another process
                at, rank.pid, rest = float(found[1]), int(found[2]), (found[4] or "").strip()
                if found[3] == "ready":
                    rank.ready = at
                elif found[3] == "resumed":
                    rank.resumed_at, rank.resumed = at, json.loads(rest)
                else:
                    step, _, loss, *work = rest.split(maxsplit=4)
                    rank.times[int(step)], rank.losses[int(step)] = at, float(loss)
                    for expert, count in json.loads(work[1]).items() if work else ():
                        rank.work[expert] = rank.work.get(expert, 0) + count
        return rank

    def wait_for(self, step: int) -> Rank:
        """Return the victim, when it has done so many steps."""
        while not (rank := self._rank(0, self.victim)).times.get(step):
            if self.torchrun.poll() is not None:
                self.fail("the training ended before a rank could be killed")
            time.sleep(0.005)
        return rank

    def wait(self) -> None:
        """Wait until it has ended."""
        if self.torchrun.wait():
            self.fail("the training failed")

    def fail(self, what: str) -> None:
        """Say what the ranks have said, and end."""
        for path in [self.folder / "torchrun.log", *sorted(self.folder.glob("log/*/*/*/stderr.log"))]:
            print(f"-- {path.relative_to(self.folder)}\n{path.read_text()[-2000:]}", file=sys.stderr)
        sys.exit(what)

    def stop(self) -> None:
        """End torchrun, which ends its ranks, and what scarctl's daemons have still to do."""
        if self.torchrun.poll() is None:
            self.torchrun.terminate()
            self.torchrun.wait()
        deadline = time.monotonic() + 10
        for rank in range(self.count):
            # They end when all is in the store.
            while list(self.folder.glob(f"arena/{rank}/*/daemon.sock")):
                if time.monotonic() > deadline:
                    _daemon(self.folder / "arena" / str(rank), "stop", "--all")
                    break
                time.sleep(0.05)


def main() -> None:
    """Train, kill, report."""
    arguments = _parse()
    script, steps, base = HERE / arguments.example / "train.py", arguments.steps, None
    more = [] if arguments.data is None else ["--data", str(arguments.data)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scarctl-ranks-")))
        print(f"{arguments.ranks} ranks under torchrun: {script}, {steps} steps.\n", flush=True)
        if not arguments.quick:
            undisturbed = _train(script, folder / "undisturbed", steps, arguments.ranks, more, stack)
            undisturbed.wait()
            base = undisturbed.ranks(0)
            end = _loss(base, range(steps - LAST + 1, steps + 1))
            print(
                f"undisturbed: {_pace(base):.0f} ms per step, loss of the last {LAST}: {end:.3f}\n",
                flush=True,
            )
        if arguments.kill:
            job = _train(script, folder / "killed", steps, arguments.ranks, more, stack)
            killed_at = _kill(job, steps * 5 // 8, host=arguments.host)
            job.wait()
            _report(base, job.ranks(0), job.ranks(1), killed_at)


def _train(script: Path, folder: Path, steps: int, ranks: int, more: Sequence[str], stack: ExitStack) -> Job:
    job = Job(script, folder, steps, ranks, more)
    stack.callback(job.stop)
    return job


def _kill(job: Job, after: int, *, host: bool) -> float:
    """Kill the victim in the step after this one; returns when."""
    daemon = 0
    arena = job.folder / "arena" / str(job.victim)
    if host:
        job.wait_for(1)
        daemon = json.loads(_daemon(arena, "status"))["pid"]
    pid = job.wait_for(after).pid
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    if host:
        os.kill(daemon, signal.SIGKILL)
        shutil.rmtree(arena)
        arena.mkdir()
    print(
        f"kill -9 {pid}: rank {job.victim}{', and its host' if host else ''}, in step {after + 1}",
        flush=True,
    )
    return at


def _daemon(arena: Path, *action: str) -> str:
    """Run `scarctl daemon`, and return its output."""
    command = [sys.executable, "-m", "scarctl", "daemon", *action, "--arena-dir", str(arena), "--json"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout


def _report(base: list[Rank] | None, before: list[Rank], after: list[Rank], killed_at: float) -> None:
    ranks, step = after[0].resumed["ranks"], after[0].resumed["step"]
    if ranks is None:
        sys.exit(
            f"nothing of rank {len(after) // 2} had come into the store: all have begun again with step 1"
        )
    lost = ", ".join(map(str, ranks["lost"]))
    print(
        f"lost {len(ranks['lost'])} of {ranks['world']} ranks ({lost}); all ranks continue after step {step}\n"
    )
    _print_origins(after, step, ranks["lost"])
    _print_work(before, ranks["lost"])
    _print_losses(base, before, after, step)
    every = INTERVAL * PARTS
    back = step - max(1, step // every * every)
    print("going back instead, to the last state that is whole and of one step")
    if ranks["rollback_steps"] is None:
        print(f"  {step:>2} steps  to the start: not even the first one is in the store yet")
    else:
        print(f"  {ranks['rollback_steps']:>2} steps  to the first: this training asks for no later one")
    print(f"  {back:>2} steps  with full checkpoints every {every} steps, as many bytes as these")
    print(f"  {every // 2:>2} steps  the same, on average\n")
    ready, there = max(rank.ready for rank in after), max(rank.resumed_at for rank in after)
    first = max(rank.times[step + 1] for rank in after)
    print("from the kill to the first new step")
    print(
        f"  {ready - killed_at:6.2f} s  torchrun ends all ranks and starts them: python, torch, group, model"
    )
    print(f"  {there - ready:6.2f} s  scarctl: attach and resume")
    print(f"  {first - there:6.2f} s  the step; a process's first one takes longer")
    print(f"  {first - killed_at:6.2f} s  in all")


def _print_origins(after: list[Rank], step: int, lost: list[int]) -> None:
    print("rank       from memory  from the store    MB  as they were after step")
    for number, rank in enumerate(after):
        (shard,) = rank.resumed["report"]["shards"]
        memory, store = (shard["tiers"].get(tier, 0) for tier in ("memory", "store"))
        oldest, newest, size = shard["oldest_step"], shard["newest_step"], shard["bytes"] / 1e6
        ages = f"{oldest} to {newest}: up to {step - oldest} steps old" if number in lost else str(newest)
        name = f"{number} lost" if number in lost else str(number)
        print(f"{name:<9}{memory:>13}{store:>16}{size:>6.1f}  {ages}")
    print("(partitions; the newest copy that there is of each)\n")


def _print_work(before: list[Rank], lost: list[int]) -> None:
    work = {int(expert): count for rank in before for expert, count in rank.work.items()}
    if work:
        total = sum(work.values())
        shares = ", ".join(f"{number}: {count / total:.0%}" for number, count in sorted(work.items()))
        its = sum(sum(before[rank].work.values()) for rank in lost) / total
        print(f"experts' shares of the work before: {shares}; those of the lost rank did {its:.0%}\n")


def _print_losses(base: list[Rank] | None, before: list[Rank], after: list[Rank], step: int) -> None:
    last = sorted(after[0].losses)[-LAST:]
    rows = {
        f"step {step}": (before, [step]),
        f"step {step + 1}": (after, [step + 1]),
        f"the last {LAST}": (after, last),
    }
    print(f"{'loss':<14}{'' if base is None else 'undisturbed'}  killed")
    for name, (ranks, steps) in rows.items():
        undisturbed = "" if base is None else f"{_loss(base, steps):>11.3f}"
        print(f"{name:<14}{undisturbed}{_loss(ranks, steps):>8.3f}")
    if base is not None:
        pairs = zip(base, before, strict=True)
        same = all(one.losses[n] == other.losses[n] for one, other in pairs for n in other.losses)
        print(f"(means of all ranks; up to the kill both trainings were {'' if same else 'NOT '}the same)")
    print()


def _loss(ranks: list[Rank], steps: Iterable[int]) -> float:
    """Mean over the steps, and the ranks that got so far."""
    return statistics.mean(rank.losses[step] for step in steps for rank in ranks if step in rank.losses)


def _pace(ranks: list[Rank]) -> float:
    """Median milliseconds per step."""
    times = ranks[0].times
    return 1e3 * statistics.median(times[n] - times[n - 1] for n in times if n - 1 in times)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("example", choices=list(STEPS))
    parser.add_argument(
        "--kill", action="store_true", help="kill the rank in the middle after 5/8 of the steps"
    )
    parser.add_argument("--host", action="store_true", help="and its daemon and memory with it")
    parser.add_argument("--ranks", type=int, default=4, choices=[2, 4, 8])
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--data", type=Path, help="data of torchrec_movielens: a folder")
    parser.add_argument(
        "--quick", action="store_true", help="not undisturbed: nothing to compare losses with"
    )
    arguments = parser.parse_args()
    arguments.steps = STEPS[arguments.example] if arguments.steps is None else arguments.steps
    if arguments.steps < LEAST:
        parser.error(f"--steps is {arguments.steps}: give {LEAST} or more")
    return arguments


if __name__ == "__main__":
    main()
