"""Kill training, remove its store, and run the same command again, to its end.

    python -m tests.adversarial.removed --rounds 100 --seed 3

A round trains with default options, kills the training process, sometimes stops or kills its daemon as well, removes
the store with `rm -rf`, and starts the same command again, all at random moments. Then the new store has the whole last
step, and nothing else; the new run was not told of a newer writer; and the dead run's saver has ended, and said why.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import scarctl
from scarctl.arena.folder import host_folder
from scarctl.daemon import client
from scarctl.daemon.__main__ import LOG
from scarctl.errors import ScarError
from scarctl.state.version import step_of
from scarctl.store import Store, verify
from tests.support import forkserver, stepper

PATIENCE = 60.0
"""Seconds after which an expected event counts as missing."""
DEEDS = ("nothing", "pause", "terminate", "kill")
"""What happens to the daemon while the store is removed."""


BAD = "newer writer", "saving has stopped", "saving fails", "another store", "Traceback"
"""What the second run must not say."""
ENDED = "another store was made in the place", "the store was deleted"
"""What the daemon says if it was still saving for the dead run when its store was removed."""


class Violation(Exception):
    """A promise was broken."""


@dataclass(frozen=True)
class Round:
    """What happens in one round. Times are in seconds."""

    number: int
    trained: float
    """From the first step until the training process is killed."""
    waited: float
    """From then until the store is removed."""
    began: float
    """From then until the command runs again."""
    steps: int
    """Steps of the second run."""
    daemon: str
    """One of `DEEDS`."""

    @staticmethod
    def draw(seed: int, number: int) -> Round:
        rng = random.Random(f"removed {seed} {number}")
        waits = [rng.choice((0.0, rng.uniform(0, 0.1), rng.uniform(0, 2))) for _ in range(3)]
        return Round(number, *waits, rng.choice((1, 20, 200)), rng.choices(DEEDS, (6, 2, 1, 1))[0])


class Yard:
    """A folder with the store and the memory of all rounds."""

    def __init__(self, folder: Path, arenas: Path) -> None:
        """Prepare. arenas: the folder for memory."""
        self.store, self.arenas, self.log = folder / "store", arenas, folder / "training.log"
        self.folder = host_folder(str(self.arenas))
        self.read = 0
        """Bytes of the daemon's log that earlier rounds have read."""
        self.met = 0
        """Rounds in which a saver met the removed store."""

    def start(self, steps: int) -> forkserver.Program:
        """Start the command, which writes what it logs into `log`."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("SCARCTL_")}
        with open(self.log, "wb") as log:
            return forkserver.Program(
                ["-m", "tests.adversarial.removed", "--train", str(self.store), str(steps)],
                env={**env, "SCARCTL_ARENA_DIR": str(self.arenas)},
                stdout=log,
                stderr=log,
                imports=(*forkserver.TORCH, "tests.support.stepper"),
            )

    def play(self, one: Round) -> None:
        """Play one round. Raises Violation."""
        first = self.start(1 << 30)
        try:
            wait_for(lambda: self.log.read_bytes().count(b"\n") > 1, "the first run's steps")
            time.sleep(one.trained)
            if first.poll() is not None:
                raise Violation(f"the first run ended: {self.log.read_text()}")
        finally:
            first.kill()
            first.wait()
        before, dead = Store.open(self.store), first.pid
        with self._meddled(one.daemon):
            time.sleep(one.waited)
            # It may fail while the daemon makes files there: a user calls it again.
            while subprocess.run(["rm", "-rf", str(self.store)], capture_output=True, check=False).returncode:
                pass
            time.sleep(one.began)
            second = self.start(one.steps)
            if one.daemon == "pause":
                time.sleep(one.waited)
        try:
            code = second.wait(PATIENCE)
        finally:
            second.kill()
        said = self.log.read_text()
        if code or any(word in said for word in BAD):
            raise Violation(f"the second run ended with {code}, and said: {said}")
        self._check_store(before, one.steps)
        self._check_end(before, dead, one)

    @contextmanager
    def _meddled(self, deed: str) -> Iterator[None]:
        """Stop the daemon inside, end it, or kill it."""
        status = client.ask_status(self.folder, patience=PATIENCE)
        if status is None or deed == "nothing":
            yield
            return
        pid = status["pid"]
        os.kill(pid, {"pause": signal.SIGSTOP, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}[deed])
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _check_store(self, before: Store, steps: int) -> None:
        store = Store.open(self.store)
        if store.id == before.id:
            raise Violation("the store was not made again")
        report = verify(store, read_data=True)
        if report.problems or report.orphans:
            raise Violation(f"the new store: {report.problems}, orphans: {report.orphans}")
        state = store.state(0)
        found = set(step_of(np.asarray(state.version)).tolist())
        if found != {steps} or state.seal is None:
            raise Violation(f"the new store has copies of steps {found}, not of {steps}")

    def _check_end(self, before: Store, dead: int, one: Round) -> None:
        """Check that nobody saves for the dead process any more, and that this is said."""

        def over() -> bool:
            status = client.ask_status(self.folder, patience=PATIENCE)
            return status is None or all(run["pid"] != dead for run in status["runs"])

        wait_for(over, "the end of the dead run's saver")
        whole = (self.folder / LOG).read_bytes()
        log = whole[
            self.read if self.read <= len(whole) else 0 :
        ].decode()  # a new one is begun when it is long
        self.read = len(whole)
        self.met += any(words in log for words in ENDED)
        if f"{before.url}: released" not in log and one.daemon != "kill":
            raise Violation(f"the daemon does not say that the dead run's saver has ended: {log}")
        if "newer writer" in log or "Traceback" in log:
            raise Violation(f"the daemon says: {log}")

    def end(self) -> None:
        """End the daemon."""
        with suppress(ScarError):
            client.ask(self.folder, "stop")
        wait_for(lambda: client.ask_status(self.folder, patience=PATIENCE) is None, "the end of the daemon")


def wait_for(happens: Callable[[], object], what: str) -> None:
    """Raise Violation if the condition does not become true for a long time."""
    end = time.monotonic() + PATIENCE
    while not happens():
        if time.monotonic() > end:
            raise Violation(f"waited {PATIENCE:.0f} s in vain: {what}")
        time.sleep(0.01)


def train(store: str, steps: int) -> None:
    """Train as README does, with default options."""
    model, optimizer = stepper.build()
    session = scarctl.attach(model, optimizer, store=store)
    session.resume()
    for _ in session.epochs(1):
        for step in session.batches(range(steps)):
            optimizer.step()
            print("step", step, flush=True)  # noqa: T201
            time.sleep(0.002)
    session.close()


def main() -> int:
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.removed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end when this time is over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="begin with this round")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="scarctl-removed-", dir=args.folder))
    (folder / "memory").mkdir()
    yard, started, done, violations = Yard(folder, folder / "memory"), time.monotonic(), Counter[str](), 0
    for number in range(args.first, args.rounds):
        if time.monotonic() - started > args.seconds:
            break
        one = Round.draw(args.seed, number)
        try:
            yard.play(one)
        except Violation as violation:
            violations += 1
            print(f"{one}: {violation}", file=sys.stderr, flush=True)  # noqa: T201
        done[one.daemon] += 1
        shutil.rmtree(yard.store, ignore_errors=True)
    yard.end()
    shutil.rmtree(folder)
    counts = ", ".join(f"{deed} {done[deed]}" for deed in DEEDS)
    print(  # noqa: T201
        f"seed {args.seed}: {sum(done.values())} rounds in {time.monotonic() - started:.0f} s, by what happened to the "
        f"daemon: {counts}; a saver met the removed store in {yard.met}; {violations} violations"
    )
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
