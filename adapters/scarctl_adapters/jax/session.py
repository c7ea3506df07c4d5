"""Attach to a loop over immutable trees: every call takes the newest tree, or returns it.

with scarctl_adapters.jax.attach(state, store="ckpt") as session:
    state = session.resume()
    for batch in session.batches(loader):
        state = train_step(state, batch)
        state = session.step(state)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import jax

import scarctl
from scarctl.config import Mode
from scarctl.errors import UsageError
from scarctl.recovery.report import Report
from scarctl.session.resumed import Resumed
from scarctl_adapters.jax.adapter import JaxAdapter, Tree
from scarctl_adapters.options import check_options

_GIVEN = frozenset(("model", "optimizer", "schedulers", "scaler", "hooks", "ranks"))
"""Arguments of `scarctl.attach` that a tree determines."""

T = TypeVar("T")
B = TypeVar("B")


def attach(
    state: T, *, parameters: str | None = None, donated: bool = False, **options: Any
) -> TreeSession[T]:
    """Checkpoint a training whose state is a tree: parameters, the optimizer's state, counts and random keys.

    state: Any tree of arrays: a `TrainState`, a dict, a tuple, `nnx.state(...)`. It is not changed, and neither are
        later ones.
    parameters: Path of the parameters in the tree, such as "params" or "train.params". Leaves whose path ends like a
        parameter's are its slots. Default: the first of "params", "model" and "0" that exists.
    donated: Whether the step gives the state's memory away (`donate_argnums`). Then every copy ends within `step`, and
        the session holds no memory between two steps.
    options: Those of `scarctl.attach`: store, fraction, interval, extras, member, settings, and so on.

    Raises UsageError for unknown options, trees that cannot be saved, and several processes of `jax.distributed`
    without `member`. Raises what `scarctl.attach` raises.
    """
    check_options(options, given=_GIVEN, owner="the tree", names=())
    if jax.process_count() > 1 and options.get("member") is None:
        raise UsageError(
            f"{jax.process_count()} processes of jax.distributed train together, and would share one store",
            hint="if each has a state of its own, pass member=(jax.process_index(), jax.process_count())",
        )
    tree = Tree(state, parameters, donated=donated)
    session = scarctl.attach(tree, **options)
    return TreeSession(session, donated=donated)


class TreeSession(Generic[T]):
    """A session over a tree. Made by `attach`. Other methods are those of `session`."""

    session: scarctl.Session
    """The session itself. It restores into this object: after `session.recover` the new tree is `state`."""
    report: Report | None = None
    """The report of the newest `recover`."""

    def __init__(self, session: scarctl.Session, *, donated: bool) -> None:
        self.session = session
        self._adapter = cast(JaxAdapter, session.adapter)
        self._donated = donated

    @property
    def state(self) -> T:
        """The newest tree."""
        return cast(T, self._adapter.tree())

    @property
    def resumed(self) -> Resumed | None:
        """The result of `resume`; see `scarctl.Session.resumed`."""
        return self.session.resumed

    @property
    def head_step(self) -> int:
        """Iterations finished so far, counted over restarts."""
        return self.session.head_step

    def resume(self, mode: Mode = "auto", snapshot: str | None = None) -> T:
        """Return the state to continue from: the one in the store and this host's memory, or a new run's attached
        state.

        The step after which to continue is `head_step`. See `scarctl.Session.resume`.
        """
        self.session.resume(mode, snapshot)
        return self._left()

    def supersede(self, step: int = 0) -> T:
        """Continue with the attached state, such as one of Orbax, after `step` iterations, instead of calling `resume`.

        The first step replaces the state in the store. See `scarctl.Session.supersede`.
        """
        self.session.supersede(step)
        return self._left()

    def step(self, state: T) -> T:
        """End an iteration with its new state, and return the state to continue with.

        The result is the same object, unless a part was recovered meanwhile (`scarctl live recover`).
        Raises UsageError for a tree of another structure, and for a donated one.
        """
        leaves = self._adapter.leaves_of(state)
        if self._donated:
            self._adapter.adopt(state, leaves)
            self.session.step()
        else:
            self._adapter.before()
            self._adapter.adopt(state, leaves)
            self._adapter.after()
        return self._left()

    def mark_lost(self, lost: str | int | Iterable[str | int]) -> int:
        """See `scarctl.Session.mark_lost`."""
        return self.session.mark_lost(lost)

    def recover(
        self,
        lost: str | int | Iterable[str | int] | None = None,
        mode: Mode = "partial",
        max_rework: float | None = None,
        *,
        before: int | None = None,
    ) -> T:
        """Return the newest state with its lost parts restored; see `scarctl.Session.recover`, and `report`."""
        self.report = self.session.recover(lost, mode, max_rework, before=before)
        return self._left()

    def epochs(self, count: int) -> Iterator[int]:
        """See `scarctl.Session.epochs`."""
        return self.session.epochs(count)

    def batches(self, loader: Iterable[B]) -> Iterator[B]:
        """See `scarctl.Session.batches`."""
        return self.session.batches(loader)

    def checkpoint(self, *, full: bool = False, wait: bool = False) -> None:
        """See `scarctl.Session.checkpoint`."""
        self.session.checkpoint(full=full, wait=wait)
        self._left()

    def close(self) -> None:
        """See `scarctl.Session.close`."""
        self.session.close()

    def _left(self) -> T:
        """Return the newest tree, and release its memory if the next step needs it."""
        state = self.state
        if self._donated:
            self._adapter.release()
        return state

    def __enter__(self) -> TreeSession[T]:
        self.session.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.__exit__(kind, error, trace)
