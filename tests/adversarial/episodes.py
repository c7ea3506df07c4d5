"""Random episodes of an owner and its replicas: killed, stopped, cut off, healed, started again elsewhere.

    python -m tests.adversarial.episodes                    # 10,000 episodes
    python -m tests.adversarial.episodes --episodes 200 --seed 7

Arenas, followers and replicas are the product's; frames go through its codec. What stands in for the machines is here:
three hosts are folders, a cable loses frames or stops in one, a daemon that is killed leaves a copy half written. Every
byte of a copy says the life and the step that it is from, so a torn or an abandoned one shows.
"""

from __future__ import annotations

import argparse
import itertools
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
from scarctl.arena.header import FILE
from scarctl.arena.owner import Owner, disown, read_owner
from scarctl.arena.queue import HandOverQueue
from scarctl.arena.rows import read_rows, write_rows
from scarctl.errors import Corruption, Fenced, ScarError
from scarctl.peers import replica as replicas
from scarctl.peers.follower import Follower
from scarctl.peers.frames import PREFIX, Kind
from scarctl.peers.replica import SUCCESSOR, Replica
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import NEVER, epoch_of, pack, step_of
from scarctl.util.arrays import Ids
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
    queue: HandOverQueue
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
        self.epoch = 0
        self.values: dict[int, int] = {}
        """The byte in the copies of each version."""
        self.acknowledged: tuple[int, str, str] | None = None
        """The version that a flush has left on two hosts, and these hosts."""
        self.away: set[str] = set()
        self.cut = False
        self.link: Link | None = None
        self.lives: list[Life] = []
        self.abandoned: dict[int, int] = {}
        """For each epoch the newest step of its predecessors that it has."""
        self.known: set[int] = set()
        """Epochs of the arenas that the newest start has found."""
        self.begin("east", None)

    # -- lives -------------------------------------------------------------------------------------------------

    @property
    def life(self) -> Life:
        return self.lives[-1]

    def begin(self, host: str, source: str | None) -> None:
        """Start a process on a host, with another host's memory or its own."""
        self.epoch += 1
        place = self.folder / host / RUN
        step = 0
        if source is None:
            arena = self._create(place)
        elif source == host:
            arena = self._mine(place)
            step = arena.head_step
        else:
            step, arena = self._fetched(place, self.folder / source / RUN)
        disown(place)
        arena.take_over()
        arena.begin_epoch(self.epoch, again=False)
        # A round that did not reach its mark leaves newer copies.
        newest = step_of(arena.version[arena.intact()]).max(initial=0)
        self.abandoned[self.epoch] = max(step, int(newest))
        self.link = None
        # The clock is fast: copies that a dead process has left unfinished are waited for once.
        follower = Follower(arena, clock=itertools.count(0.0, 10.0).__next__)
        life = Life(host, self.epoch, f"{self.epoch:032x}", arena, HandOverQueue(place), step, follower)
        self.lives.append(life)
        if source is not None:
            self._check_found(arena)

    def _create(self, place: Path) -> Arena:
        shutil.rmtree(place, ignore_errors=True)
        arena = Arena.create(place, LAYOUT, run_id=RUN, epoch=self.epoch)
        arena.close()
        return arena

    def _mine(self, place: Path) -> Arena:
        arena = Arena.share(place, run_id=RUN)
        if arena is None:
            raise Violation(f"{place} has no arena any more")
        return arena

    def _fetched(self, place: Path, source: Path) -> tuple[int, Arena]:
        """Return a copy of an arena that stays in place, with all bytes and fields, as `arena.transfer` makes it."""
        found = self._mine(source)
        there = HandOverQueue(source).pending()
        arena = self._create(place)
        ids = np.flatnonzero(found.intact() & (found.version >= 0))
        if ids.size:
            data = read_rows(found, ids, np.empty(int(LAYOUT.partition_bytes[ids].sum()), np.uint8))
            arena.begin(ids)
            write_rows(arena, ids, data)
            arena.version[ids], arena.generation[ids] = found.version[ids], 2
        arena.reach(found.head_step)
        queue = HandOverQueue(place)
        for handover in there:
            queue.put(version=handover.version, ids=handover.ids, whole="", extras=handover.extras)
        if not (source / FILE).exists():
            raise Violation("fetching deletes")
        return found.head_step, arena

    # -- what happens ------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Take a step, and copy some of its partitions; the process may die while copying."""
        life = self.life
        if not life.alive:
            return
        life.step += 1
        ids = np.array(
            sorted(self.rng.sample(range(LAYOUT.partitions), self.rng.randint(1, LAYOUT.partitions)))
        )
        version = pack(life.arena.epoch, life.step)
        value = self.values.setdefault(version, len(self.values) % 251)
        torn = self.rng.random() < 0.05
        life.arena.begin(ids)
        _fill(life.arena, ids[: 1 if torn else None], value)
        if torn:
            life.alive = False
            self.counts["killed in a copy"] += 1
            return
        life.arena.end(ids, version)
        life.queue.put(version=version, ids=ids, whole="", extras={"step": life.step})
        life.arena.reach(life.step)

    def flush(self) -> None:
        """Copy everything at the newest step, and send it to the peer: acknowledged only after its mark."""
        life = self.life
        if not life.alive:
            return
        life.step += 1
        version = pack(life.arena.epoch, life.step)
        value = self.values.setdefault(version, len(self.values) % 251)
        life.arena.begin(EVERYTHING)
        _fill(life.arena, EVERYTHING, value)
        life.arena.end(EVERYTHING, version)
        life.arena.reach(life.step)
        if self._send(1 << 30):
            self.acknowledged = version, life.host, self.peer
            self.counts["flushed to a peer"] += 1

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
        """Kill the peer's daemon while it copies a batch: half of the rows are written, and generations are odd."""
        if self.cut or self.peer in self.away:
            return
        original = replicas.write_rows

        def half(arena: Arena, ids: Ids, data: Any, **_: Any) -> None:
            original(
                arena, ids[: ids.size // 2], data[: int(LAYOUT.partition_bytes[ids[: ids.size // 2]].sum())]
            )
            raise Killed

        replicas.write_rows = half  # type: ignore[attr-defined]
        try:
            self._send(1 << 30)
        except Killed:
            self.counts["peer killed in a batch"] += 1
            if self.acknowledged is not None and self.peer in self.acknowledged[1:]:
                # A flush is on two hosts; one of them has just torn a copy of it.
                self.acknowledged = None
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
        if self.acknowledged is not None:
            version = self.acknowledged[0]
            best = found[source]
            torn = source == life.host and not best.intact().all()
            if not torn and int(best.version[best.intact()].min(initial=1 << 60)) < version:
                raise Violation(f"{version} was acknowledged, and {best.version} is found")
        self.acknowledged = None
        self.counts["starts elsewhere" if target != life.host else "starts"] += 1
        self.known = {arena.epoch for arena in found.values()}
        self.begin(target, source)

    def _usable(self, host: str) -> Arena | None:
        try:
            arena = Arena.share(self.folder / host / RUN, run_id=RUN)
        except ScarError:
            return None
        return arena if arena is not None and (arena.version >= 0).any() else None

    # -- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that every copy that counts is complete and of its version, and hand-overs come after their copies."""
        for host in HOSTS:
            arena = self._usable(host)
            if arena is None:
                continue
            intact = arena.intact()
            for i in np.flatnonzero(intact & (arena.version >= 0)).tolist():
                if _values(arena, i) != {self.values[int(arena.version[i])]}:
                    raise Violation(f"{host}: partition {i} is torn")
            for handover in HandOverQueue(self.folder / host / RUN).pending():
                ids = handover.ids[intact[handover.ids]]
                if (arena.version[ids] < handover.version).any():
                    raise Violation(f"{host}: a hand-over is there before its copies")
            replica = read_owner(self.folder / host / RUN) is not None
            if replica and (epoch_of(arena.version[intact & (arena.version >= 0)]) > arena.epoch).any():
                raise Violation(f"{host}: a replica has copies of a later epoch than its own")

    def _check_found(self, arena: Arena) -> None:
        """Check that no copy is of a later step that an epoch abandoned, as long as copies of that epoch remain."""
        for version in arena.version[arena.intact() & (arena.version != NEVER)].tolist():
            for epoch, step in self.abandoned.items():
                later = epoch in self.known and epoch_of(version) < epoch < self.epoch
                if later and step_of(version) > step:
                    raise Violation(
                        f"a copy of epoch {epoch_of(version)}, step {step_of(version)} comes back"
                    )


def _fill(arena: Arena, ids: Ids, value: int) -> None:
    data = np.full(int(LAYOUT.partition_bytes[ids].sum()), value, np.uint8)
    write_rows(arena, ids, data)


def _values(arena: Arena, partition: int) -> set[int]:
    size = int(LAYOUT.partition_bytes[partition])
    return set(read_rows(arena, np.array([partition]), np.empty(size, np.uint8)).tolist())


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
