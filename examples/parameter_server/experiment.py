"""Repeat section 4 of *Training Through Failure*: a server is killed once and twice, and survives in six ways.

    python -m examples.parameter_server.experiment --data ../shared/data --seeds 10

Draws accuracy.svg and costs.svg into the folder of the results, and prints the tables.

Time is counted in ticks, so that a busy machine changes nothing: in a tick each worker that does not wait computes one
gradient. Servers are processes, and are killed with -9. Results are lines of a file: what is there is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.parameter_server.model import Network, Vector
from examples.parameter_server.server import Keeping, Server

WAYS = ("sync checkpointing", "async checkpointing", "sync chain", "async chain", "stateless", "ours")
WORKERS, SHARDS = 4, 4
RATE = 0.02
EVERY = 10
"""Updates from one checkpoint, or one copy to the next of the chain, to the next: the paper says "a set number"."""


@dataclass(frozen=True)
class Plan:
    """Times of a run, in ticks."""

    ticks: int = 160
    kills: tuple[int, ...] = (66, 117)
    away: int = 25
    """Until a process runs again."""
    promoted: int = 3
    """Until the next of a chain has taken over."""
    look: int = 5


@dataclass
class Run:
    """One run, and what it has measured at every look."""

    way: str
    network: Network
    folder: Path
    plan: Plan
    killed: int
    accuracy: list[float] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    """Part of the workers that compute."""
    memory: list[int] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    _handled: int = 0
    _busy: int = 0

    def __post_init__(self) -> None:
        weights = self.network.vector()
        store, arena = str(self.folder / "store"), str(self.folder)
        if self.way == "ours":
            edges = np.linspace(0, len(weights), SHARDS + 1).astype(int)
            self.parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
            keep = [Keeping(store, member=(n, SHARDS)) for n in range(SHARDS)]
        else:
            self.parts, keep = [slice(0, len(weights))], [self._keeping(store)]
        pairs = zip(self.parts, keep, strict=True)
        self.servers = [Server(weights[part], how, arena) for part, how in pairs]
        self.chain = self.way.endswith("chain")
        self.replicas = [Server(weights, Keeping(), arena) for _ in range(2)] if self.chain else []
        self.sync = self.way.startswith("sync")
        self.victim = 2 if self.way == "ours" else 0
        self.back: int | None = None
        self.backlog: list[tuple[int, Vector]] = []
        """Ticks and gradients that wait for the server that is away."""
        self.views = [self.known() for _ in range(WORKERS)]
        self.updates = 0

    def _keeping(self, store: str) -> Keeping:
        if self.way.endswith("checkpointing"):
            return Keeping(store, full_every=EVERY)
        return Keeping(store, flush=True) if self.way == "stateless" else Keeping()

    def known(self) -> Vector:
        """Return the weights as far as workers know them: of a server that is away, its last answer."""
        return np.concatenate([server.weights for server in self.servers])

    # -- one run ----------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train, kill, and return the measurements."""
        for tick in range(self.plan.ticks):
            if tick in self.plan.kills[: self.killed]:
                self.servers[self.victim].kill()
                self.back = tick + (self.plan.promoted if self.chain else self.plan.away)
            if tick == self.back:
                self._return(tick)
            self._turn(tick)
            if (tick + 1) % self.plan.look == 0:
                self._look()
        for server in (*self.servers, *self.replicas):
            if server.alive:
                server.kill()
        return {
            "accuracy": self.accuracy, "gradients": self.gradients, "busy": self.busy,
            "memory": self.memory, "starts": [s for server in self.servers for s in server.seconds[1:]],
        }  # fmt: skip

    def _turn(self, tick: int) -> None:
        there = all(server.alive for server in self.servers)
        if not there and self.way not in ("stateless", "ours"):
            return  # workers wait
        self._busy += WORKERS
        start = self.known()
        gathered = []
        for worker in range(WORKERS):
            view = start if self.sync else self.views[worker]
            gradient = self.network.gradient(view, tick * WORKERS + worker)
            if self.sync:
                gathered.append(gradient)
            else:
                self._push(tick, gradient)
                self.views[worker] = self.known()
        if self.sync:
            self._push(tick, np.sum(gathered, axis=0), count=WORKERS)

    def _push(self, tick: int, gradient: Vector, count: int = 1) -> None:
        for server, part in zip(self.servers, self.parts, strict=True):
            if server.alive:
                server.ask("apply", gradient[part], RATE)
            else:
                self.backlog.append((tick, gradient[part].copy()))
        if all(server.alive for server in self.servers) or self.way == "ours":
            self._handled += count
        self.updates += 1
        if self.chain and self.updates % EVERY == 0:
            for replica in self.replicas:
                replica.ask("load", self.servers[0].weights)

    def _return(self, tick: int) -> None:
        if self.chain:
            self.servers[0] = self.replicas.pop(0)
            self.servers[0].ask("look")
        else:
            server = self.servers[self.victim]
            server.start()
            rounds = sorted({when for when, _ in self.backlog})
            for when in rounds if self.way == "ours" else rounds[-1:]:
                # Never the sum: a mean for each round, the less the older it is; stateless a mean of all of them.
                chosen = [g for then, g in self.backlog if then == when or self.way == "stateless"]
                staleness = (tick - when) if self.way == "ours" else 0
                server.ask("apply", np.mean(chosen, axis=0), RATE * WORKERS / (1 + staleness))
            if self.way == "stateless":
                self._handled += len(self.backlog)
        self.backlog = []
        self.views = [self.known() for _ in range(WORKERS)]
        self.back = None

    def _look(self) -> None:
        waiting = sum(gradient.nbytes for _, gradient in self.backlog)
        self.accuracy.append(self.network.accuracy(self.known()))
        self.gradients.append(self._handled)
        self.busy.append(self._busy / (WORKERS * self.plan.look))
        self.memory.append(waiting + sum(server.memory() for server in (*self.servers, *self.replicas)))
        self._busy = 0


def runs(
    data: str, out: Path, seeds: int, plan: Plan, ways: tuple[str, ...] = WAYS
) -> Iterator[dict[str, Any]]:
    """Do what the file does not have yet, and yield all results."""
    done = {}
    if out.exists():
        for line in out.read_text(encoding="utf-8").splitlines():
            result = json.loads(line)
            done[result["way"], result["killed"], result["seed"]] = result
    for seed in range(seeds):
        for killed in (0, 1, 2):
            # Without a kill all ways of one kind are the same run.
            for way in ways if killed else [way for way in ways if way.endswith("chain")]:
                result = done.get((way, killed, seed))
                if result is None:
                    with tempfile.TemporaryDirectory(prefix="servers-") as folder:
                        run = Run(way, Network(data, seed), Path(folder), plan, killed)
                        result = {"way": way, "killed": killed, "seed": seed, **run.run()}
                    with out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(result) + "\n")
                yield result


def main() -> None:
    """Run what is missing, and print a line for each result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--out", type=Path, default=Path("docs/servers/runs.jsonl"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="a tenth of it, into build/servers.jsonl")
    given = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(ticks=16, kills=(6, 11), away=3, promoted=1, look=2) if given.quick else Plan()
    out = Path("build/servers.jsonl") if given.quick else given.out
    out.parent.mkdir(parents=True, exist_ok=True)
    if given.quick:
        out.unlink(missing_ok=True)
    results = []
    for result in runs(given.data, out, 1 if given.quick else given.seeds, plan):
        what = f"{result['way']}, killed {result['killed']}, seed {result['seed']}"
        print(f"{what}: {result['accuracy'][-1]:.3f}", flush=True)
        results.append(result)
    from examples.parameter_server.figures import figures, table  # which import from here

    figures(results, plan, out.parent)
    print(table(results, plan))


if __name__ == "__main__":
    main()
