"""What a training framework has to offer to be checkpointed, and how its adapter is found.

An adapter is a class named by an entry point in the group `scarctl.adapters`. The entry point's name is the
root module of the objects that it understands ("torch" for an `nn.Module`), so that looking for an adapter
imports no framework that the user does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from scarctl.caveats import Caveats
from scarctl.errors import UsageError
from scarctl.layout import Layout, Place

ENTRY_POINTS = "scarctl.adapters"


@dataclass(frozen=True, slots=True)
class StateGroup:
    """One parameter or buffer and the optimizer's slots of the same shape.

    `tensors` maps a slot's name to its live tensor, "" (first) to the parameter itself; all have the same shape. A
    slot that the optimizer has not made yet may be given as an expanded zero: it is saved as zeros, and never loaded.
    """

    name: str
    kind: str
    """"parameter", or "buffer" for what a forward pass may change."""
    tensors: Mapping[str, torch.Tensor]
    place: Place | None = None
    """Where this process's part lies within the whole tensor; None: it has all of it."""
    role: str = "own"
    """What other ranks of the same job have to do with it:
    "own": only this rank has these values. Where others use the name too, they mean another tensor.
    "shared": all ranks that have a group of this name, place and scope hold the same values, and the same slots.
    "replica": the same values, but without the optimizer's slots, which are only where the role is "shared".
    """
    scope: str = ""
    """Which ranks mean the same tensor by the name: those that give the same text. "": all of them."""
    frozen: bool = False
    """Training does not change it, now; what writes to it all the same is counted by torch (`_version`), or writes to
    most of it."""


class Adapter(Protocol):
    """A training framework's state, seen as groups of tensors and two small structures of extras.

    A class whose instances these are is built with `build`; see `AdapterClass`.
    """

    @property
    def automatic(self) -> bool:
        """Whether `install` hooks into the training loop; otherwise the user calls `session.step()`."""

    @property
    def late_per_rank(self) -> bool:
        """Whether `capture_late` has values that are of this rank only, which no other rank can restore."""

    def mix_late(self, theirs: Any, own: Any) -> Any:
        """Late extras of another rank, of the step that all go on from, with what of `own` only this rank has."""

    @property
    def optimizer(self) -> str:
        """Names of the optimizers' classes, part of the layout's identity; "" when there is none."""

    def groups(self) -> list[StateGroup]:
        """The state as it is now. Names, order, shapes and dtypes are stable once a first step was taken.

        A `StateGroup` that was returned before may come again as long as its tensors are the same.
        """

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The groups of kind "buffer", by name, as they are now. Called after every step: to be quick."""

    def capture_early(self) -> Any:
        """Extras that must be read right after a step, because the next batch changes them (RNG, data position)."""

    def capture_late(self) -> Any:
        """Extras that must be read right before the next step, because the loop changes them after one (schedulers)."""

    def restore(self, early: Any, late: Any) -> None:
        """Put back what the two captures gave. Raises UsageError when the structures do not fit."""

    def create_slots(self, layout: Layout) -> Callable[[], None]:
        """Make the optimizer's slots that `layout` has and the optimizer, before its first step, has not.

        What is in them is anything. Returns what takes them away again, for when there is nothing to put into them.
        """

    def install(self, before: Callable[[], None], after: Callable[[], None] | None) -> Callable[[], None]:
        """Call `before` before every optimizer step and `after` after every iteration's last; returns the removal.

        after: None where a framework's loop says when an iteration is over; what it computes within a step, as a
        closure, may then count as before it.
        """


class KnowsTouched(Protocol):
    """What an adapter may offer besides: for the tracker "touched"."""

    def touched_rows(self, *, dense: bool) -> Mapping[str, torch.Tensor]:
        """Rows of tables that got a gradient, by name of the group: what the coming optimizer step will change.

        Called right before every optimizer's step, for what that optimizer changes. A table's rows are a mask, bool of
        shape (rows,), or numbers of rows, int64, in any order and perhaps repeated. A group that was named once is
        named whenever it has a gradient. To be quick, and not to wait for a device.

        dense: also tables whose gradients are dense and have to be read for it.
        """


class KnowsLoop(Protocol):
    """What an adapter may offer besides: for telling when a training loop is done with a step, and how it continues."""

    def modules(self) -> Iterable[nn.Module]:
        """Of the model that is trained."""

    def late_extras(self) -> Mapping[str, Any]:
        """Objects of which `capture_late` reads the state because the loop changes them after a step."""

    def early_extras(self) -> Mapping[str, Any]:
        """Objects of which `capture_early` reads the state."""

    def capture_light(self) -> Any:
        """What of `capture_late` loops change after a step: schedules, rates, a scale. To be quick; private copies."""

    def with_light(self, late: Any, light: Any) -> Any:
        """`late` with what `capture_light` gave in its place."""


def loop_known(adapter: Adapter) -> KnowsLoop | None:
    """The adapter's `KnowsLoop`; None when it has none."""
    inner: Any = getattr(adapter, "whole", adapter)
    return inner if hasattr(inner, "capture_light") else None


def touched_rows_of(adapter: Adapter) -> Callable[..., Mapping[str, torch.Tensor]] | None:
    """The adapter's `KnowsTouched.touched_rows`; None when it has none."""
    return getattr(adapter, "touched_rows", None)


class RestoresLost(Protocol):
    """What an adapter may offer besides: for recovering a part of the state in a running process."""

    def restore_lost(self, lost: Mapping[str, NDArray[np.bool_]], saved: Callable[[], Any]) -> None:
        """Put back what belongs to lost rows of groups and is in no group, such as an optimizer's factored statistics.

        The rest of the extras stays as it is. What is not finite may be put back wherever it belongs.

        lost: which rows of a group were lost, bool of shape (rows,), by name; only groups that have lost some. Their
        tensors are restored by now. saved: gives the newest late extras, or raises ScarError; to be asked only if
        something is needed of them.
        """


def restore_lost_of(adapter: Adapter) -> Callable[..., None] | None:
    """The adapter's `RestoresLost.restore_lost`; None when it has none."""
    return getattr(adapter, "restore_lost", None)


class Watching(Protocol):
    """What `KnowsCaveats.watch` returns."""

    def stepped(self) -> None:
        """An iteration of the session has ended."""

    def look(self) -> None:
        """The session is about to close: look once more."""

    def end(self) -> None:
        """Remove every hook. May be called more than once."""


class KnowsCaveats(Protocol):
    """What an adapter may offer besides: to notice that training goes another way than the one that is saved."""

    def watch(self, caveats: Caveats) -> Watching:
        """From now on say there what is not protected, as soon as it is known."""


class _Blind:
    def stepped(self) -> None:
        pass

    def look(self) -> None:
        pass

    def end(self) -> None:
        pass


def watch_of(adapter: Adapter, caveats: Caveats) -> Watching:
    """The adapter's `KnowsCaveats.watch`; what notices nothing when it has none."""
    watch: Callable[[Caveats], Watching] | None = getattr(adapter, "watch", None)
    return _Blind() if watch is None else watch(caveats)


class AdapterClass(Protocol):
    """What an entry point names."""

    def build(self, model: Any, optimizers: Sequence[Any], **options: Any) -> Adapter:
        """An adapter for the objects. Raises UsageError when it cannot handle them."""


def find_adapter(model: Any, optimizers: Sequence[Any], **options: Any) -> Adapter:
    """The adapter for `model`, by the modules of its classes (of its values' classes, when it is a mapping).

    Raises UsageError naming what is installed when there is none.
    """
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    for root in _roots(model):
        if root in installed:
            found: AdapterClass = installed[root].load()
            return found.build(model, optimizers, **options)
    raise UsageError(
        f"no adapter for {type(model).__module__}.{type(model).__qualname__}",
        hint=f"installed adapters: {', '.join(sorted(installed)) or 'none'}; or pass a dict of numpy arrays",
    )


def _roots(model: Any) -> list[str]:
    classes = list(type(model).__mro__)
    if isinstance(model, Mapping):
        for value in model.values():
            classes += type(value).__mro__
    return list(dict.fromkeys(c.__module__.partition(".")[0] for c in classes))
