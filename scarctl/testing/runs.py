"""How the suite's tests run trainings, in this process and in others, and compare what they saw."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from scarctl.session import Session
from scarctl.testing import residue
from scarctl.testing.child import Killed, run_and_kill
from scarctl.testing.seen import Description, Recorder, Seen, differing
from scarctl.testing.training import Training

LAST = 6
"""Iterations of a whole run."""
RARELY: dict[str, Any] = {"interval": 1000}
"""Nothing is saved but what a test asks for, and the first iteration."""
OFTEN: dict[str, Any] = {"interval": 1, "fraction": 0.25}
"""Something is saved beside every iteration."""

_references: dict[tuple[type, str], dict[int, Seen]] = {}
"""What the uninterrupted run of a suite's variant saw: the same in every test."""
layouts_here: dict[type, Description] = {}
"""The layout of a suite's training, as this process sees it after the last iteration."""


class Stop(Exception):
    """Ends a training from within."""


class Runs:
    """Base of the suite: what a subclass says about its training, and runs of it."""

    generators: ClassVar[tuple[str, ...]] = ("python", "numpy", "torch")
    """Global random generators that the adapter saves, and from which the training draws in every iteration."""

    variants: ClassVar[frozenset[str]] = frozenset()
    """What else the adapter supports; `training` makes one of each:

    "non-contiguous", "0-dim", "empty", "bfloat16": a group with such a tensor;
    "tied": one parameter that `values` has under two names; "frozen": a value that training leaves as it is;
    "accumulation": an iteration has several backward passes; "several-optimizers": more than one steps in it;
    "factored": the optimizer keeps state of parameters in another shape than theirs, which `restore_lost` puts back.
    """

    def training(self, variant: str = "") -> Training:
        """A new training.

        variant: "", one of `variants`, or "changed": a model whose groups have other names or shapes.
        """
        raise NotImplementedError

    def _uninterrupted(self, tmp_path: Path, variant: str = "") -> dict[int, Seen]:
        """What a run that nothing interrupts sees after every iteration."""
        key = type(self), variant
        if key not in _references:
            run = self._run(tmp_path / "uninterrupted", LAST, variant=variant)
            _references[key] = run.seen
            if not variant:
                layouts_here[type(self)] = run.layouts[LAST]
        return _references[key]

    def _run(
        self,
        folder: Path,
        until: int,
        *,
        variant: str = "",
        at: Mapping[int, Callable[[Session], object]] | None = None,
        resume: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Recorder:
        """A new training, run to its end."""
        training = self.training(variant)
        recorder = Recorder(training, self.generators, at)
        self._train(training, recorder, folder, until, resume=resume, **options)
        return recorder

    def _train(
        self,
        training: Training,
        visit: Recorder,
        folder: Path,
        until: int,
        *,
        resume: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        before = residue.handlers()
        training.run(
            folder / "store", until, visit, resume=resume or {}, options=self._options(folder, **options)
        )
        changed = differing(before, residue.handlers())
        assert not changed, f"after a run these signals have other handlers: {changed}"

    def _options(self, folder: Path, **more: Any) -> dict[str, Any]:
        """Every row is a partition; what fails while saving is raised; nothing is outside of `folder`."""
        fixed = {"rows": {"*": 1}, "daemon": False, "on_error": "raise", "drain_timeout": 30.0}
        return {**fixed, "arena_dir": str(folder_at(folder / "arena")), **more}

    def _killed(self, *runs: Killed) -> list[tuple[dict[int, Seen], dict[int, Description]]]:
        """Trainings in a new process, which is killed; the order of sets is another one there."""
        return run_and_kill(type(self), runs, hash_seed=1)

    def _to_kill(self, folder: Path, action: str, *, after: int, die_after: int) -> Killed:
        return Killed(str(folder_at(folder)), action, after, die_after, self._options(folder, **RARELY))

    def _check_resumed(self, expected: Mapping[int, Seen], run: Recorder, start: int) -> None:
        """`run` began after iteration `start`, with what it had been then, and went on like `expected`."""
        assert run.start == start, f"the run resumed after iteration {run.start}, not {start}"
        first, *rest = run.seen
        # Random generators may be drawn from while a framework gets ready; then they are restored later.
        for kind, wanted, found in (
            ("values", expected[first].values, run.seen[first].values),
            ("extras", expected[first].extras, run.seen[first].extras),
        ):
            assert found == wanted, f"{kind} that were not restored: {differing(wanted, found)}"
        self._check_same(
            expected, {step: run.seen[step] for step in rest}, "after a resume it is another run"
        )

    def _check_same(self, expected: Mapping[int, Seen], found: Mapping[int, Seen], what: str) -> None:
        for step, seen in found.items():
            other = expected[step].differences(seen)
            assert not other, f"{what}: after iteration {step} these differ: {other}"


def checkpoint(session: Session) -> None:
    session.checkpoint(full=True, wait=True)


def folder_at(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """The training inside is ended by `Stop`."""
    try:
        yield
    except Stop:
        return
    raise AssertionError("run() has swallowed an exception")
