"""Match the live model's tensors with the groups of a layout, and check that they still fit."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Sequence

import torch

from scarctl.adapter import Adapter, StateGroup, writable_of
from scarctl.arena.arena import Arena
from scarctl.checkpoint.live_state import LiveState, is_placeholder
from scarctl.checkpoint.step_end import captured
from scarctl.errors import LayoutMismatch, ScarError, UsageError
from scarctl.state.caveats import Caveats
from scarctl.state.codec import encode
from scarctl.state.layout import Group, Layout, TensorSpec
from scarctl.state.torch_dtypes import name_of, torch_of
from scarctl.store import Store
from scarctl.store.settings import Settings

log = logging.getLogger("scarctl")


class Binding:
    """One model and its optimizers, seen through their adapter, and one store's layout."""

    def __init__(self, adapter: Adapter, store: Store, caveats: Caveats) -> None:
        self._adapter = adapter
        self._store = store
        self._caveats = caveats
        self._views: LiveState | None = None  # mapping the arena takes longer than the rest of a hook
        self._savable = False
        self._built: tuple[list[StateGroup], Layout] | None = None
        """The adapter's groups after the first step, and the layout that was built from them."""
        self._seen: list[StateGroup] = []
        """The adapter's groups when `_views` was made, which fitted the layout."""

    def build_layout(self) -> Layout:
        """Return the layout of the live state, after the first step."""
        there = self._adapter.groups()
        if self._built is None or not _same(there, self._built[0]):
            self._built = there, layout_of(self._adapter, self._store.settings, there)
        return self._built[1]

    def advise(self, layout: Layout) -> None:
        """Log how tables could be cut, if the store leaves that to scarctl."""
        fixed = self._store.settings
        tables = {group.name for group in self._adapter.groups() if group.is_table}
        coarse = [g for g in layout.groups if g.name in tables and g.rows_per_partition > 1]
        if coarse and not (fixed.rows or fixed.by_layer or fixed.partition_bytes is not None):
            log.info(
                "%s: partitions of embedding tables have several rows, such as %d of %r. If bytes limit checkpoints, "
                "and not the time of training, Partitioning(rows={%r: 1}) loses less with a rank: docs/torchrec.md has "
                "figures",
                self._store.url,
                coarse[0].rows_per_partition,
                coarse[0].name,
                coarse[0].name,
            )

    def require_savable(self) -> None:
        """Raise UsageError after the first step if the state cannot be stored, because no checkpoint would succeed."""
        if self._savable:
            return
        try:
            self.build_layout()
            encode(captured(self._adapter).to_tree())
        except ScarError:
            raise
        except Exception as error:
            raise UsageError(
                f"the state cannot be saved: {type(error).__name__}: {error}",
                hint="no checkpoint of this run would succeed",
            ) from error
        self._savable = True

    def least_bytes(self) -> int:
        """Return the bytes of the state, from the stored layout if possible. Without one, slots that the first step
        creates are not counted.
        """
        # Not kept: the model may be moved, or made smaller, before the first step.
        return (self._store.current_layout() or layout_of(self._adapter, self._store.settings)).nbytes

    def check(self, layout: Layout) -> set[tuple[int, int]]:
        """Raise LayoutMismatch, naming every difference, unless the model and optimizer fit `layout`.

        Before the first step the optimizer has no slots: those of the layout are assumed.
        Return the slots of the layout, by group and tensor, that the optimizer has not created yet.
        """
        stored = {group.name: group for group in layout.groups}
        groups = []
        states = self._adapter.groups()
        for state in states:
            known = stored.get(state.name)
            specs = _specs(state)
            if known is not None:
                # Slots expected before the first step may be wrong.
                slots = {spec.slot for spec in known.tensors}
                specs = tuple(
                    s for s in specs if s.slot in slots or not is_placeholder(state.tensors[s.slot])
                )
            if known is not None and known.tensors:
                there = {spec.slot: spec for spec in specs}
                specs = tuple(
                    there.pop(slot.slot) if slot.slot in there else slot.of(specs[0].shape)
                    for slot in known.tensors
                ) + tuple(there.values())
            rows = known.rows_per_partition if known else 1
            groups.append(Group(state.name, state.kind, rows, specs, state.place))
        optimizer = self._adapter.optimizer
        if groups != [*layout.groups] or optimizer != layout.optimizer:
            differences = layout.differences(Layout(groups, optimizer))
            if differences:
                raise LayoutMismatch(
                    f"the model is not the one in {self._store.url}: " + "; ".join(differences[:10]),
                    hint="build the model and optimizer as in the run to resume, or use a new store; nothing was "
                    "changed",
                )
        return _missing(layout, states)

    def live(self, arena: Arena) -> LiveState:
        """Return the model's current tensors. Raises LayoutMismatch if they do not fit the arena's layout."""
        views = self._views if self._views is not None and self._views.arena is arena else None
        there = self._adapter.groups()
        if views is not None and _same(there, self._seen):
            return views
        states = _states_of(there, arena.layout)
        self._say_what_is_new(there, arena.layout)
        tensors = [_tensors(state, group) for state, group in zip(states, arena.layout.groups, strict=True)]
        frozen = frozenset(g for g, state in enumerate(states) if state.frozen)
        if views is None:
            views = LiveState(arena.layout, tensors, arena, frozen, writable_of(self._adapter))
        else:
            views = views.with_tensors(dict(enumerate(tensors)), frozen)
        self._views, self._seen = views, list(there)
        return views

    def _say_what_is_new(self, there: Sequence[StateGroup], layout: Layout) -> None:
        known = {group.name for group in layout.groups}
        unowned: Callable[[], list[str]] = getattr(self._adapter, "unowned", list)
        if new := [state.name for state in there if state.name not in known] + unowned():
            more = f" and {len(new) - 3} more" if len(new) > 3 else ""
            self._caveats.say(
                "new-state",
                f"{', '.join(map(repr, new[:3]))}{more} was added to the model after the first step, and is not saved. "
                "Register it before the first step, or train each phase with a store of its own",
            )


def _missing(layout: Layout, states: Sequence[StateGroup]) -> set[tuple[int, int]]:
    there = {state.name: state.tensors for state in states}
    return {
        (g, t)
        for g, group in enumerate(layout.groups)
        for t, spec in enumerate(group.tensors)
        if t and _is_missing(there.get(group.name, {}).get(spec.slot))
    }


def _is_missing(tensor: torch.Tensor | None) -> bool:
    return tensor is None or is_placeholder(tensor)


def _same(groups: Sequence[StateGroup], others: Sequence[StateGroup]) -> bool:
    """Return whether these are the same objects. An adapter returns a new group when one of its tensors is replaced."""
    return len(groups) == len(others) and all(map(operator.is_, groups, others))


def layout_of(adapter: Adapter, fixed: Settings, groups: Sequence[StateGroup] | None = None) -> Layout:
    """Return the layout of the live state, cut by the fixed settings of a store. groups: the adapter's, if known."""
    groups = adapter.groups() if groups is None else groups
    elsewhere: Collection[str] = getattr(adapter, "elsewhere", ())
    return fixed.layout([(g.name, g.kind, _specs(g), g.place) for g in groups], adapter.optimizer, elsewhere)


def tensors_of(adapter: Adapter, layout: Layout) -> list[list[torch.Tensor]]:
    """Return the live tensors, parallel to the layout's. Raises LayoutMismatch if they do not fit it."""
    states = _states_of(adapter.groups(), layout)
    return [_tensors(state, group) for state, group in zip(states, layout.groups, strict=True)]


def _states_of(there: Sequence[StateGroup], layout: Layout) -> list[StateGroup]:
    """Return an adapter's groups, parallel to the layout's. Raises LayoutMismatch if they do not fit it."""
    by_name = {state.name: state for state in there}
    for group in layout.groups:
        state = by_name.get(group.name)
        found = [state.tensors.get(spec.slot) for spec in group.tensors] if state else []
        if not found or any(
            t is None or tuple(t.shape) != spec.shape or t.dtype != torch_of(spec.dtype)
            for t, spec in zip(found, group.tensors, strict=True)
        ):
            raise LayoutMismatch(
                f"group {group.name!r} has changed since the layout was fixed",
                hint="parameters and their optimizer state must not be added, removed, resized or given another dtype "
                "while a session is open",
            )
        assert state is not None
        known = {spec.slot for spec in group.tensors}
        if new := [s for s, t in state.tensors.items() if s not in known and not is_placeholder(t)]:
            # A resumed run could not continue without these slots.
            raise LayoutMismatch(
                f"group {group.name!r} has gained optimizer state since the layout was fixed: {', '.join(new)}",
                hint="to thaw parameters in mid-run, give them to the optimizer before attach(), and freeze them only "
                "after it; or train each phase with a store of its own. Earlier checkpoints are safe",
            )
    return [by_name[group.name] for group in layout.groups]


def _tensors(state: StateGroup, group: Group) -> list[torch.Tensor]:
    return [state.tensors[spec.slot] for spec in group.tensors]


def _specs(group: StateGroup) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(slot, name_of(tensor.dtype, group.name), tuple(tensor.shape))
        for slot, tensor in group.tensors.items()
    )
