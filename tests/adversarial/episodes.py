"""Random episodes of an owner and its replicas: killed, stopped, cut off, healed, started again elsewhere.

    python -m tests.adversarial.episodes                    # 10,000 episodes
    python -m tests.adversarial.episodes --episodes 200 --seed 7

Arenas, followers and replicas are the product's; frames go through its codec. What stands in for the machines is here:
three hosts are folders, a cable loses frames or stops in one, a daemon that is killed leaves a copy half written. Every
byte of a copy says the life and the step that it is from, so a torn or an abandoned one shows.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.arena.extras import read_extras
from scarctl.arena.header import FILE
from scarctl.arena.owner import Owner, disown
from scarctl.arena.slot import Slot
from scarctl.errors import Corruption, Fenced, ScarError
from scarctl.peers import replica as replicas
from scarctl.peers.follower import Follower
from scarctl.peers.frames import PREFIX, Kind
from scarctl.peers.replica import SUCCESSOR, Replica
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import pack, step_of
from scarctl.util.arrays import Ids
from tests.daemon.rig import copy_into, fill, values
from tests.support.frames import deliver, parse

RUN = "ab" * 16 + "-3"
LAYOUT = build_layout(
    [("a", "parameter", (TensorSpec("", "F32", (9, 3)), TensorSpec("m", "BF16", (9, 3))))], rows={"a": 2}
)
EVERYTHING = np.arange(LAYOUT.partitions)
HOSTS = ("east", "west", "north")
_STEPS = 14


class Violation(Exception):
    """A condition that must hold does not hold."""


class Killed(Exception):
    """A daemon ends here."""


@dataclass
class Life:
    """A training process with its arena, and the daemon that sends it."""

    host: str
    epoch: int
    start: str
    arena: Arena
    state: Ids
    """The byte in the newest copy of each partition."""
    step: int
    follower: Follower
    """The daemon's follower, as long as the daemon lives."""
    alive: bool = True
    """Its process trains. The daemon may outlive the process."""


class Link:
    """A sender and the replica at its other end."""

    def __init__(self, life: Life, place: Path) -> None:
        owner = Owner(life.host, life.start, life.arena.base_epoch)
        replicas.require_newest(place / RUN, RUN, owner, life.arena.epoch)
        self.replica = Replica.begin(place, RUN, life.arena.layout_json(), owner, life.arena.epoch, "")
        self.follower = life.follower
        self.follower.has(self.replica.have())


class Episode:
    """One job: its hosts, its lives, and the acknowledged versions."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.counts: Counter[str] = Counter()
        for host in HOSTS:
            (folder / host).mkdir(mode=0o700)
        self.epoch = self.written = 0
        self.states: dict[tuple[int, int], tuple[Ids, int]] = {}
        """The byte in each partition, and the step, of the states that were current, by epoch and moment."""
        self.acknowledged: tuple[int, str, str] | None = None
        """The version that a flush has left on two hosts, and these hosts."""
        self.away: set[str] = set()
        self.cut = False
        self.link: Link | None = None
        self.lives: list[Life] = []
        self.begin("east", None)

    # -- lives -------------------------------------------------------------------------------------------------

    @property
    def life(self) -> Life:
        return self.lives[-1]

    def begin(self, host: str, source: str | None) -> None:
        """Start a process on a host, with another host's memory or its own."""
        self.epoch += 1
        place = self.folder / host / RUN
        if source is None:
            shutil.rmtree(place, ignore_errors=True)
            Arena.create(place, LAYOUT, run_id=RUN, epoch=self.epoch).close()
        elif source != host:  # as `arena.transfer` does, with all bytes and fields
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(self.folder / source / RUN, place)
        arena = self._mine(place)
        arena.settle()
        arena.end_holds()
        disown(place)
        arena.take_over()
        state, step = np.zeros(LAYOUT.partitions, np.int64), 0
        if source is not None:
            state, step = self._found(arena)
            self.states[self.epoch, arena.slot.moment] = state, step
        arena.begin_epoch(self.epoch)
        self.link = None
        life = Life(host, self.epoch, f"{self.epoch:032x}", arena, state, step, Follower(arena))
        self.lives.append(life)

    def _mine(self, place: Path) -> Arena:
        arena = Arena.share(place, run_id=RUN)
        if arena is None:
            raise Violation(f"{place} has no arena any more")
        return arena

    def _found(self, arena: Arena) -> tuple[Ids, int]:
        """Return the state in an arena's current slot, which must have been the owner's at that moment."""
        found = self.states.get((arena.epoch, arena.slot.moment))
        if found is None:
            raise Violation(f"{arena.folder}: its state was never the one of epoch {arena.epoch}")
        return found

    # -- what happens ------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Take a step, in which some partitions change; the process may die while copying."""
        changed = self.rng.sample(range(LAYOUT.partitions), self.rng.randint(1, LAYOUT.partitions))
        self._step(np.array(sorted(changed)))

    def flush(self) -> None:
        """Copy everything at the newest step, and send it to the peer: acknowledged only after its mark."""
        if self._step(EVERYTHING) and self._send(1 << 30):
            self.acknowledged = self.life.arena.slot.head, self.life.host, self.peer
            self.counts["flushed to a peer"] += 1

    def _step(self, ids: Ids) -> bool:
        """Make a checkpoint in which these have changed, or all at first. Return whether the process survives."""
        life, arena = self.life, self.life.arena
        if not life.alive:
            return False
        ids = ids if arena.slot.moment else EVERYTHING
        life.step, self.written = life.step + 1, self.written + 1
        value = self.written % 251
        if self.rng.random() < 0.05:
            begun = arena.begin_moment(flush=True)
            assert begun is not None
            begun[0].begin(ids)
            fill(begun[0], ids[:1], value)
            begun[0].end(ids[:0], 0, begun[1])
            life.alive = False
            self.counts["killed in a copy"] += 1
            return False
        version = pack(arena.epoch, life.step)
        assert copy_into(arena, ids, version, value, extras={"step": life.step}, flush=True)
        arena.reach(life.step)
        life.state = life.state.copy()
        life.state[ids] = value
        self.states[life.epoch, arena.slot.moment] = life.state, life.step
        return True

    @property
    def peer(self) -> str:
        return HOSTS[(HOSTS.index(self.life.host) + 1) % len(HOSTS)]

    def send(self) -> None:
        """Send a round, or only its first frames before the connection is cut."""
        self._send(self.rng.choice((0, 1, 2, 3, 1 << 30)))

    def _send(self, most: int) -> bool:
        """Return whether the peer has acknowledged a mark of this moment."""
        if self.cut or self.peer in self.away:
            return False
        try:
            if self.link is None:
                self.link = Link(self.life, self.folder / self.peer)
            marked = False
            for number, frame in enumerate(self.link.follower.round()):
                if number >= most:
                    self.link = None
                    self.counts["cut in a round"] += 1
                    return False
                if self.rng.random() < 0.02:
                    self._damaged(frame)
                    return False
                marked = deliver(self.link.replica, frame) is Kind.MARK
            return marked
        except Fenced:
            raise Violation("the newest owner is fenced") from None

    def _damaged(self, frame: list[Any]) -> None:
        """Cut the connection within a frame, or flip a bit: the frame is not accepted."""
        data = bytearray(b"".join(memoryview(part).tobytes() for part in frame))
        data[self.rng.randrange(PREFIX.size, len(data))] ^= 1 << self.rng.randrange(8)
        try:
            parse(bytes(data))
        except Corruption:
            self.link = None
            self.counts["damaged frames"] += 1
            return
        raise Violation("a damaged frame is taken")

    def kill_peer(self) -> None:
        """Kill the peer's daemon while it copies a batch: the first row of each copy is written."""
        if self.cut or self.peer in self.away:
            return
        original = replicas.write_rows

        def half(slot: Slot, ids: Ids, data: Any, *_: Any) -> None:
            slot.rows(0, 0)[LAYOUT.row_ranges(ids)[0]] = data[0]
            raise Killed

        replicas.write_rows = half  # type: ignore[attr-defined]
        try:
            self._send(1 << 30)
        except Killed:
            self.counts["peer killed in a batch"] += 1
        finally:
            replicas.write_rows = original  # type: ignore[attr-defined]
        self.link = None

    def pull(self) -> None:
        """Cut the connection until `heal`."""
        self.cut, self.link = True, None

    def heal(self) -> None:
        """Restore the connection, and the hosts that were away."""
        self.cut = False
        self.away.clear()

    def stop(self) -> None:
        """Stop a host for a while: it takes part in no start."""
        host = self.rng.choice(HOSTS)
        if host != self.life.host and not self.away:
            self.away.add(host)
            self.link = None

    def zombie(self) -> None:
        """Let the daemon of an earlier owner, which was cut off, send again."""
        if len(self.lives) < 2:
            return
        old = self.rng.choice(self.lives[:-1])
        if not (self.folder / old.host / RUN).exists() or old.host == self.life.host:
            return
        for host in HOSTS:
            place = self.folder / host
            if host == old.host or host in self.away or not (place / RUN / FILE).exists():
                continue
            before = self._mine(place / RUN)
            held = before.memory().tobytes()
            try:
                link = Link(old, place)
                for frame in link.follower.round():
                    deliver(link.replica, frame)
            except (Fenced, Corruption):
                self.counts["earlier owners fenced"] += 1
            after = self._mine(place / RUN)
            if before.epoch > old.arena.epoch and after.memory().tobytes() != held:
                raise Violation("an earlier epoch has overwritten a later one")
            shutil.rmtree(place / f"{RUN}{SUCCESSOR}", ignore_errors=True)

    def restart(self) -> None:
        """Kill the process, perhaps with its host and all memory there; the job starts again on an available host."""
        life = self.life
        life.alive = False
        if self.rng.random() < 0.5:
            shutil.rmtree(self.folder / life.host)
            (self.folder / life.host).mkdir(mode=0o700)
            self.counts["hosts lost"] += 1
            if self.acknowledged is not None and life.host in self.acknowledged[1:]:
                others = [host for host in self.acknowledged[1:] if host != life.host]
                if others[0] in self.away:
                    self.acknowledged = None  # two hosts at once
        found = {host: arena for host in HOSTS if host not in self.away and (arena := self._usable(host))}
        if not found:
            self.acknowledged = None
            self.begin(self.rng.choice([host for host in HOSTS if host not in self.away]), None)
            return
        source = max(found, key=lambda host: (found[host].epoch, found[host].head_step))
        target = self.rng.choice([host for host in HOSTS if host not in self.away])
        if self.acknowledged is not None and found[source].slot.head < self.acknowledged[0]:
            raise Violation(
                f"{self.acknowledged[0]} was acknowledged, and {found[source].slot.head} is found"
            )
        self.acknowledged = None
        self.counts["starts elsewhere" if target != life.host else "starts"] += 1
        self.begin(target, source)

    def _usable(self, host: str) -> Arena | None:
        try:
            arena = Arena.share(self.folder / host / RUN, run_id=RUN)
        except ScarError:
            return None
        return arena if arena is not None and arena.slot.moment else None

    # -- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that all memory has a state of its owner, with its extras, and no torn copy in the other slot."""
        for host in HOSTS:
            arena = self._usable(host)
            if arena is None:
                continue
            state, step = self._found(arena)
            slot, spare = arena.slot, arena.spare
            if [values(slot, i) for i in range(state.size)] != [{byte} for byte in state.tolist()]:
                raise Violation(f"{host}: moment {slot.moment} is not of one state")
            extras = read_extras(arena)
            if extras is None or extras.tree != {"step": step} or step_of(slot.head) != step:
                raise Violation(f"{host}: moment {slot.moment} has the extras of another state")
            for i in np.flatnonzero(spare.intact()).tolist():
                if len(values(spare, i)) > 1:
                    raise Violation(f"{host}: partition {i} is torn")


ACTIONS = {
    "train": 6,
    "send": 6,
    "flush": 2,
    "restart": 2,
    "kill_peer": 1,
    "zombie": 1,
    "pull": 1,
    "heal": 2,
    "stop": 1,
}
"""Events, and their relative frequency."""


def run(folder: Path, seed: int) -> Counter[str]:
    """Play one episode. Return counts of its events. Raises Violation with the events that led to it."""
    rng = random.Random(seed)
    folder.mkdir(mode=0o700)
    past: list[str] = []
    try:
        episode = Episode(folder, rng)
        for action in rng.choices(list(ACTIONS), list(ACTIONS.values()), k=_STEPS):
            past.append(action)
            getattr(episode, action)()
            if rng.random() < 0.3:
                episode.check()
        episode.check()
        return episode.counts
    except Violation as error:
        raise Violation(f"episode {seed}: {error}\n    after {', '.join(past)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Play episodes and print counts of their events. Return 1 after a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.episodes", description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    started, total, failures, memory = time.monotonic(), Counter[str](), 0, Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for seed in range(args.seed, args.seed + args.episodes):
            try:
                total += run(Path(folder, str(seed)), seed)
            except Violation as error:
                failures += 1
                print(error, flush=True)  # noqa: T201
    what = ", ".join(f"{count:,} {name}" for name, count in sorted(total.items()))
    print(f"{args.episodes:,} episodes, {failures} violations, {time.monotonic() - started:.0f} s: {what}")  # noqa: T201
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
