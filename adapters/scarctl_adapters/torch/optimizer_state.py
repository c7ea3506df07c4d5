"""Save and restore an optimizer's state outside its slots, as extras: settings, counts, attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, compress, repeat
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from scarctl.errors import LayoutMismatch, UsageError
from scarctl.state.torch_dtypes import in_order, order_of
from scarctl_adapters.torch.attributes import Attributes
from scarctl_adapters.torch.homes import Home, states_of
from scarctl_adapters.torch.packing import (
    LEAVES,
    References,
    Unsavable,
    is_plain_tensor,
    pack,
    pack_key,
    unpack,
)
from scarctl_adapters.torch.sharding import is_dtensor, params_of, zero_of
from scarctl_adapters.torch.slots import is_slot

Columns = dict[str, tuple[list[int], list[Any]]]
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


class _Sorted:
    """The classified values of one optimizer's state.

    Classifying takes long with thousands of parameters, and the result changes only with the tensors.
    """

    def __init__(self, references: References) -> None:
        self.references = references
        self.stateful: list[int] = []
        """Numbers of the parameters that have state."""
        self.columns: Columns = {}
        """Values that are saved unchanged, by key: the numbers of the parameters, and the states to read."""
        self.packed: Columns = {}
        self.slots: dict[str, list[int]] = {}
        self.others: list[Any] = []
        self.orders: list[Any] = []
        self._known: tuple[object, list[Any], list[Any]] | None = None
        self._numbers: tuple[dict[str, NDArray[np.int64]], ...] | None = None
        """The numbers of parameters by key, as arrays. Made once, when all are known."""

    def remember(self, state: Mapping[Any, Any], tensors: object) -> bool:
        """Note the source of this result. Return whether the result stays valid while the source is unchanged."""
        content = None if self.packed or self.others else _content(state)
        if content is None:
            return False
        kept = [*state, *(value for held in state.values() for value in held.values())]
        self._known = tensors, content, kept  # kept, so that no other object gets their ids
        return True

    def holds(self, state: Mapping[Any, Any], tensors: object) -> bool:
        """Return whether the state has the same tensors in the same places; see `OptimizerState.capture`."""
        return self._known is not None and self._known[0] is tensors and self._known[1] == _content(state)

    def to_tree(self) -> dict[str, Any]:
        """Return the saved form, with the present values."""
        if self._numbers is None:
            self._numbers = tuple(
                {key: np.array(where, dtype=np.int64) for key, where in wheres.items()}
                for wheres in (
                    {"stateful": self.stateful},
                    {key: where for key, (where, _) in self.columns.items()},
                    self.slots,
                    {key: where for key, (where, _) in self.packed.items()},
                )
            )
        stateful, columns, slots, packed = self._numbers
        return {
            **stateful,
            "columns": {
                key: (columns[key], _stack([state[key] for state in states]))
                for key, (_, states) in self.columns.items()
            },
            "slots": dict(slots),
            "packed": {key: (packed[key], values) for key, (_, values) in self.packed.items()},
            "others": self.others,
            "orders": self.orders,
        }


def _content(state: Mapping[Any, Any]) -> list[Any] | None:
    """Return the ids of parameters and tensors, and the types of other values; None if they do not identify it."""
    every = list(state.values())
    if set(map(type, every)) - {dict}:
        return None
    values = list(chain.from_iterable(map(dict.values, every)))
    types = list(map(type, values))
    tensors = compress(values, map(isinstance, values, repeat(torch.Tensor)))
    keys = list(chain.from_iterable(every))
    return [list(map(id, state)), list(map(len, every)), keys, types, list(map(id, tensors))]


class OptimizerState:
    """Extras of one attached optimizer, and of the optimizers that it wraps."""

    def __init__(self, given: Optimizer, homes: list[Home]) -> None:
        self._given = given
        self.homes = homes
        self._attributes = [Attributes(home.optimizer) for home in homes]
        self._settings = [[dict(group) for group in home.optimizer.param_groups] for home in homes]
        """The param_groups at attach."""
        self._sorted: list[_Sorted | None] = [None] * len(homes)
        """The newest capture's result for each home."""
        self._places: list[list[tuple[torch.Tensor, tuple[int, int]]]] = [[] for _ in homes]
        """Param_group and number of each parameter, for each home: see `check_places`. torch swaps no tensor that has a
        weak reference, as in `Module.to` of sharded parameters.
        """
        self._counts: list[int | None] = [None] * len(homes)
        """Number of param_groups of each home; None before the first step."""

    def capture(self, unsavable: Callable[[str], None], tensors: object = None) -> dict[str, Any]:
        """Return the state by parameter number. unsavable: called with a message for every attribute that cannot be
        saved.

        tensors: the same object as in an earlier call only if no tensor's form or memory has changed since.
        Raises UsageError for a value that cannot be saved and is needed to restore the optimizer.
        """
        first, *nested = [self._home(number, unsavable, tensors) for number in range(len(self.homes))]
        prefixes = [home.prefix for home in self.homes[1:]]
        return first | {"nested": dict(zip(prefixes, nested, strict=True))}

    def check_places(self) -> None:
        """Raise LayoutMismatch if param_groups were added since the first call, or parameters have other numbers.

        A new process begins with the first groups: state that is saved by number would not fit them.
        """
        for at, home in enumerate(self.homes):
            known, count, groups = self._places[at], self._counts[at], home.optimizer.param_groups
            now = [(p, g) for g, group in enumerate(groups) for p in group["params"]]
            places = {id(p): (g, number) for number, (p, g) in enumerate(now)}
            changed = ""
            if any(places.get(id(p), place) != place for p, place in known):
                changed = f"parameters were moved within the param_groups of {self._name}"
            elif count not in (None, len(groups)):
                changed = f"{self._name} has other param_groups"
            if changed:
                raise LayoutMismatch(
                    f"{changed} after the first step: its state would not fit the optimizer that a resumed run begins "
                    "with",
                    hint="make all groups before attach(), and freeze parameters only after it; "
                    "or train each phase with a store of its own. What was saved before is intact",
                )
            self._places[at], self._counts[at] = [(p, places[id(p)]) for p, _ in now], len(groups)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of `capture`. Raises UsageError when it does not fit."""
        nested = saved.get("nested", {})
        if missing := [
            home.prefix for home in self.homes[1:] if home.prefix not in nested and "nested" in saved
        ]:
            raise UsageError(f"the store lacks {self._name}'s {missing[0].rstrip('.')}")
        for home, attributes, theirs in zip(
            self.homes,
            self._attributes,
            [saved, *(nested.get(home.prefix) for home in self.homes[1:])],
            strict=True,
        ):
            if theirs is not None:
                given = self._given if not home.prefix else home.optimizer
                _restore(given, home, attributes, theirs)

    @property
    def _name(self) -> str:
        return type(self._given).__name__

    def _home(self, at: int, unsavable: Callable[[str], None], tensors: object) -> dict[str, Any]:
        home = self.homes[at]
        optimizer = home.optimizer
        sorted_out = self._sorted[at]
        if tensors is None or sorted_out is None or not sorted_out.holds(home.state, tensors):
            self.check_places()
            sorted_out = self._sort(home)
            self._sorted[at] = sorted_out if sorted_out.remember(home.state, tensors) else None
        references = sorted_out.references
        given = self._given if not at else optimizer
        # A group that the loop has just added does not belong to the step that is being saved.
        groups = given.param_groups[: self._counts[at]]
        result = {
            "param_groups": [
                self._plain_settings(group, first)
                for group, first in zip(groups, self._first(at, len(groups)), strict=True)
            ],
            **sorted_out.to_tree(),
            "attributes": [],
        }
        if zero_of(self._given) is None:
            kept = f"an attribute of {self._name} is not saved: "
            result["attributes"] = self._attributes[at].capture(
                references, lambda text: unsavable(kept + text)
            )
        return result

    def _sort(self, home: Home) -> _Sorted:
        references = references_of(home)
        numbers = home.numbers()
        found = _Sorted(references)
        try:
            # A restored state may have another order, with the same effect: the saved form is always the same.
            for parameter, state in sorted(home.state.items(), key=lambda one: numbers.get(id(one[0]), -1)):
                if id(parameter) not in numbers:
                    path = f"state[{parameter!r}]" if not isinstance(parameter, torch.Tensor) else "state"
                    found.others.append(
                        [pack_key(parameter, references, path), pack(state, references, path)]
                    )
                    continue
                number = numbers[id(parameter)]
                found.stateful.append(number)
                for key, value in state.items():
                    if is_slot(key, value, parameter):
                        found.slots.setdefault(key, []).append(number)
                        if not is_dtensor(value) and value.stride() != parameter.stride():
                            found.orders.append((number, key, order_of(value)))
                        continue
                    if is_dtensor(value):
                        raise UsageError(
                            f"{self._name} keeps {key!r}, which is not sharded like its parameter",
                            hint="use an optimizer whose state has the shape of the parameters, such as AdamW",
                        )
                    simple = type(value) in LEAVES or (
                        isinstance(value, torch.Tensor)
                        and is_plain_tensor(value)
                        and references.place(value) == ("slot", number, key)
                    )
                    where, values = (found.columns if simple else found.packed).setdefault(key, ([], []))
                    where.append(number)
                    values.append(state if simple else pack(value, references, f"{key!r} of a parameter"))
        except Unsavable as error:
            raise UsageError(
                f"the state of {self._name} cannot be saved: {error}",
                hint="use an optimizer that keeps tensors and plain values, such as AdamW",
            ) from error
        return found

    def _first(self, at: int, count: int) -> list[dict[str, Any]]:
        first = self._settings[at]
        return first + [{}] * (count - len(first))

    def _plain_settings(self, group: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a param_group, except unsavable ones that have not changed since attach."""
        found = {}
        for name, value in group.items():
            if name == "params":
                continue
            if is_savable(value):
                found[name] = value
            elif not (name in first and (first[name] is value or _equal(first[name], value))):
                raise UsageError(
                    f"param_groups of {self._name} have {name!r}, a {type(value).__qualname__} that has changed",
                    hint="set it before attach: constants need not be saved",
                )
        return found


def is_savable(value: Any) -> bool:
    """Return whether extras can hold a setting."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(is_savable, value))
    if type(value) is dict:
        return all(is_savable(item) for pair in value.items() for item in pair)
    if isinstance(value, torch.Tensor):
        return is_plain_tensor(value) and not isinstance(value, torch.nn.Parameter)
    return type(value) in LEAVES or isinstance(value, np.generic | np.ndarray)


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(result := a == b, bool) and result


def references_of(home: Home) -> References:
    """Return references to the parameters and the tensors of their state."""
    references = References(params_of(home.optimizer))
    numbers = home.numbers()
    for parameter, state in home.state.items():
        if id(parameter) in numbers and isinstance(state, Mapping):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and is_plain_tensor(value):
                    references.add(("slot", numbers[id(parameter)], key), value)
    return references


def _stack(values: list[Any]) -> Any:
    """Return 0-dim tensors of one dtype as one tensor, others as a list: a model has hundreds of step counts."""
    if (
        set(map(type, values)) <= _TENSORS
        and set(map(torch.Tensor.dim, values)) == {0}
        and len(set(map(attrgetter("dtype"), values))) == 1
    ):
        # One wait for the GPU instead of one for each.
        where = set(map(attrgetter("device"), values))
        return torch.stack(values if len(where) == 1 else [v.cpu() for v in values]).detach().cpu()
    return list(values)


def _restore(given: Optimizer, home: Home, attributes: Attributes, saved: Mapping[str, Any]) -> None:
    parameters, states = list(params_of(home.optimizer)), home.state
    if len(saved["param_groups"]) != len(given.param_groups):
        raise UsageError(f"{type(given).__name__} has {len(given.param_groups)} param_groups, the store has "
                         f"{len(saved['param_groups'])}")  # fmt: skip
    for group, values in zip(given.param_groups, saved["param_groups"], strict=True):
        update_group(group, values)
    groups = {id(p): g for g in given.param_groups for p in g["params"]}
    stateful = set(saved["stateful"].tolist())
    held = {} if home.shares else states_of(home.optimizer)
    for number, parameter in enumerate(parameters):
        if number not in stateful and id(parameter) in held:
            del states[parameter]
    _drop_slots(home, saved)
    for number, key, order in saved.get("orders", ()):
        state = states[parameters[number]]
        if key in state:
            state[key] = in_order(state[key], order)
    for key, (where, values) in saved["columns"].items():
        for number, value in zip(where.tolist(), values, strict=True):
            parameter = parameters[number]
            if isinstance(value, torch.Tensor):
                group = groups[id(parameter)]
                # The same rule as torch's own load_state_dict: counts stay on the host unless a kernel reads them.
                moves = key != "step" or group.get("capturable") or group.get("fused")
                value = value.clone().to(parameter.device) if moves else value.clone()
            states[parameter][key] = value
    if not any(saved.get(key) for key in ("packed", "others", "attributes")):
        attributes.restore((), References(()))
        return
    references = references_of(home)
    for key, (where, nodes) in saved.get("packed", {}).items():
        for number, node in zip(where.tolist(), nodes, strict=True):
            state = states[parameters[number]]
            state[key] = unpack(node, references, state.get(key))
    for packed_key, node in saved.get("others", ()):
        other = unpack(packed_key, references)
        states[other] = unpack(node, references, states.get(other))
    attributes.restore(saved.get("attributes", ()), references)


def _drop_slots(home: Home, saved: Mapping[str, Any]) -> None:
    """Delete slots that the saved state lacks: they were created for resuming, or by the constructor."""
    if "slots" not in saved:
        return
    had = {key: set(where.tolist()) for key, where in saved["slots"].items()}
    held = {} if home.shares else states_of(home.optimizer)
    for number, parameter in enumerate(params_of(home.optimizer)):
        state = held.get(id(parameter))
        if state is None:
            continue
        for key in [key for key, value in state.items() if is_slot(key, value, parameter)]:
            if number not in had.get(key, ()):
                del state[key]


def update_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set values in an optimizer's param_group. A tensor moves to the device of the old one."""
    for name, value in values.items():
        before = group.get(name)
        if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
            value = value.to(before.device)
        group[name] = value
