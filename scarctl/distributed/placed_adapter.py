"""Name the places of a member's tensors that are parts of whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scarctl.adapter import Adapter, StateGroup
from scarctl.errors import UsageError
from scarctl.state.group import Place
from scarctl.state.layout import close_to


class PlacedAdapter:
    """Another adapter, whose groups have places. Everything else is the other adapter's."""

    def __init__(self, adapter: Adapter, divided: Mapping[str, tuple[int, int]]) -> None:
        """Take the places: see `scarctl.Member`. Raises UsageError for a name or a place that does not fit a tensor."""
        self.whole = adapter
        self._divided = divided
        self._known: dict[int, tuple[StateGroup, StateGroup]] = {}
        names = {group.name for group in adapter.groups()}
        for name in divided:
            if name not in names:
                raise UsageError(f"divided: there is no tensor {name!r}", hint=close_to(name, names))
        self.groups()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def groups(self) -> list[StateGroup]:
        """See `Adapter`. Raises UsageError for a tensor that does not lie within its whole tensor."""
        known, self._known = self._known, {}
        found = []
        for group in self.whole.groups():
            if group.name in self._divided:
                # The same object again, while the adapter returns the same one.
                there = known.get(id(group))
                placed = there[1] if there is not None and there[0] is group else self._placed(group)
                self._known[id(group)] = (group, placed)
                group = placed
            found.append(group)
        return found

    def _placed(self, group: StateGroup) -> StateGroup:
        shape = tuple(group.tensors[""].shape)
        first, total = self._divided[group.name]
        if not shape:
            raise UsageError(f"divided: tensor {group.name!r} has no rows")
        if first + shape[0] > total:
            raise UsageError(
                f"divided: rows {first} to {first + shape[0]} of tensor {group.name!r} are not among its {total} rows",
                hint="give (first row, rows of the whole tensor)",
            )
        return replace(group, place=Place((total, *shape[1:]), (first, *(0 for _ in shape[1:]))))
