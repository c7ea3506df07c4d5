"""Keep the runs of a host: which process has claimed which store, and when each run and the daemon end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scarctl.daemon.crowd import full, most_sessions
from scarctl.daemon.lifecycle import Instruction, Lifecycle, Phase, Release
from scarctl.daemon.run import Owner, Run
from scarctl.daemon.status import RunStatus
from scarctl.errors import Contention, UsageError
from scarctl.peers.lender import Loan
from scarctl.store import Store

log = logging.getLogger("scarctl")

_LOOK_SECONDS = 1.0
"""Seconds after which a request is found although its announcement was lost."""
_PATIENCE = 10.0
"""Seconds that a peer waits for a run to be released."""


class Runs:
    """The runs by the id of their store. Drives `Lifecycle`; `ended` is set when the daemon has to end."""

    def __init__(
        self,
        folder: Path,
        hosting: Callable[[], bool] = lambda: False,
        wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin without runs. folder: folder of the daemon; each run's arena has a folder in it.

        hosting: returns whether a peer sends to a replica on this host. wanted: see `Lifecycle.tick`.
        """
        self._hosting, self._wanted_elsewhere = hosting, wanted
        self.ended = threading.Event()
        self.changed = threading.Condition(threading.RLock())
        """Held only briefly: opening and releasing a run take long, and run without it."""
        self.life = Lifecycle()
        self._folder = folder
        self._runs: dict[str, Run] = {}
        self._look_at = 0.0
        self._loans: dict[str, list[Loan]] = {}
        """Arenas that other hosts are fetching, by the id of their run."""
        self._wanted: list[str] = []
        """Runs that training processes of this host are about to claim."""
        self._claiming = 0
        """Claims in progress: opening a remote store may take longer than the idle timeout."""
        self.claims = 0
        """Number of runs that have begun."""

    def look_after(self, *, terminated: bool) -> None:
        """Find runs whose training process has died, and runs that are finished. Wake savers, and report the time."""
        now = time.monotonic()
        with self.changed:
            if terminated:
                self._obey(self.life.terminate(now))
            for run in list(self._runs.values()):
                phase = self.life.runs[run.id]
                if phase is Phase.ATTACHED and not run.trainer_lives():
                    self._trainer_gone(run)
                elif phase is Phase.ORPHANED and _finished(run):
                    self._obey(self.life.settled(run.id))
                if now >= self._look_at:
                    run.saver.notify()
            if now >= self._look_at:
                self._look_at = now + _LOOK_SECONDS
            if not self._claiming:
                self._obey(self.life.tick(now, hosting=self._hosting(), wanted=self._wanted_elsewhere))

    def _trainer_gone(self, run: Run) -> None:
        log.info("%s: its training process has ended", run.store.url)
        self.life.trainer_gone(run.id)

    def _obey(self, instructions: list[Instruction]) -> None:
        """Carry out the state machine's instructions. The caller holds the lock."""
        for instruction in instructions:
            if isinstance(instruction, Release):
                run = self._runs[instruction.run]
                threading.Thread(target=self._release, args=(run,), name="scarctl-release").start()
            else:
                self.ended.set()

    def _release(self, run: Run) -> None:
        try:
            run.saver.release()
            run.end_sending()
            log.info("%s: released", run.store.url)
        except Exception:
            log.exception("%s: could not be released properly", run.store.url)
        with self.changed:
            del self._runs[run.id]
            self._obey(self.life.released(run.id))
            self.changed.notify_all()

    def claim(self, store: Store, pid: int, owner: Owner) -> Run:
        """Begin a run of the training process `pid`, with the connection `owner`. Takes the store's lock.

        Raises Contention if a live session has the store, if the daemon has not finished a dead process's run, or if
        it is ending. Raises Unavailable if there are too many sessions.
        """
        deadline = time.monotonic() + _PATIENCE
        with self.kept(store.run_id), self.changed:
            while (known := self._runs.get(store.run_id)) is not None:
                if self.life.runs[store.run_id] is Phase.ATTACHED and known.in_use():
                    raise Contention(
                        f"{store.url}: process {known.pid} is saving to this store",
                        hint="wait until it ends, or stop it; reading needs no lock",
                    )
                # The earlier session has ended or its process has died: the new one continues with its arena.
                known.saver.gives_way = True
                self._obey(self.life.detached(store.run_id))
                if not self.changed.wait(deadline - time.monotonic()):
                    raise Contention(
                        f"{store.url}: the daemon is still saving copies of an earlier process",
                        hint="retry in a while",
                        kind="run-busy",
                    )
            self._require_staying()
            if len(self._runs) >= most_sessions():
                raise full(most_sessions())
            store.lock()
            run = self._runs[store.run_id] = Run(store, self._folder / store.run_id, pid, owner)
            self.life.attached(store.run_id)
            self.claims += 1
        log.info("%s: process %d saves to it", store.url, pid)
        return run

    @contextlib.contextmanager
    def kept(self, name: str, grace: float = 0.0) -> Iterator[None]:
        """Lend a run's arena to no other host inside, because this host needs it.

        grace: seconds in which a fetch under way may succeed. Raises Contention if one does not end.
        """
        with self.changed:
            self._wanted.append(name)
        try:
            with self.changed:
                self._end_loans(name, grace)
            yield
        finally:
            with self.changed:
                self._wanted.remove(name)

    def _end_loans(self, name: str, grace: float) -> None:
        for loan in self._loans.get(name, ()):
            loan.until = time.monotonic() + grace
        if grace:
            self.changed.wait_for(lambda: name not in self._loans, grace)
        for loan in self._loans.get(name, ()):
            loan.recall()
        if not self.changed.wait_for(lambda: name not in self._loans, _PATIENCE):
            raise Contention(f"{name}: another host is fetching this memory", hint="retry", kind="run-busy")

    @contextlib.contextmanager
    def lent(self, name: str, recall: Callable[[], None]) -> Iterator[Loan]:
        """Leave a dead process's arena as it is inside, while another host fetches it. See `scarctl.peers.lender`.

        recall: ends the loan soon: a training process of this host needs the arena.

        If the other host has the arena at the end, the run is released, so that a process there can claim the store.
        Otherwise saving continues. Raises Contention if the run's process lives, or the daemon is ending.
        """
        loan = Loan(recall)
        run = self._begin_loan(name, loan)
        try:
            with contextlib.nullcontext() if run is None else run.saver.lent():
                yield loan
                if loan.fetched and run is not None:
                    with self.changed:
                        run.saver.gives_way = True
                        self.detach(run)
        finally:
            with self.changed:
                self._loans[name].remove(loan)
                if not self._loans[name]:
                    del self._loans[name]
                self.changed.notify_all()

    def _begin_loan(self, name: str, loan: Loan) -> Run | None:
        """Note a loan, and return the run that the daemon still saves, if it has it."""
        deadline = time.monotonic() + _PATIENCE
        with self.changed:
            while True:
                self._require_staying()
                run = self._runs.get(name)
                phase = self.life.runs.get(name)
                if name in self._wanted or (run is not None and phase is Phase.ATTACHED and run.in_use()):
                    raise Contention(f"{name}: a process on this host saves to this store")
                if run is None or (phase is Phase.ORPHANED and run.saver.can_lend):
                    self._loans.setdefault(name, []).append(loan)
                    return run
                # Its process has just died, or it is being released.
                if time.monotonic() >= deadline:
                    raise Contention(f"{name}: the daemon does not release it", hint="retry", kind="run-busy")
                self.changed.wait(_LOOK_SECONDS / 10)

    def lives(self, name: str) -> bool:
        """Return whether the training process of this run is alive on this host."""
        with self.changed:
            run = self._runs.get(name)
            return run is not None and self.life.runs[name] is Phase.ATTACHED and run.in_use()

    def owned(self, name: str | None, owner: object) -> Run | None:
        """Return the run of this name, if the connection `owner` has claimed it."""
        with self.changed:
            run = self._runs.get(name) if name else None
            return run if run is not None and run.owner is owner else None

    def known(self, name: str) -> Run | None:
        """Return the run of this name."""
        with self.changed:
            return self._runs.get(name)

    def attached(self, name: str) -> Run:
        """Return the run of this name whose training process lives. Raises UsageError if there is no such run."""
        with self.changed:
            run = self._runs.get(name)
            if run is None or self.life.runs[name] is not Phase.ATTACHED:
                raise UsageError("no running session saves to this store on this host", kind="no-session")
            return run

    def lose(self, run: Run) -> None:
        """Note that a run's training process has ended its connection, and save its pending copies."""
        try:
            run.saver.adopt()
        except Exception as error:
            log.error("%s: the copies in memory cannot be saved: %s", run.store.url, error)
        with self.changed:
            if self._runs.get(run.id) is run:
                self._trainer_gone(run)

    def detach(self, run: Run) -> None:
        """End a run whose training process has finished. Waits some time for the store to be free."""
        with self.changed:
            self._obey(self.life.detached(run.id))
            self.changed.wait_for(lambda: self._runs.get(run.id) is not run, _PATIENCE)

    def release(self, name: str) -> None:
        """End the saving of a dead process's run. What waits stays in memory. Does nothing without such a run.

        Raises Contention if its training process lives, which would begin again.
        """
        with self.changed:
            run = self._runs.get(name)
            if run is None:
                return
            if self.life.runs[name] is Phase.ATTACHED and run.in_use():
                raise Contention(
                    f"{run.store.url}: process {run.pid} trains, and would begin to save again",
                    hint="stop the training, then this",
                )
            self._obey(self.life.detached(name))

    def hold(self, seconds: float) -> None:
        """Stay for `seconds` seconds without a run: a training process is about to start."""
        with self.changed:
            self._require_staying()
            self.life.hold(time.monotonic() + seconds)

    def brace(self, seconds: float) -> None:
        """Stay for `seconds` seconds while there are runs, even after a SIGTERM."""
        with self.changed:
            self.life.brace(time.monotonic() + seconds)

    def stop(self) -> None:
        """Release all runs once their current requests are served, then end."""
        with self.changed:
            self._obey(self.life.stop())

    @contextlib.contextmanager
    def staying(self) -> Iterator[None]:
        """Keep the daemon from its idle timeout while a claim is in progress."""
        with self.changed:
            self._require_staying()
            self._claiming += 1
        try:
            yield
        finally:
            with self.changed:
                self._claiming -= 1

    def status(self) -> list[RunStatus]:
        """Return the figures of every run."""
        with self.changed:
            runs = [(run, self.life.runs[run.id]) for run in self._runs.values()]
        return [run.status(phase) for run, phase in runs]

    def _require_staying(self) -> None:
        if self.life.stopping:
            raise Contention("the daemon is ending", hint="retry", kind="daemon-ending")


def _finished(run: Run) -> bool:
    try:
        return run.saver.finish()
    except Exception as error:
        log.error("%s: saving cannot continue: %s", run.store.url, error)
        return True
