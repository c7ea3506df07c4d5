"""Crashes: a process that writes to a store is killed at every call that changes something, and at random moments.

    python -m tests.adversarial.crash calls              every system call, right before and right after it
    python -m tests.adversarial.crash requests           every request of a store in memory, as of an object store
    python -m tests.adversarial.crash kills --cases 500  SIGKILL at random, of a collecting writer, and one next to it
    python -m tests.adversarial.crash prunes             SIGKILL at random of `scarctl prune`

After each the store is what was acknowledged, or what was begun; and the next writer continues.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from scarctl.errors import NoStore, ScarError
from scarctl.state.encodings import Encoding
from scarctl.store import Store
from scarctl.store.prune import Retention, plan_prune, prune
from tests.adversarial.witness import Violation, Witness, check, check_goes_on
from tests.adversarial.workload import KINDS, SCRIPT, Message, Player, draw, drop, name_newest
from tests.store.helpers import memory_folder
from tests.support.failpoint import CALLS, Fault, Killed, Mortal, in_child, kill_myself
from tests.support.places import Memory

Case = Callable[[], Counter[str]]
T = TypeVar("T")
NAMES = (*CALLS, "open", "pwrite", "ftruncate")
REQUESTS = ("pipe_file", "put_file", "_rm")


def changes(name: str, *args: object) -> bool:
    """Return whether a call changes files: of the openings, those that create one."""
    return name != "open" or bool(int(args[1]) & os.O_CREAT)  # type: ignore[call-overload]


class Told:
    """Messages of processes, in a file: they survive the death of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_bytes(b"")

    def writer(self) -> Callable[[Message], None]:
        """Return a function that writes messages of another process, without the counted calls."""
        file = self.path.open("ab", buffering=0)
        return lambda message: (file.write(json.dumps(message).encode() + b"\n"), None)[1]

    def hear(self, witness: Witness) -> None:
        for line in self.path.read_bytes().splitlines():
            witness.take(json.loads(line))


class Scripted(Generic[T]):
    """Plays the script life by life, with a process in every life that dies at its k-th call."""

    url: str

    def cases(self) -> Iterator[Case]:
        """Yield numbered cases for each kind of store: before and after each call of each life."""
        empty = self.save()
        for encoding in KINDS[:2]:
            self.restore(empty)
            yield from self._cases(encoding)

    def _cases(self, encoding: Encoding) -> Iterator[Case]:
        witness = Witness(encoding)
        for life, acts in enumerate(SCRIPT):
            saved, start = self.save(), witness.copy()
            player = Player(self.url, witness.take, seed=life, stamp=witness.stamp, encoding=encoding)
            with self.counted() as fault:
                player.play(acts)
                player.close()
            after = self.save()
            for k in range(1, fault.count + 1):
                for late in (False, True):
                    yield partial(self._case, life, start, saved, k, late)
            self.restore(after)

    def _case(self, life: int, start: Witness, saved: T, k: int, late: bool) -> Counter[str]:
        self.restore(saved)
        witness = start.copy()
        if not self.dies(life, witness, k, late):
            raise Violation(f"life {life} ended by itself before call {k}")
        check(self.url, witness)
        check_goes_on(self.url, witness)
        return Counter({"acknowledged": witness.acknowledged})

    def counted(self) -> Fault:
        """Return the fault that counts the calls of a whole life."""
        raise NotImplementedError

    def dies(self, life: int, witness: Witness, k: int, late: bool) -> bool:
        """Play a life until or right after the k-th call. Return False if it has ended before."""
        raise NotImplementedError

    def save(self) -> T:
        raise NotImplementedError

    def restore(self, saved: T) -> None:
        raise NotImplementedError


class Calls(Scripted[Path]):
    """Uses a local folder: a forked process is killed by SIGKILL at a system call."""

    def __init__(self) -> None:
        self.folder = memory_folder()
        self.url = str(self.folder / "there" / "a" / "run")
        (self.folder / "there").mkdir()

    def counted(self) -> Fault:
        return Fault(0, kill_myself, NAMES, counts=changes)

    def dies(self, life: int, witness: Witness, k: int, late: bool) -> bool:
        told = Told(self.folder / "told")

        def work() -> None:
            player = Player(
                self.url, told.writer(), seed=life, stamp=witness.stamp, encoding=witness.encoding
            )
            with Fault(k, kill_myself, NAMES, after=late, counts=changes):
                player.play(SCRIPT[life])
                player.close()

        killed = os.WIFSIGNALED(in_child(work))
        told.hear(witness)
        return killed

    def save(self) -> Path:
        place = self.folder / f"saved-{len(os.listdir(self.folder))}"
        shutil.copytree(self.folder / "there", place)
        return place

    def restore(self, saved: Path) -> None:
        shutil.rmtree(self.folder / "there")
        shutil.copytree(saved, self.folder / "there")

    def close(self) -> None:
        shutil.rmtree(self.folder)


class Requests(Scripted[dict[str, bytes]]):
    """Uses a store without folders, locks and fsyncs, on which a dead process cannot act."""

    def __init__(self) -> None:
        self.raw = Memory("/attack/run")
        self.url = "memory://attack/run"
        self.close()

    def counted(self) -> Fault:
        return Fault(0, kill_myself, REQUESTS, owner=type(self.raw.fs))

    def dies(self, life: int, witness: Witness, k: int, late: bool) -> bool:
        with Mortal(k, REQUESTS, owner=type(self.raw.fs), after=late) as mortal:
            player = Player(self.url, witness.take, seed=life, stamp=witness.stamp, encoding=witness.encoding)
            with contextlib.suppress(Killed):
                player.play(SCRIPT[life])
                player.close()
        return mortal.dead

    def save(self) -> dict[str, bytes]:
        return {name: self.raw.get(name) for name in self.raw.names()}

    def restore(self, saved: dict[str, bytes]) -> None:
        self.close()
        for name, data in saved.items():
            self.raw.put(name, data)

    def close(self) -> None:
        if self.raw.fs.exists(self.raw.root):
            self.raw.fs.rm(self.raw.root, recursive=True)


class Kills:
    """Uses one store, in which each process works until it is killed, and the next one continues."""

    NEW_STORE = 50
    """Number of kills after which there is a new store."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.folder = memory_folder()
        self.first = seed
        self.number = 0

    def cases(self) -> Iterator[Case]:
        while True:
            if self.number % self.NEW_STORE == 0:
                self.url = str(self.folder / str(self.number) / "run")
                self.witness = Witness(KINDS[(self.first + self.number // self.NEW_STORE) % len(KINDS)])
            self.number += 1
            yield self._case

    def _case(self) -> Counter[str]:
        rng = self.rng
        told = Told(self.folder / "told")
        acts = draw(rng, 2000)
        acts = [act for act in acts if act[0] != "back"] if self.number % 3 == 0 else acts
        seed, stamp, encoding = int(rng.integers(1 << 30)), self.witness.stamp, self.witness.encoding
        player = partial(Player, self.url, seed=seed, stamp=stamp, encoding=encoding)
        children = [_fork(lambda: player(told.writer()).play(acts))]
        if self.number % 3 == 0 and self.number % self.NEW_STORE > 1:
            children.append(_fork(lambda: _beside(self.url, told.writer(), seed)))
        # A process that was just forked needs a moment; after that any moment is as good as another.
        for pid in children:
            time.sleep(float(rng.choice([0.05, 0.2, 0.6, 1.2])) * rng.random())
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
                raise Violation("a process ended by itself: see above")
        before = self.witness.acknowledged
        told.hear(self.witness)
        check(self.url, self.witness)
        if self.number % 10 == 0:
            copy = self.folder / "copy"
            shutil.copytree(self.url, copy)
            check_goes_on(str(copy), self.witness.copy())
            shutil.rmtree(copy)
        return Counter({"acknowledged": self.witness.acknowledged - before, "killed": len(children)})

    def close(self) -> None:
        shutil.rmtree(self.folder)


def _fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def _beside(url: str, tell: Callable[[Message], None], seed: int) -> None:
    """Do what other processes may do at any time."""
    rng = np.random.default_rng(seed)
    while True:
        try:
            store = Store.open(url)
        except NoStore:  # not yet
            continue
        what = rng.random()
        if what < 0.4:
            name_newest(store, str(rng.choice(["c", "d"])), tell)
        elif what < 0.7:
            drop(store, str(rng.choice(["c", "d"])), tell)
        else:
            plan = plan_prune(store, Retention())
            if plan.writer is not None:  # otherwise the writer would do this, as it finds no other process
                prune(store, plan)


class Prunes:
    """A writer works and closes; then `scarctl prune`, in another process, is killed while it has the lock."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.folder = memory_folder()
        self.url = str(self.folder / "run")
        self.witness = Witness(KINDS[seed % len(KINDS)])

    def cases(self) -> Iterator[Case]:
        while True:
            yield self._case

    def _case(self) -> Counter[str]:
        rng, witness = self.rng, self.witness
        seed = int(rng.integers(1 << 30))
        player = Player(self.url, witness.take, seed=seed, stamp=witness.stamp, encoding=witness.encoding)
        acts = [("commit",)] * 8
        player.play(
            [("open",), *acts, ("seal", 0.5), ("snapshot", "a"), *acts, ("seal", 0.5), ("snapshot", "b")]
        )
        player.close()
        command = [sys.executable, "-m", "scarctl", "snapshot", "delete", "a", "--yes", "--store", self.url]
        witness.take({"begin": "drop", "name": "a"})
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lock = Path(self.url) / "lock"
        while process.poll() is None and lock.read_text().split()[:1] != [str(process.pid)]:
            time.sleep(0.0005)
        time.sleep(0.06 * rng.random())
        process.kill()
        code = process.wait()
        if code == 0:
            witness.take({"done": "drop", "name": "a"})
        elif code != -signal.SIGKILL:
            raise Violation(f"snapshot delete ended with {code}")
        check(self.url, witness)
        return Counter({"killed": code != 0, "too late": code == 0})

    def close(self) -> None:
        shutil.rmtree(self.folder)


ATTACKS: dict[str, Callable[[int], Calls | Requests | Kills | Prunes]] = {
    "calls": lambda _: Calls(),
    "requests": lambda _: Requests(),
    "kills": Kills,
    "prunes": Prunes,
}
USUAL = {"calls": None, "requests": None, "kills": 500, "prunes": 100}
"""Default numbers of cases; None: all."""


def attack(
    what: str,
    *,
    seed: int = 0,
    first: int = 0,
    cases: int | None = None,
    every: int = 1,
    until: float = float("inf"),
) -> Counter[str]:
    """Run cases `first`, `first` + `every`, ...; print those that fail. Return counts."""
    counts: Counter[str] = Counter()
    attacker = ATTACKS[what](seed)
    try:
        for number, case in enumerate(attacker.cases()):
            if (cases is not None and counts["cases"] >= cases) or time.monotonic() > until:
                break
            if number < first or (number - first) % every:
                continue
            counts["cases"] += 1
            try:
                counts += case()
            except (Violation, ScarError) as violation:
                counts["violations"] += 1
                print(f"{what} {number}: {type(violation).__name__}: {violation}", flush=True)  # noqa: T201
                if isinstance(attacker, Scripted):
                    print(f"again: {what} --first {number} --cases 1", flush=True)  # noqa: T201
                else:
                    print(f"seed {seed}; later cases need this one's store: ended", flush=True)  # noqa: T201
                    break
    finally:
        attacker.close()
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.adversarial.crash",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="*", help=f"of {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--cases", type=int)
    parser.add_argument("--first", type=int, default=0, help="begin with this case")
    parser.add_argument("--every", type=int, default=1, help="take each so manieth case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end when this time is over")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := set(args.what) - set(ATTACKS):
        parser.error(f"no attack {', '.join(sorted(unknown))}")
    violations = 0
    for what in args.what or ATTACKS:
        started = time.monotonic()
        cases = USUAL[what] if args.cases is None else args.cases
        until = started + args.seconds
        counts = attack(what, seed=args.seed, first=args.first, cases=cases, every=args.every, until=until)
        rest = ", ".join(f"{n:,} {name}" for name, n in counts.items() if name not in ("cases", "violations"))
        print(f"{what}: {counts['cases']} cases, {counts['violations']} violations; {rest}")  # noqa: T201
        print(f"seed {args.seed}, {time.monotonic() - started:.0f} s", flush=True)  # noqa: T201
        violations += counts["violations"]
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
