"""Rehearse a program: run it undisturbed twice, then end it by two signals and start it again, and compare."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from scarctl.errors import ScarError
from scarctl.rehearse import processes, records
from scarctl.rehearse.reasons import (
    INPUTS,
    RANDOM,
    RESULT,
    Cause,
    alike,
    cause_after_restart,
    cause_undisturbed,
)
from scarctl.rehearse.records import Attached, Difference, Records
from scarctl.rehearse.run import ARENA, Run
from scarctl.store.term import now
from scarctl.util.document import INTERNAL, Document
from scarctl.util.text import counted

Verdict: TypeAlias = Literal["identical", "different", "not-deterministic"]
LEAST = 4
"""Fewest steps of a rehearsal: one is saved, then one is lost, and some follow."""
_PARTS = 5
"""Checkpoints in memory during a rehearsal."""
_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGKILL: "kill -9"}


@dataclass(frozen=True, slots=True)
class RehearsedRun(Document):
    """One run of the program, compared with the first one."""

    run: str
    """"undisturbed", "SIGTERM" or "kill -9"."""
    resumed: int | None
    """The step after which the restart has continued; None: the run was not interrupted."""
    differences: tuple[Difference, ...]
    cause: Cause | None
    """The likeliest reason, if anything differs."""


@dataclass(frozen=True, slots=True)
class Rehearsed(Document):
    """The result of a rehearsal."""

    verdict: Verdict
    steps: int
    at: str
    """UTC time, in ISO 8601."""
    cmd: str
    """The program's command, as a shell takes it."""
    stop: int
    """The step after which the program was interrupted."""
    tensors: int
    """Tensors that were compared."""
    not_compared: tuple[str, ...]
    """Parts of the extras in which the two undisturbed runs differ."""
    runs: tuple[RehearsedRun, ...]
    attached: tuple[Attached, ...] = field(metadata=INTERNAL)
    """The sessions of the program."""


class _Ended(Exception):
    """The program ends before the last step of the rehearsal."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.steps = steps


class Rehearsal:
    """Runs one program. say: shows a line about the progress."""

    def __init__(self, command: Sequence[str], timeout: float, say: Callable[[str], None]) -> None:
        self._command, self._timeout, self._say = list(command), timeout, say

    def run(self, steps: int) -> Rehearsed:
        """Rehearse `steps` steps, or as many as the program has.

        Raises ScarError (kind "not-rehearsed") if the program fails, does not attach, or is not done in time;
        UsageError if it cannot be started. Stores, memory and processes are gone afterwards.
        """
        with tempfile.TemporaryDirectory(prefix=ARENA) as name:
            try:
                return self._all(Path(name) / "whole", steps)
            except _Ended as ended:
                if ended.steps < LEAST:
                    what = f"the program ends after {counted(ended.steps, 'step')}, too few to be interrupted"
                    raise _failed(what) from None
                self._say(f"the program has only {ended.steps} steps: these are rehearsed")
                return self._all(Path(name) / "short", ended.steps)

    def _all(self, root: Path, steps: int) -> Rehearsed:
        stop = steps // 2
        # Right after a step with a checkpoint, memory may have rows of both steps.
        stop += stop % _interval(steps) == 0
        first = self._undisturbed(root / "first", steps, None)
        second = self._undisturbed(root / "second", steps, root / "first")
        differing = _differing(second)
        # Generators that nobody seeds differ, and so do clocks: they say nothing about a restart.
        varying = [one.name for one in differing if not one.tensor]
        tensors = tuple(one for one in differing if one.tensor)
        runs = [
            RehearsedRun(
                "undisturbed",
                None,
                tensors,
                cause_undisturbed(first.lines, second.lines) if tensors else None,
            )
        ]
        comparable = alike(first.lines, second.lines)
        for number in (signal.SIGTERM, signal.SIGKILL):
            again = self._interrupted(root, steps, stop, number)
            found = tuple(one for one in _differing(again) if one.name not in varying)
            runs.append(_compare(first, again, _NAMES[number], found, comparable, certain=not tensors))
        verdict: Verdict = "not-deterministic" if tensors else "identical"
        if verdict == "identical" and any(one.differences or one.cause for one in runs):
            verdict = "different"
        return Rehearsed(
            verdict,
            steps,
            now(),
            shlex.join(self._command),
            stop,
            sum(final.tensors for final in first.finals.values()),
            tuple(varying),
            tuple(runs),
            tuple(first.attached.values()),
        )

    def _undisturbed(self, folder: Path, steps: int, reference: Path | None) -> Records:
        with self._stores(folder):
            self._say(f"{counted(steps, 'step')}, undisturbed")
            run = self._run(folder, steps, str(reference or ""))
            return self._to_the_end(run, "")

    def _interrupted(self, root: Path, steps: int, stop: int, number: signal.Signals) -> Records:
        folder = root / number.name.lower()
        with self._stores(folder):
            self._say(f"{_NAMES[number]} after step {stop}")
            run = self._run(folder, steps, str(root / "first"), stop, number)
            code = self._start(run, run.survived.exists)
            if run.survived.exists():
                raise _failed(
                    f"the program went on after {_NAMES[number]} until step {steps}: it handles the signal itself",
                    "a scheduler would kill it: let its handler end the loop",
                )
            found = records.read(folder)
            if found.complete:
                return found  # a launcher such as torchrun has started it again
            if not run.signalled.exists():
                raise self._broken(run, code, f" before step {stop}, where it was to be interrupted")
            for record in folder.glob("*.attached.json"):
                record.unlink()  # only sessions of the restart have to come to the end
            self._say(f"start again, up to step {steps}")
            return self._to_the_end(run, " after the restart")

    def _to_the_end(self, run: Run, when: str) -> Records:
        """Run the program until all of its sessions are at the last step, and return their records."""
        folder = Path(run.folder)
        code = self._start(run, lambda: records.read(folder).complete)
        found = records.read(folder)
        if not found.complete:
            raise self._broken(run, code, when)
        if not run.stop and any(final.early for final in found.finals.values()):
            raise _Ended(min(final.step for final in found.finals.values()))
        return found

    def _run(self, folder: Path, steps: int, reference: str, stop: int = 0, number: int = 0) -> Run:
        arena = f"{folder.parents[1].name}-{folder.name}"
        return Run(str(folder), reference, arena, steps, _interval(steps), stop, number)

    def _start(self, run: Run, done: Callable[[], bool]) -> int | None:
        return processes.run(self._command, run.to_environment(), Path(run.folder), self._timeout, done)

    def _broken(self, run: Run, code: int | None, when: str) -> ScarError:
        """Return the error of a program that has not done what was wanted, with the end of its output."""
        folder = Path(run.folder)
        found = records.read(folder)
        if code is None:
            what = f"the program has not reached step {run.steps} in {self._timeout:.0f} s{when}"
            what += (
                f": it is at step {found.steps}" if found.attached else ", and has not called scarctl.attach"
            )
            hint = "give fewer --steps, or a longer --timeout"
        elif not found.attached:
            what = f"the program ended with exit code {code}, and never called scarctl.attach{when}"
            hint = "rehearse the command that trains; the training process must inherit its environment"
        else:
            what = f"the program ended with exit code {code}{when}, at step {found.steps} of {run.steps}"
            hint = "rehearse a program that runs: its last lines are above"
        for line in processes.tail(folder):
            self._say(f"  | {line}")
        return _failed(what, hint)

    @contextlib.contextmanager
    def _stores(self, folder: Path) -> Iterator[None]:
        """Make a run's folder; remove its stores and its memory at the end. Records and output stay."""
        folder.mkdir(parents=True)
        began = time.monotonic()
        try:
            yield
        finally:
            for note in folder.glob("*.arena"):
                arena = Path(note.read_text())
                if arena.name.startswith(ARENA) and arena.is_dir():
                    shutil.rmtree(arena)
            for store in folder.glob("store-*"):
                shutil.rmtree(store)
        self._say(f"  {time.monotonic() - began:.1f} s")


def _interval(steps: int) -> int:
    """Return the steps between two checkpoints."""
    return max(2, steps // _PARTS)


def _compare(
    first: Records,
    again: Records,
    name: str,
    differences: tuple[Difference, ...],
    comparable: Sequence[str],
    *,
    certain: bool,
) -> RehearsedRun:
    """Compare a run that was interrupted with the first one. certain: two undisturbed runs are alike."""
    cause: Cause | None = None
    if not again.resumed:
        cause = Cause(
            "not-resumed",
            None,
            "the restart began again with step 1: nothing was resumed",
            "call session.resume() before the loop, and give attach the same store= at each start",
        )
    elif differences and len(again.starts) > 1:
        cause = Cause(
            "stores",
            None,
            f"the sessions continued after different steps: {' and '.join(map(str, sorted(again.starts)))}",
            "attach what trains together in one session: it takes several optimizers",
        )
    elif differences or not certain:
        cause = cause_after_restart(first.lines, again.again, comparable)
        if cause is None and certain:
            cause = Cause(
                "extras",
                None,
                f"only what is saved beside the tensors differs: {differences[0].name}",
                "restore it as it was saved, or leave it out of extras= if training does not depend on it",
            )
    unsaved = "; ".join({one.unsaved for one in first.finals.values() if one.unsaved})
    if cause is not None and unsaved and cause.kind in (INPUTS, RANDOM, RESULT):
        cause = replace(cause, reason=f"{cause.reason}; {unsaved}")
    return RehearsedRun(name, again.resumed, differences, cause)


def _differing(run: Records) -> tuple[Difference, ...]:
    several = len(run.finals) > 1
    return tuple(
        replace(one, name=f"{name}: {one.name}") if several else one
        for name, final in sorted(run.finals.items())
        for one in final.differences
    )


def _failed(what: str, hint: str = "") -> ScarError:
    return ScarError(what, hint=hint, kind="not-rehearsed")
