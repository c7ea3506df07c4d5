"""Kill, freeze and cut off the servers of a shard at random, in simulated time, and count what goes wrong.

    python -m tests.examples.chaos --runs 200

A worker sends its next push once the last one is acknowledged, and repeats it until then. At the end everything is
healed. Then each acknowledged push has to be in every server's log once, and each log has to be a beginning of the
primary's: pushes that only a dead primary had were not acknowledged.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

from examples.parameter_server.roles import SESSION, Action, Push, Record, Role, Sent, Server, Swap

FAULTS = 12
"""Faults per run, about one per second; afterwards everything is healed."""
CONTACT, PATIENCE = 0.4, 0.6
"""Seconds between two contacts with the control plane, and until a worker repeats a push."""


@dataclass
class Outcome:
    """The results of one run."""

    faults: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    lost: int = 0
    """Acknowledged pushes that are not in the log at the end."""
    twice: int = 0
    """Pushes that are in the log more than once."""
    split: int = 0
    """Servers whose log at the end differs from the primary's: writes of two primaries."""
    refused: int = 0
    """Messages of an older epoch that were refused."""
    two: int = 0
    """Moments at which two servers would accept pushes."""
    away: list[float] = field(default_factory=list)
    """Seconds from a fault of the primary to the next acknowledgement."""


class Simulation:
    """Servers, workers, a network and a control plane with sessions, on one clock."""

    def __init__(
        self, seed: int, *, acknowledge: str = "all", every: int = 1, servers: int = 3, workers: int = 2
    ) -> None:
        self.chance = random.Random(seed)
        self.how = {"acknowledge": acknowledge, "every": every}
        self.now = 0.0
        self.record = Record(0, (), frozenset())
        self.sessions: dict[str, float] = {}
        self.names = [f"s{n}" for n in range(servers)]
        self.servers = {name: self._new(name) for name in self.names}
        self.dead: set[str] = set()
        self.frozen: dict[str, list[Sent]] = {}
        self.cut: set[str] = set()
        self.workers = {f"w{n}": 0 for n in range(workers)}
        self.known = dict.fromkeys(self.workers, self.record)
        self.acked: set[tuple[str, int]] = set()
        self.outcome = Outcome()
        self.fault_at: float | None = None
        self.working = True
        self._events: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        for at, name in enumerate(self.names):
            self._at(0.05 * at, ("contact", name))
        for worker in self.workers:
            self._at(1.5, ("work", worker))

    def _new(self, name: str) -> Server:
        return Server(name, **self.how)  # type: ignore[arg-type]

    def _at(self, after: float, event: object) -> None:
        heapq.heappush(self._events, (self.now + after, next(self._order), event))

    def run(self, until: float) -> None:
        """Run events until this time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            if isinstance(event, Sent):
                self._deliver(event)
            else:
                what, name = event  # type: ignore[misc]
                getattr(self, f"_{what}")(name)
            taking = sum(self._takes(name) for name in self.names)
            self.outcome.two += taking > 1
        self.now = until

    def _takes(self, name: str) -> bool:
        server = self.servers[name]
        if name in self.dead or name in self.frozen:
            return False
        server.tick(self.now)
        return server.role is Role.PRIMARY

    # -- network and control plane --------------------------------------------------------------------------------

    def _deliver(self, message: Sent) -> None:
        if message.to in self.workers:
            self._answer(message)
        elif message.to in self.frozen:
            self.frozen[message.to].append(message)
        elif message.to not in self.dead:
            self._do(message.to, self.servers[message.to].received(message, self.now))

    def _do(self, name: str, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Swap):
                if self.record.epoch == action.expected and name not in self.cut:
                    self.record = action.record
            elif not (self.cut & {name, action.to}) and self.chance.random() > 0.02:
                self.outcome.refused += action.what == "refused"
                self._at(
                    self.chance.uniform(0.001, 0.05) * (20 if self.chance.random() < 0.02 else 1), action
                )

    def _contact(self, name: str) -> None:
        self._at(CONTACT, ("contact", name))
        if name in self.dead or name in self.frozen or name in self.cut:
            return
        self.sessions[name] = self.now
        # A session ends some time after its server has stopped by its own decision, never before.
        alive = [other for other, seen in self.sessions.items() if self.now - seen < SESSION * 1.1]
        self._do(name, self.servers[name].reached(self.record, self.now, alive))

    # -- workers ----------------------------------------------------------------------------------------------

    def _work(self, worker: str) -> None:
        self._at(PATIENCE, ("work", worker))
        if self.chance.random() < 0.8:
            self.known[worker] = self.record
        self._send_push(worker)

    def _send_push(self, worker: str) -> None:
        record, push = self.known[worker], Push(worker, self.workers[worker], self.chance.random())
        if record.chain and self.working:
            self._do(worker, [Sent(record.chain[0], "push", record.epoch, push, worker)])

    def _answer(self, message: Sent) -> None:
        worker, push = message.to, message.body
        if message.what != "ack" or message.epoch < self.known[worker].epoch:
            return
        if push.number == self.workers[worker]:
            self.acked.add((worker, push.number))
            self.workers[worker] += 1
            if self.fault_at is not None:
                self.outcome.away.append(self.now - self.fault_at)
                self.fault_at = None
            self._at(0.0, ("send_push", worker))

    # -- faults -----------------------------------------------------------------------------------------------

    def fault(self, what: str | None = None, victim: str | None = None) -> str:
        """Inject a fault into a server, and return its kind: "none" if the last complete server would be lost."""
        what = what or self.chance.choice(["kill", "kill", "freeze", "cut", "heal"])
        head = self.record.chain[0] if self.record.chain else self.names[0]
        victim = victim or self.chance.choice([head, *self.names])
        if what == "heal":
            self.heal()
        elif what == "kill":
            others = [
                n for n in self.record.synced - self.dead - {victim} if self.servers[n].log or not self.acked
            ]
            if victim in self.dead or not others:
                return "none"
            self.dead.add(victim)
            self.frozen.pop(victim, None)
            self._at(self.chance.uniform(0.3, 5.0), ("restart", victim))
        elif what == "freeze":
            self.frozen.setdefault(victim, [])
            self._at(self.chance.uniform(0.3, 8.0), ("thaw", victim))
        else:
            self.cut.add(victim)
            self._at(self.chance.uniform(0.3, 8.0), ("join", victim))
        if victim == head and what != "heal" and self.fault_at is None:
            self.fault_at = self.now
        self.outcome.faults[what] += 1
        return what

    def _restart(self, name: str) -> None:
        self.dead.discard(name)
        self.servers[name] = self._new(name)

    def _thaw(self, name: str) -> None:
        for message in self.frozen.pop(name, []):
            self._deliver(message)

    def _join(self, name: str) -> None:
        self.cut.discard(name)

    def heal(self) -> None:
        """Let all servers run, and reach each other."""
        for name in list(self.frozen):
            self._thaw(name)
        self.cut.clear()

    def finish(self) -> Outcome:
        """Heal, wait until all are in the chain, and compare."""
        self.heal()
        self.run(self.now + 30.0)
        self.working = False
        self.run(self.now + 5.0)
        outcome, primary = self.outcome, self.servers[self.record.chain[0]]
        there = Counter((push.worker, push.number) for push in primary.log)
        outcome.acknowledged = len(self.acked)
        outcome.lost = len(self.acked - there.keys())
        outcome.twice = sum(count > 1 for count in there.values())
        for name in self.record.chain[1:]:
            theirs = self.servers[name].log
            outcome.split += theirs != primary.log[: len(theirs)]
            if self.how["every"] == 1:
                have = {(push.worker, push.number) for push in theirs}
                outcome.lost = max(outcome.lost, len(self.acked - have))
        return outcome


def one(seed: int, *, faults: int = FAULTS, acknowledge: str = "all", every: int = 1) -> Outcome:
    """Return the outcome of one run with this seed."""
    simulation = Simulation(seed, acknowledge=acknowledge, every=every)
    simulation.run(4.0)
    for _ in range(faults):
        simulation.fault()
        simulation.run(simulation.now + simulation.chance.expovariate(1.0))
    return simulation.finish()


def table(runs: int) -> list[tuple[str, int, int, int, int, int, int]]:
    """Return rows of: way, faults, pushes acknowledged, lost, applied twice, of two primaries, messages refused."""
    rows = []
    for way, acknowledge, every in (("all", "all", 1), ("next", "next", 1), ("primary, every 10", "now", 10)):
        outcomes = [one(seed, acknowledge=acknowledge, every=every) for seed in range(runs)]
        counts = [sum(getattr(o, name) for o in outcomes) for name in ("acknowledged", "lost", "twice")]
        both = sum(o.split + o.two for o in outcomes)
        faults = sum(sum(o.faults.values()) - o.faults["heal"] for o in outcomes)
        rows.append((way, faults, *counts, both, sum(o.refused for o in outcomes)))
    return rows


def drift(
    acknowledge: str = "all", every: int = 1, steps: int = 500, kill_after: int = 205
) -> tuple[int, float]:
    """Return the steps lost of *Fault Tolerance in Parameter Servers*, code 11.8.1, and the drift they leave.

    A worker pushes a gradient for each of 500 steps. The primary is killed after 205, in the middle
    between two copies to the next one. The drift is the largest
    difference of a parameter of this shard from that of a run without failure.
    """

    def model(numbers: list[int]) -> float:
        value = 0.0
        for step in numbers:
            value -= 0.1 * (0.01 * ((step % 7) - 3))
        return value

    simulation = Simulation(1, acknowledge=acknowledge, every=every, workers=1)
    while simulation.workers["w0"] < kill_after:
        simulation.run(simulation.now + 0.01)
    simulation.fault("kill", simulation.record.chain[0])
    while simulation.workers["w0"] < steps:
        simulation.run(simulation.now + 0.01)
    simulation.working = False
    simulation.run(simulation.now + 20.0)
    log = simulation.servers[simulation.record.chain[0]].log
    kept = [push.number for push in log if push.number < steps]
    return steps - len(kept), abs(model(kept) - model(list(range(steps))))


def main() -> None:
    """Print the table, and how long the primary was away."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    runs = parser.parse_args().runs
    print("acknowledged by | faults | acknowledged | lost | twice | two primaries | refused")
    for row in table(runs):
        print(*row, sep=" | ")
    away = sorted(seconds for seed in range(runs) for seconds in one(seed).away)
    for way, acknowledge, every in (("all", "all", 1), ("next", "next", 1), ("primary, every 10", "now", 10)):
        print(f"drift, acknowledged by {way}: {drift(acknowledge, every)}")
    median, most = away[len(away) // 2], away[len(away) * 9 // 10]
    print(f"seconds to the next acknowledgement: median {median:.1f}, 9 of 10 {most:.1f}")


if __name__ == "__main__":
    main()
