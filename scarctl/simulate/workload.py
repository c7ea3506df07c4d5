"""Define and load workloads: training loops that `scarctl simulate` can restart and step."""

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
    """A training run, returned by a factory. It need not inherit from this class.

    The same seed must give the same run: everything that a step changes is in `state`, in `extras`, or follows from the
    iteration's number. So choose batches by that number: after a rollback a run repeats its batches.

    Optional attributes:

        extras           dict of more objects with a state (see `scarctl.attach`), such as a numpy Generator
        target           the metric to reach; default: that of the undisturbed run after `iterations`
        norm             "l2" (default), "rms", "relative", or a function (see `scarctl.checkpoint.distance`)
        partition_bytes, rows, by_layer
                         the partitioning, as for `scarctl.attach`
        recompute        method called after every recovery: recomputes values that are derived from `state`
    """

    iterations: int
    """Iterations of an undisturbed run: about as many as it takes to converge."""

    def reset(self, seed: int) -> None:
        """Restart with the state, batches and noise of this seed."""

    def state(self) -> Any:
        """Return an argument for `scarctl.attach`: a dict of numpy arrays, a module, or a pair (module, optimizer)."""

    def step(self, iteration: int) -> None:
        """Run one iteration; the first is 1."""

    def metric(self) -> float:
        """Return the metric of the state, lower is better. Changes nothing."""


def check_name(name: str) -> None:
    """Raise UsageError unless `name` is `module:factory`."""
    module, colon, factory = name.partition(":")
    if not (colon and factory.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(
            f"{name!r} is not a workload", hint="give module:factory, such as mypackage.workload:build"
        )


def load(name: str, data: str | None) -> Workload:
    """Return the workload that `module:factory` creates. The current folder comes first on the import path.

    data: folder passed to the factory; None: the factory takes no argument. Raises UsageError for a name without a
    factory, a factory that fails, and an object that is not a workload.
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
    """Return the SHA-256 of the factory's file, "" if it has none: results depend on the program."""
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
            hint="the module must be in the current folder or installed",
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
            hint="see scarctl.simulate.Workload for its methods",
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
