"""Power loss: what a store is after the machine stopped at any moment, and what each fsync is good for.

    python -m tests.adversarial.power --cases 5000
    python -m tests.adversarial.power --mutants

A history is the life of a store: processes that open it, use it, and are killed, and at times an fsync that fails.
It is recorded at the system calls (`tests.adversarial.disk`). A case takes a moment of a history and a disk that may be
there after a power loss, makes that disk, and checks that what was acknowledged is there and that the next writer goes
on; at times the power fails again.

A mutant is the same without the fsyncs of one call site. Each has to be caught, or to be of no use for a reason.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from scarctl.errors import ScarError
from scarctl.store import Store
from scarctl.store.prune import Retention, plan_prune, prune
from tests.adversarial.disk import Disk, Loss, Recorder
from tests.adversarial.witness import Violation, Witness, check, check_goes_on
from tests.adversarial.workload import KINDS, Message, Player, draw, drop, name_newest
from tests.store.helpers import memory_folder
from tests.support.failpoint import Killed

PER_HISTORY = 25
"""Cases per history."""
PLACE = "a/run"
"""The store's path, in a folder that exists and is safe."""

NEEDLESS = {
    "_sync_visible < create_exclusive: folder a/run": (
        "a store that holds nothing yet may be forgotten: a process that makes a folder in it syncs its name first; "
        "but a process to which it was reported has to find it"
    ),
    **dict.fromkeys(
        (
            "prepare: folder a/run/layout",
            "prepare: folder a/run/lanes/N/seg",
        ),
        "a process that puts a file there syncs the folder then; logs and snapshots matter: others act on their names",
    ),
}
"""Call sites whose fsync has no effect on safety, and why it stays."""


class History:
    """The recorded life of one store."""

    def __init__(self, folder: Path, seed: tuple[int, ...], witness: Witness | None = None) -> None:
        """seed: its last number also says how a new store's copies are encoded. witness: of a store that is there."""
        self.before = Witness(KINDS[seed[-1] % len(KINDS)]) if witness is None else witness
        self.told: list[tuple[int, Message]] = []
        """Messages, and the number of events before them."""
        self.lives: list[int] = []
        """The number of events before each process."""
        self._rng = np.random.default_rng(seed)
        self._recorder = Recorder(folder)
        self.first = len(self._recorder.events)
        """The number of events at the start."""
        self._now = self.before.copy()
        with self._recorder:
            for _ in range(int(self._rng.integers(1, 4)) if witness is None else 1):
                self._live(str(folder / PLACE))
        self._recorder.check_complete()
        self.events = self._recorder.events
        self.sites = {event.site for event in self.events if event.site}

    def _tell(self, message: Message) -> None:
        self.told.append((len(self._recorder.events), message))
        self._now.take(message)

    def _live(self, url: str) -> None:
        """Run one process, killed or not."""
        rng, recorder = self._rng, self._recorder
        seed = int(rng.integers(1 << 30))
        encoding = self.before.encoding
        player = Player(url, self._tell, seed=seed, stamp=self._now.stamp, faulty=True, encoding=encoding)
        acts = draw(rng, int(rng.integers(3, 16)))
        self.lives.append(len(recorder.events))
        how = rng.random()
        if how < 0.3:
            recorder.die_at = recorder.calls + int(rng.integers(1, 60 if rng.random() < 0.4 else 700))
        elif how < 0.7:  # changes that are not safe yet, on which the next process builds
            recorder.die_synced = int(rng.integers(1, 16 if rng.random() < 0.5 else 120))
        if rng.random() < 0.3:
            recorder.fail_sync = int(rng.integers(1, 200))
        recorder.before_fsync = lambda path: self._beside(player, path)
        with contextlib.suppress(Killed):
            player.play(acts)
            if rng.random() < 0.5:
                player.close()
        recorder.die_at = recorder.die_synced = recorder.fail_sync = recorder.before_fsync = None
        recorder.dead = True
        with contextlib.suppress(Killed):
            player.close()  # frees the lock, and does nothing else
        recorder.dead = False

    def _beside(self, player: Player, path: str) -> None:
        """Run another process at the moment when the writer's record is visible and not yet durable."""
        chance = 0.5 if player.sealing else 0.02
        if "/log/" not in path or self._rng.random() > chance:
            return
        recorder = self._recorder
        hook, recorder.before_fsync = recorder.before_fsync, None
        fails, recorder.fail_sync = recorder.fail_sync, None
        store = Store.open(player.url)
        what = self._rng.random()
        if what < 0.7:
            name_newest(store, str(self._rng.choice(["c", "d"])), self._tell)
        elif what < 0.9:
            drop(store, str(self._rng.choice(["c", "d"])), self._tell)
        else:
            prune(store, plan_prune(store, Retention()))
        recorder.before_fsync, recorder.fail_sync = hook, fails

    def witness(self, moment: int) -> Witness:
        """Return what was acknowledged or begun before an event."""
        witness = self.before.copy()
        for at, message in self.told:
            if at > moment:
                break
            witness.take(message)
        return witness

    def moment(self, rng: np.random.Generator, site: str | None = None) -> int:
        """Choose when the power fails: at any event; often right after an acknowledgement or (of `site`) a skipped
        sync, and right after a process has begun where another was killed.
        """
        first, last = self.first, len(self.events)
        after = [n + 1 for n, event in enumerate(self.events) if event.site and event.site == site]
        if after and rng.random() < 0.7:
            return min(last, int(rng.choice(after)) + int(rng.integers(0, 5 if rng.random() < 0.5 else 40)))
        where = rng.random()
        if where < 0.3:
            done = [at for at, message in self.told if "done" in message] or [first]
            return int(rng.choice(done))
        if where < 0.5:
            return min(last, int(rng.choice(self.lives)) + int(rng.integers(60)))
        return int(rng.integers(first, last + 1))


def fail(
    history: History, rng: np.random.Generator, folder: Path, *, without: str | None = None
) -> Counter[str]:
    """Play one case: the power fails, and the disk is checked. Raises Violation."""
    moment = history.moment(rng, without)
    disk = Disk()
    disk.play(history.events[:moment], without=without)
    unsafe = disk.unsafe()
    disk.write(folder, Loss.draw(rng, unsafe))
    witness = history.witness(moment)
    url = str(folder / PLACE)
    counts = Counter({"things not safe": unsafe, "acknowledged": witness.acknowledged})
    try:
        check(url, witness)
        if rng.random() < 0.1:
            seed = int(rng.integers(1 << 30))
            again = History(folder, (seed,), witness)
            counts += fail(again, rng, folder.with_name(f"{folder.name}-again"), without=without)
            counts["failed twice"] += 1
        else:
            check_goes_on(url, witness, tidy=rng.random() < 0.25)
    except ScarError as error:
        raise Violation(f"{type(error).__name__}: {error}\n{traceback.format_exc()}") from error
    except Violation as violation:
        raise Violation(f"{violation} (power failed after event {moment})") from violation
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return counts


class Run:
    """Histories by number, and the cases of each."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.folder = memory_folder()
        self._history: tuple[int, History] | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)

    def history(self, number: int) -> History:
        if self._history is None or self._history[0] != number:
            folder = self.folder / "history"
            folder.mkdir()
            self._history = (number, History(folder, (self.seed, number)))
            shutil.rmtree(folder)
        return self._history[1]

    def case(self, number: int) -> Counter[str]:
        history = self.history(number // PER_HISTORY)
        return fail(history, np.random.default_rng((self.seed, number, 1)), self.folder / "case")

    def mutants(self, histories: int, most: int, part: str = "") -> Iterator[tuple[str, int, str]]:
        """Yield call sites with `part` in the name, cases until the missing fsync was noticed, and the violation, or
        "".
        """
        all_of_them = [self.history(number) for number in range(histories)]
        for site in sorted(set.union(*(history.sites for history in all_of_them))):
            if part not in site:
                continue
            having = [history for history in all_of_them if site in history.sites]
            rng = np.random.default_rng((self.seed, len(site), 2))
            found, number = "", 0
            while not found and number < most:
                number += 1
                try:
                    fail(having[int(rng.integers(len(having)))], rng, self.folder / "case", without=site)
                except Violation as violation:
                    found = str(violation).split("\n", 1)[0]
            yield site, number, found


def reason_needless(site: str) -> str | None:
    """Return why this fsync may be left out, or None."""
    return NEEDLESS.get(site)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.power", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="go on from this case")
    parser.add_argument("--site", default="", help="of the mutants only those with this in their name")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end when this time is over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutants", action="store_true", help="leave out each fsync instead")
    args = parser.parse_args()
    started = time.monotonic()
    with Run(args.seed) as run:
        bad = (
            _mutants(run, args.site)
            if args.mutants
            else _cases(run, args.first, args.first + args.cases, started + args.seconds)
        )
    print(f"seed {args.seed}, {time.monotonic() - started:.0f} s")  # noqa: T201
    return bad


def _cases(run: Run, first: int, last: int, until: float) -> int:
    counts: Counter[str] = Counter()
    for number in range(first, last):
        if time.monotonic() > until:
            last = number
            break
        try:
            counts += run.case(number)
        except Violation as violation:
            counts["violations"] += 1
            print(f"case {number}: {violation}", flush=True)  # noqa: T201
            print(f"again: --seed {run.seed} --first {number} --cases 1", flush=True)  # noqa: T201
    histories = (last - 1) // PER_HISTORY - first // PER_HISTORY + 1
    print(f"{last - first} power losses in {histories} histories: {counts['violations']} violations")  # noqa: T201
    print(  # noqa: T201
        f"per case {counts['things not safe'] / (last - first):.1f} names and files not safe, "
        f"{counts['acknowledged'] / (last - first):.1f} acknowledgements; "
        f"{counts['failed twice']} failed a second time"
    )
    return bool(counts["violations"])


def _mutants(run: Run, part: str) -> int:
    caught = needless = missed = 0
    for site, number, found in run.mutants(histories=24, most=800, part=part):
        why = reason_needless(site)
        if found:
            caught += 1
        elif why is not None:
            needless += 1
        else:
            missed += 1
        verdict = (
            f"caught by case {number}: {found:.100}"
            if found
            else f"NOT caught in {number}: {why or 'MISSED'}"
        )
        print(f"{site}: {verdict}", flush=True)  # noqa: T201
    print(f"{caught} mutants caught, {needless} needless for a reason, {missed} missed")  # noqa: T201
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
