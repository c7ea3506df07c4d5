"""What `scarctl simulate` runs: a training loop that can be started again, cut into its steps."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from scarctl.errors import ScarError, UsageError

METHODS = ("reset", "state", "step", "metric")


class Workload(Protocol):
    """A training run. The object that a factory returns; it need not inherit from this.

    The same seed has to give the same run: all that a step changes is in `state`, in `extras`, or follows from the
    number of the iteration. So batches are chosen by that number, and a run that goes back sees again what it saw.

    Optional attributes:

        extras           dict of more objects with a state (see `scarctl.attach`), such as a numpy Generator
        target           the metric to reach; default: what the undisturbed run has after `iterations`
        norm             "l2" (default), "rms", "relative", or a function (see `scarctl.distance`)
        partition_bytes, rows, by_layer
                         how the state is cut, as for `scarctl.attach`
        recompute        method called after every recovery: makes again what follows from `state` and is no part of it
    """

    iterations: int
    """Of an undisturbed run: about as many as it takes to converge."""

    def reset(self, seed: int) -> None:
        """Start again, with the state, batches and noise of this seed."""

    def state(self) -> Any:
        """What `scarctl.attach` would be given: a dict of numpy arrays, a module, or a pair (module, optimizer)."""

    def step(self, iteration: int) -> None:
        """One iteration; the first is 1."""

    def metric(self) -> float:
        """How good the state is: the lower the better. Changes nothing."""


def check_name(name: str) -> None:
    """Raise UsageError unless `name` is `module:factory`."""
    module, colon, factory = name.partition(":")
    if not (colon and factory.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(
            f"{name!r} does not name a workload", hint="give module:factory, such as mypackage.workload:build"
        )


def load(name: str, data: str | None) -> Workload:
    """The workload that `module:factory` makes; the current folder is looked in first.

    The factory is called with the folder of `--data` when that is given, else with nothing. Raises UsageError.
    """
    factory = _factory(name)
    try:
        workload = factory() if data is None else factory(data)
    except ScarError:
        raise
    except Exception as error:
        raise UsageError(f"{name} failed: {type(error).__name__}: {error}", kind="no-workload") from error
    _check(name, workload)
    return workload  # type: ignore[no-any-return]


def source_digest(name: str) -> str:
    """SHA-256 of the file that the factory is in, "" when it has none: another program has other results."""
    try:
        path = inspect.getsourcefile(_factory(name))
    except TypeError:
        return ""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


def _factory(name: str) -> Callable[..., Any]:
    check_name(name)
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:
        raise UsageError(
            f"{module} cannot be imported: {type(error).__name__}: {error}",
            hint="it is looked for in the current folder and among the installed packages",
            kind="no-workload",
        ) from error
    if not callable(found):
        raise UsageError(f"{module} has no function {attribute!r}", kind="no-workload")
    return found  # type: ignore[no-any-return]


def _check(name: str, workload: Any) -> None:
    missing = [method for method in METHODS if not callable(getattr(workload, method, None))]
    if missing:
        raise UsageError(
            f"{name} made a {type(workload).__name__} without {', '.join(missing)}",
            hint="see scarctl.simulate.Workload for what it has to have",
            kind="no-workload",
        )
    iterations = getattr(workload, "iterations", None)
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 2:
        raise UsageError(
            f"{name}: iterations is {iterations!r}",
            hint="set it to the iterations of an undisturbed run, 2 or more",
            kind="no-workload",
        )
    extras = getattr(workload, "extras", None)
    if extras is not None and not isinstance(extras, Mapping):
        raise UsageError(f"{name}: extras is a {type(extras).__name__}, not a dict", kind="no-workload")
