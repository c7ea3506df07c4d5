"""Run an episode's processes, apply the events of its rounds, and let the witness check."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from scarctl.arena.folder import arena_folder
from scarctl.errors import ScarError
from tests.adversarial.torture import trainer
from tests.adversarial.torture.episode import Episode, Round
from tests.adversarial.torture.witness import (
    Copies,
    Failed,
    Log,
    Witness,
    check_verifies,
    open_store,
    stored_steps,
)

PATIENCE = 30.0
"""Seconds after which an expected event counts as missing."""


class Rack:
    """One episode in one folder. Trainers are forked from this process, which has already imported torch."""

    def __init__(self, episode: Episode, folder: Path) -> None:
        self.episode = episode
        self.folder = folder
        self.store = folder / "store"
        self.arenas = folder / "arenas"
        self.arenas.mkdir(parents=True)
        os.environ["SCARCTL_ARENA_DIR"] = str(self.arenas)
        os.environ["SCARCTL_DAEMON"] = "1"
        self.witness = Witness(partitions=64 // episode.rows)
        self.copies = Copies(self.store, episode.rows)
        self.pid = 0
        self.log: Log | None = None
        self.starts = 0
        self.excused = 0

    # -- processes ----------------------------------------------------------------------------------------------

    def ensure_trainer(self) -> None:
        """Start a training process unless one is running."""
        if self.pid:
            return
        self.starts += 1
        path = self.folder / f"trainer-{self.starts:03d}.log"
        path.touch()
        self.log = Log(path)
        self.pid = os.fork()
        if self.pid == 0:
            self._be_the_trainer(path)

    def _be_the_trainer(self, path: Path) -> None:
        status = 1
        try:
            errors = os.open(path.with_suffix(".err"), os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(errors, 2)
            log = os.open(path, os.O_WRONLY | os.O_APPEND)
            seed = f"{self.episode.seed} {self.episode.number} trainer {self.starts}"
            status = trainer.run(self.episode, self.store, log, seed)
        finally:
            os._exit(status)

    def daemons(self) -> list[int]:
        """Return the processes that are, or are becoming, this episode's daemon."""
        wanted = [b"scarctl.daemon", os.fsencode(arena_folder(str(self.arenas), "x").parent)]
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if entry.joinpath("cmdline").read_bytes().split(b"\0")[-3:-1] == wanted:
                    found.append(int(entry.name))
        return found

    def listen(self) -> None:
        """Read the trainer's messages."""
        if self.log is not None:
            for message in self.log.read():
                self.witness.take(message)

    def trainer_ended(self) -> bool:
        """Return whether the trainer is dead; then reap it, and read its last messages."""
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = 0
        self.listen()
        return not self.pid

    def wait_for(self, what: str, happens: Callable[[], bool]) -> None:
        """Raise Failed if the condition does not become true for a long time."""
        end = time.monotonic() + PATIENCE
        while not happens():
            if time.monotonic() > end:
                self.signal("trainer", signal.SIGUSR2)  # its arena is in this folder
                time.sleep(0.2)
                raise Failed(f"waited {PATIENCE:.0f} s in vain: {what}")
            time.sleep(0.01)

    def signal(self, target: str, number: int) -> None:
        """Send a signal to "trainer", "daemon" or "both"."""
        pids = [] if target == "trainer" else self.daemons()
        if target != "daemon" and self.pid:
            pids.append(self.pid)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    @contextmanager
    def paused(self, target: str) -> Iterator[None]:
        """Stop the process inside this context."""
        self.signal(target, signal.SIGSTOP)
        if target != "daemon" and self.pid:
            self.wait_for("the trainer to stand still", lambda: state_of(self.pid) in "TZ")
        try:
            yield
        finally:
            self.signal(target, signal.SIGCONT)

    # -- a round ------------------------------------------------------------------------------------------------

    def play(self, event: Round) -> None:
        """Play one round. Raises Failed."""
        self.ensure_trainer()
        time.sleep(event.delay)
        if self.trainer_ended():
            self.check_gave_up()
            self.ensure_trainer()
        settles = event.settle and event.kind in ("kill trainer", "terminate trainer")
        if settles:
            self.check_goes_on()  # the daemon runs and serves the trainer
        self.act(event)
        if event.kind.startswith(
            ("kill trainer", "kill both", "terminate trainer", "terminate both", "reboot")
        ):
            self.wait_for("the trainer to die", self.trainer_ended)
            if settles:
                self.check_settles()
        elif event.settle:
            self.check_goes_on()
        self.check_store()

    def act(self, event: Round) -> None:
        """Apply the event of the round."""
        match event.kind:
            case "kill trainer while the daemon is paused":
                with self.paused("daemon"):
                    self.signal("trainer", signal.SIGKILL)
                    self.wait_for("the trainer to die", self.trainer_ended)
                    self.ensure_trainer()  # it meets a daemon that does not answer
                    time.sleep(event.pause)
                self.signal("trainer", signal.SIGKILL)
            case "kill daemon while the trainer is paused":
                with self.paused("trainer"):
                    self.signal("daemon", signal.SIGKILL)
                    time.sleep(event.pause)
            case "reboot":
                self.signal("both", signal.SIGKILL)
                self.wait_for("the trainer to die", self.trainer_ended)
                self.wait_for("the daemon to die", lambda: not self.kill_daemons())
                shutil.rmtree(arena_folder(str(self.arenas), "x").parent, ignore_errors=True)
                self.forget_memory()
            case _:
                verb, target = event.kind.split()
                if verb == "pause":
                    with self.paused(target):
                        time.sleep(event.pause)
                else:
                    self.signal(target, {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}[verb])

    def kill_daemons(self) -> list[int]:
        """Send SIGKILL to the daemons, and return their ids."""
        self.signal("daemon", signal.SIGKILL)
        return self.daemons()

    def forget_memory(self) -> None:
        """Remove the machine's memory: the next process may resume from the store's newest step."""
        store = open_store(self.store)
        steps = stored_steps(store, self.witness.handed.size) if store else np.full(1, -1)
        if store:
            store.close()
        self.witness.least = max(0, min(self.witness.least, int(steps.max())))
        self.witness.handed = np.minimum(self.witness.handed, steps)
        self.witness.memory_lost = True

    def check_gave_up(self) -> None:
        """Raise Failed unless the trainer that has ended by its own decision could not continue without the daemon."""
        if len(self.witness.gave_up) <= self.excused:
            raise Failed("the trainer ended by itself")
        self.excused = len(self.witness.gave_up)

    # -- checks -------------------------------------------------------------------------------------------------

    def check_store(self) -> None:
        """Check that the store verifies, has no copy older than an acknowledged one, and only complete copies.

        The trainer is stopped meanwhile, so that it cannot roll back after its messages were read; the daemon
        continues.
        """
        with self.paused("trainer"):
            self.trainer_ended()
            acknowledged = self.witness.acknowledged
            store = open_store(self.store)
            if store is None:
                if (acknowledged >= 0).any():
                    raise Failed("the store is gone")
                return
            try:
                steps = stored_steps(store, acknowledged.size)
                check_verifies(store)
                self.copies.check(store, self.witness)
            except ScarError as error:
                raise Failed(f"the store cannot be read: {error}") from error
            finally:
                store.close()
        behind = np.flatnonzero(steps < acknowledged)
        if behind.size:
            i = int(behind[0])
            raise Failed(
                f"partition {i} is of step {steps[i]} in the store, {acknowledged[i]} was acknowledged"
            )

    def check_settles(self) -> None:
        """Check that without its trainer the daemon makes every complete copy in memory durable."""
        self.wait_for("the daemon to save what was in memory", lambda: not self._behind().size)

    def _behind(self) -> np.ndarray:
        """Return the partitions of which the store has an older copy than memory has."""
        store = open_store(self.store)
        if store is None:
            return np.empty(0, np.int64)
        handed = self.witness.handed
        steps = stored_steps(store, handed.size)
        store.close()
        return np.flatnonzero(steps < handed)

    def check_goes_on(self) -> None:
        """Check that the trainer trains, and its steps become durable again."""
        seen = int(self.witness.step)

        def further() -> bool:
            if self.trainer_ended():
                self.check_gave_up()
                self.ensure_trainer()
            # A rollback may remove it: then the mark exists.
            return bool(self.witness.acknowledged.max() > min(seen, self.witness.step - 1))

        self.wait_for("progress after the event to become durable", further)

    # -- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Close the run: then the store has everything of the last step, and memory has nothing."""
        (self.folder / trainer.STOP).touch()
        while self.witness.closed is None:
            self.ensure_trainer()
            self.wait_for("the trainer to end", self.trainer_ended)
            if self.witness.closed is None:
                self.check_gave_up()
        closed = self.witness.closed
        self.check_store()
        store = open_store(self.store)
        assert store is not None
        steps = stored_steps(store, self.witness.handed.size)
        store.close()
        # A run that ends before its first step has nothing to save.
        if set(steps.tolist()) != {closed["closed"] or -1}:
            raise Failed(f"closed after step {closed['closed']}, the store has steps {set(steps.tolist())}")
        self.wait_for("the daemon to end", lambda: not self.daemons())
        left = [
            p.name
            for p in self.arenas.rglob("*")
            if p.is_file() and p.name not in ("daemon.lock", "daemon.log")
        ]
        if left:
            raise Failed(f"left in memory: {left}")

    def end(self) -> None:
        """Kill all remaining processes."""
        self.signal("both", signal.SIGKILL)
        with suppress(Failed):
            self.wait_for("the trainer to die", self.trainer_ended)
        if self.pid:
            print(f"process {self.pid} does not die", file=sys.stderr)  # noqa: T201
        while self.kill_daemons():
            time.sleep(0.01)


def state_of(pid: int) -> str:
    """Return the state of a process as in /proc: T is stopped, Z is dead."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
