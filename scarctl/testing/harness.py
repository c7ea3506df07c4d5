"""Run the suite's trainings, in this process and in others, and compare their fingerprints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from scarctl.config import grouped
from scarctl.session.session import Session
from scarctl.testing import leaks
from scarctl.testing.fingerprint import Description, Recorder, Seen, differing
from scarctl.testing.killed_runs import Killed, run_and_kill
from scarctl.testing.training import Training

LAST = 6
"""Iterations of a whole run."""
RARELY: dict[str, Any] = {"interval": 1000}
"""Save only the first iteration, and explicit checkpoints of a test."""
OFTEN: dict[str, Any] = {"interval": 1, "fraction": 0.25}
"""Save in every iteration."""

_references: dict[tuple[type, str], dict[int, Seen]] = {}
"""Fingerprints of a variant's uninterrupted run, shared by all tests."""
layouts_here: dict[type, Description] = {}
"""The layout of a suite's training in this process, after the last iteration."""


class Stop(Exception):
    """Ends a training from within."""


class Runs:
    """Base of the suite: the methods that a subclass defines, and runs of its training."""

    generators: ClassVar[tuple[str, ...]] = ("python", "numpy", "torch")
    """Global random generators that the adapter saves. The training draws from each in every iteration."""

    variants: ClassVar[frozenset[str]] = frozenset()
    """Optional features that the adapter supports; `training` makes one training of each:

    "non-contiguous", "0-dim", "empty", "bfloat16": a group with such a tensor;
    "tied": one parameter that `values` has under two names; "frozen": a value that training does not change;
    "accumulation": an iteration has several backward passes; "several-optimizers": several step in one iteration;
    "factored": the optimizer has state of another shape than its parameter's, which `restore_lost` restores.
    """

    def training(self, variant: str = "") -> Training:
        """Return a new training.

        variant: "", one of `variants`, or "changed": a model whose groups have other names or shapes.
        """
        raise NotImplementedError

    def _uninterrupted(self, tmp_path: Path, variant: str = "") -> dict[int, Seen]:
        """Return the fingerprints of an uninterrupted run, by iteration."""
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
        """Run a new training to its end."""
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
        before = leaks.handlers()
        training.run(
            folder / "store",
            until,
            visit,
            resume=resume or {},
            options=grouped(**self._options(folder, **options)),
        )
        changed = differing(before, leaks.handlers())
        assert not changed, f"after a run these signals have other handlers: {changed}"

    def _options(self, folder: Path, **more: Any) -> dict[str, Any]:
        """Return options: one row per partition, faults raise, all files inside `folder`."""
        fixed = {"rows": {"*": 1}, "daemon": False, "on_error": "raise", "timeout": 30.0}
        return {**fixed, "arena_dir": str(folder_at(folder / "arena")), **more}

    def _killed(self, *runs: Killed) -> list[tuple[dict[int, Seen], dict[int, Description]]]:
        """Run trainings in a new process that is killed. Its hash seed differs."""
        return run_and_kill(type(self), runs, hash_seed=1)

    def _to_kill(self, folder: Path, action: str, *, after: int, die_after: int) -> Killed:
        return Killed(str(folder_at(folder)), action, after, die_after, self._options(folder, **RARELY))

    def _check_resumed(self, expected: Mapping[int, Seen], run: Recorder, start: int) -> None:
        """Assert that `run` began after iteration `start`, restored its state, and continued like `expected`."""
        assert run.start == start, f"the run resumed after iteration {run.start}, not {start}"
        first, *rest = run.seen
        # A framework may draw random numbers while it prepares, and restore them later.
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


def folder_at(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """Assert that the training inside raises `Stop`."""
    try:
        yield
    except Stop:
        return
    raise AssertionError("run() has swallowed an exception")
