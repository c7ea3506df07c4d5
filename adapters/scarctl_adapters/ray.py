"""Keep the state of Ray's actors, and of the ranks of Ray Train.

    @ray.remote(max_restarts=-1, max_task_retries=-1)
    class Table:
        def __init__(self):
            self.rows = {"rows": numpy.zeros((1000, 16))}
            self.kept = Kept(self.rows, root="/shared/actors")

        @once
        def add(self, row, values):
            self.rows["rows"][row] += values

Ray places actors, detects that one has died, and runs its constructor again; scarctl keeps the state. An actor's store
is found by the actor's name. A call has the identity of Ray's task, which stays the same when Ray resends it.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import scarctl
from scarctl.config.checks import LONGEST_NOTICE
from scarctl.errors import UsageError
from scarctl.persist.evacuated import Evacuated
from scarctl.session.session import Session
from scarctl_adapters import actor
from scarctl_adapters.actor import Call

try:
    import ray
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"scarctl_adapters.ray needs {error.name}: pip install 'ray==2.60.0'", name=error.name
    ) from error

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("scarctl")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", re.ASCII)
NOTICE = 30.0
"""Assumed seconds until a node shuts down if Ray has no deadline for it."""


class Kept(actor.Kept):
    """An actor's state in the store that has the actor's name. See `scarctl_adapters.actor.Kept`."""

    def __init__(
        self, model: Any, optimizer: Any = None, *, root: str, name: str | None = None, **options: Any
    ) -> None:
        """Attach, and restore the state after the last call that is durable.

        root: folder or address that holds the stores of an application's actors. Two applications need two.
        name: name of the store below `root`. Default: the actor's name. Members of one store have one name here.
        options: `every` and `patience`; those of `scarctl.attach`, except store and hooks.

        Raises UsageError if the actor has no name, or a name that cannot name a folder.
        """
        super().__init__(model, optimizer, store=store_of(root, name), **options)


def store_of(root: str, name: str | None = None) -> str:
    """Return the address of the calling actor's store. Raises UsageError as `Kept` does."""
    if name is None:
        name = ray.get_runtime_context().get_actor_name()
        if not name:
            raise UsageError(
                "this actor has no name, so its store could not be found again",
                hint="make it with .options(name=...), or give Kept a name",
            )
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r:.120} cannot be the name of a store",
            hint="use letters, digits, '_', '-' and '.', or give Kept another name",
        )
    return f"{str(root).rstrip('/')}/{name}"


def once(method: Callable[P, T]) -> Callable[P, T]:
    """Execute each call of an actor's method once, however often Ray sends it.

    The actor has its `Kept` as `self.kept`. A caller that repeats a call itself adds `call=(caller, number)`: its tasks
    have other identities.
    """
    return actor.answered_once(method, _task)


def _task() -> Call:
    found: str | None = ray.get_runtime_context().get_task_id()
    if found is None:
        raise UsageError("this call is not a task of Ray", hint='add call=("caller", number)')
    return found


# -- Ray Train ----------------------------------------------------------------------------------------------------


def attach_and_resume(model: Any, optimizer: Any, *, root: str, **options: Any) -> Session:
    """Attach on every rank of a Ray Train run, and resume. Call it in the training function, before the loop.

    The store has the name of the run, so a run that Ray Train restarts finds it.

    root: folder or address that holds the stores of runs, reachable from every node.
    options: those of `scarctl.attach`, except store.

    Raises UsageError if the run's name cannot name a folder, and the errors of `scarctl.attach` and `Session.resume`.
    """
    import ray.train

    name = ray.train.get_context().get_experiment_name()
    session = scarctl.attach(model, optimizer, store=store_of(root, name), **options)
    try:
        session.resume()
    except BaseException:
        session.close(seal=False)
        raise
    return session


class Preemption:
    """Saves a run before one of its nodes shuts down. Call it after every step, on every rank."""

    def __init__(self, session: Session, *, every: int = 1) -> None:
        """Ask Ray Train in every `every`-th call, because the question is a barrier of all ranks."""
        self._session, self._every, self._calls = session, every, 0
        self._seen: frozenset[str] = frozenset()

    def __call__(self) -> Evacuated | None:
        """Evacuate once for each set of nodes that are about to shut down. Return what is safe; None without such
        nodes.

        All ranks evacuate, even those on other nodes: only a state of all ranks is consistent. Training may
        continue. If several nodes shut down, only the store counts, because the node with a copy may be one of them.
        """
        import ray.train

        self._calls += 1
        if self._calls % self._every:
            return None
        notice = ray.train.get_preemption_info()
        nodes = frozenset() if notice is None else frozenset(notice.preempted_node_ids)
        if notice is None or nodes <= self._seen:
            return None
        self._seen |= nodes
        seconds = NOTICE if notice.deadline_ms is None else max(0.0, notice.deadline_ms / 1000 - time.time())
        seconds = min(seconds, LONGEST_NOTICE)
        log.warning("Ray is about to shut down %d nodes of this run in %.0f s", len(nodes), seconds)
        return self._session.evacuate(seconds, to="store" if len(nodes) > 1 else None)
