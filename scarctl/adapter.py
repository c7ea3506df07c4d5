"""Define what a training framework must offer to be checkpointed, and find its adapter.

An adapter is a class named by an entry point in the group `scarctl.adapters`. The entry point's name is the root
module of the objects that the adapter understands ("torch" for an `nn.Module`). So the search for an adapter never
imports a framework that the user does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.errors import UsageError
from scarctl.state.caveats import Caveats
from scarctl.state.layout import Layout, Place

ENTRY_POINTS = "scarctl.adapters"


@dataclass(frozen=True, slots=True)
class StateGroup:
    """One parameter or buffer and the optimizer's slots of the same shape, or of shape (rows,).

    `tensors` maps a slot's name to its live tensor, "" (first) to the parameter itself; all have the same rows. A slot
    that the optimizer has not created yet may be an expanded zero, which is saved as zeros and never loaded.
    """

    name: str
    kind: str
    """"parameter", or "buffer" for a tensor that a forward pass may change."""
    tensors: Mapping[str, torch.Tensor]
    place: Place | None = None
    """This process's part of the whole tensor; None if the process holds all of it."""
    role: str = "own"
    """Relation to the groups of other ranks of the same job:
    "own": only this rank has these values. Another rank's group of the same name is another tensor.
    "shared": all ranks that have a group of this name, place and scope hold the same values, and the same slots.
    "replica": the same values, but without the optimizer's slots, which only groups of the role "shared" have.
    """
    scope: str = ""
    """Ranks with the same scope mean the same tensor by the name. "": all ranks do."""
    is_table: bool = False
    """Whether a step changes only the rows that its batch looks up."""
    frozen: bool = False
    """Whether training currently leaves it unchanged. Any other write is counted by torch (`_version`), or covers most
    of the tensor."""


class Adapter(Protocol):
    """A training framework's state as groups of tensors and a small structure of extras. See `AdapterClass`."""

    @property
    def automatic(self) -> bool:
        """Whether `install` hooks into the training loop; otherwise the user calls `session.step()`."""

    @property
    def extras_per_rank(self) -> bool:
        """Whether `capture` contains an optimizer's values of this rank alone, which no other rank can restore."""

    def mix(self, theirs: Any, own: Any) -> Any:
        """Return another rank's extras of the agreed step, with the optimizer's values of this rank from `own`."""

    @property
    def optimizer(self) -> str:
        """Names of the optimizers' classes, part of the layout's identity; "" without an optimizer."""

    def groups(self) -> list[StateGroup]:
        """Return the current state. After the first step, names, order, shapes and dtypes are stable.

        A `StateGroup` may be returned again while its tensors are the same.
        """

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the current tensors of the groups of kind "buffer", by name. Called after every step: be quick."""

    def capture(self) -> Mapping[str, Any]:
        """Return the extras: random generators under "rng", the user's objects under "extras", and all that is in no
        group. Called at each declared end of a step: be quick.

        Return copies (`scarctl.state.torch_dtypes.private`). What only a step changes may be a `Deferred`, which is
        read until the next step.
        """

    def restore(self, state: Any) -> None:
        """Restore the result of `capture`. Raises UsageError when the structure does not fit."""

    def create_slots(self, layout: Layout) -> Callable[[], None]:
        """Create the optimizer's slots in `layout` that the optimizer, before its first step, does not have yet.

        Their values are arbitrary. Returns a function that removes them, in case no saved values exist.
        """

    def install(self, before: Callable[[], None], after: Callable[[], None] | None) -> Callable[[], None]:
        """Call `before` before every optimizer step and `after` after an iteration's last; return the removal.

        after: None if a framework's loop reports the end of an iteration. Then `before` may be called as late as when
        the step's closure has returned.
        """


class KnowsTouched(Protocol):
    """Optional part of an adapter, for the tracker "touched"."""

    def touched_rows(self, *, dense: bool) -> Mapping[str, torch.Tensor]:
        """Return the table rows with a gradient, by group name: the rows that the coming optimizer step will change.

        Called right before every optimizer's step, for that optimizer's groups. A table's rows are a mask, bool of
        shape (rows,), or row numbers, int64, in any order and possibly repeated. A group that was named once must be
        named whenever it has a gradient. Be quick, and do not wait for a device.

        dense: include tables with dense gradients, which must be read to find their rows.
        """


def touched_rows_of(adapter: Adapter) -> Callable[..., Mapping[str, torch.Tensor]] | None:
    """Return the adapter's `KnowsTouched.touched_rows`, or None."""
    return getattr(adapter, "touched_rows", None)


class RestoresLost(Protocol):
    """Optional part of an adapter, to recover part of the state in a running process."""

    def restore_lost(self, lost: Mapping[str, NDArray[np.bool_]], saved: Callable[[], Any]) -> None:
        """Restore values of lost rows that are in no group, such as an optimizer's factored statistics.

        All other extras stay unchanged, except that values that are not finite may be restored anywhere.

        lost: lost rows by group name, bool of shape (rows,), of groups that lost some. Their tensors are already
        restored. saved: returns the newest late extras, or raises ScarError. Call it only if they are needed.
        """


def restore_lost_of(adapter: Adapter) -> Callable[..., None] | None:
    """Return the adapter's `RestoresLost.restore_lost`, or None."""
    return getattr(adapter, "restore_lost", None)


class Derives(Protocol):
    """Optional part of an adapter whose model has values that are computed from the groups, such as rounded weights."""

    def derive(self) -> None:
        """Compute them again. Called on all ranks after a partial recovery in a running process.

        Not called after a resume or a rollback: `restore` computes them as well.
        """


def derive(adapter: Adapter) -> None:
    """Call the adapter's `Derives.derive`, if it has one."""
    call = getattr(getattr(adapter, "whole", adapter), "derive", None)
    if call is not None:
        call()


class LetsRanksDiffer(Protocol):
    """Optional part of an adapter whose ranks may have different values of what they have in common, for some steps."""

    def ranks_may_differ(self) -> bool:
        """Return whether they may now, as between two averages. Be quick."""


def ranks_may_differ(adapter: Adapter) -> bool:
    """Return the adapter's `LetsRanksDiffer.ranks_may_differ`; False without one."""
    call: Callable[[], bool] | None = getattr(adapter, "ranks_may_differ", None)
    return call is not None and call()


class ReplacesArrays(Protocol):
    """Optional part of an adapter whose arrays are immutable: training and recoveries replace them."""

    def writable(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return private copies of a group's tensors by slot, which take the place of the live ones.

        A recovery writes into them. From this call on, `groups` returns them, until the loop has received arrays made
        from them. The same copies are returned again until then.
        """


def writable_of(adapter: Adapter) -> Callable[[str], Mapping[str, torch.Tensor]] | None:
    """Return the adapter's `ReplacesArrays.writable`, or None."""
    return getattr(adapter, "writable", None)


class Watching(Protocol):
    """The result of `KnowsCaveats.watch`."""

    def stepped(self) -> None:
        """Note that an iteration of the session has ended."""

    def end(self) -> None:
        """Remove every hook. May be called more than once."""


class KnowsCaveats(Protocol):
    """Optional part of an adapter, to detect training that does not match the saved state."""

    def watch(self, caveats: Caveats) -> Watching:
        """Start reporting state and steps that are not protected to `caveats`, as soon as they are detected."""


class _Blind:
    def stepped(self) -> None:
        pass

    def end(self) -> None:
        pass


def watch_of(adapter: Adapter, caveats: Caveats) -> Watching:
    """Start the adapter's `KnowsCaveats.watch`; without one, return an object that does nothing."""
    watch: Callable[[Caveats], Watching] | None = getattr(adapter, "watch", None)
    return _Blind() if watch is None else watch(caveats)


class AdapterClass(Protocol):
    """The class that an entry point names."""

    def build(self, model: Any, optimizers: Sequence[Any], **options: Any) -> Adapter:
        """Return an adapter for the objects. Raises UsageError when it cannot handle them."""


def find_adapter(model: Any, optimizers: Sequence[Any], **options: Any) -> Adapter:
    """Return the adapter for `model`, found by the root modules of its classes, and of the classes that it holds.

    Raises UsageError with the installed adapters if none fits.
    """
    roots, installed = _roots(model), _installed()
    if not any(root in installed for root in roots):
        _installed.cache_clear()  # one may have been installed since
        installed = _installed()
    for root in roots:
        if root in installed:
            found: AdapterClass = installed[root].load()
            return found.build(model, optimizers, **options)
    raise UsageError(
        f"no adapter is installed for {type(model).__module__}.{type(model).__qualname__}",
        hint=f"installed adapters: {', '.join(sorted(installed)) or 'none'}; or pass a dict of numpy arrays",
    )


@cache
def _installed() -> dict[str, EntryPoint]:
    """Return the installed adapters, by the root module that each is for. Reading them takes 16 ms."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _roots(model: Any) -> list[str]:
    classes = list(type(model).__mro__)
    held = model.values() if isinstance(model, Mapping) else model if isinstance(model, list | tuple) else ()
    for value in held:
        classes += type(value).__mro__
    return list(dict.fromkeys(c.__module__.partition(".")[0] for c in classes))
