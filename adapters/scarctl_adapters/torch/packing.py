"""Pack an optimizer's values as plain values, with parameters and their state by reference.

A packed value is a leaf (a number, text, an array) or a tuple that begins with its kind. `unpack` creates no other
kinds, so a hostile store cannot create objects of other classes.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from scarctl.errors import UsageError
from scarctl.stateful import restore_state, state_of

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
LEAVES = (bool, int, float, complex, str, bytes, type(None))
_SEQUENCES: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_NAMES = {kind: name for name, kind in {**_SEQUENCES, **_MAPPINGS}.items()}
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_DEPTH = 16


class Unsavable(UsageError):
    """A value that cannot be packed. The message names it."""


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has one value in memory per element: no subclass, not sparse, not expanded."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    strides = tensor.stride()
    return 0 not in strides or not any(
        stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)
    )


class References:
    """Tensors with a place in the state, which are packed as their places."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self._places: dict[int, tuple[Any, ...]] = {
            id(p): ("parameter", number) for number, p in enumerate(self.parameters)
        }
        self._named: dict[tuple[Any, ...], torch.Tensor] = {}
        self._memory = {_memory(p) for p in self.parameters}

    def add(self, place: tuple[Any, ...], tensor: torch.Tensor) -> None:
        """Add a tensor at this place of the state."""
        self._places.setdefault(id(tensor), place)
        self._named[place] = tensor
        self._memory.add(_memory(tensor))

    def place(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Return the tensor's place, if it has one."""
        return self._places.get(id(tensor))

    def at(self, place: tuple[Any, ...]) -> torch.Tensor:
        """Return the tensor at a place. Raises UsageError if the place has no tensor."""
        found = self._named.get(place)
        if found is None and place[0] == "parameter":
            number = place[1]
            found = self.parameters[number] if number < len(self.parameters) else None
        if found is None:
            raise UsageError(f"the store refers to {place}, where the optimizer has no tensor")
        return found

    def shares(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares memory with a tensor that has a place."""
        return tensor.numel() > 0 and _memory(tensor) in self._memory

    def device(self) -> torch.device:
        """Return the device for tensors that are not on the host."""
        return self.parameters[0].device if self.parameters else torch.device("cpu")


def pack(value: Any, references: References, path: str, depth: int = _DEPTH) -> Any:
    """Pack a value; see the module's docstring. Raises Unsavable, naming `path`."""
    kind = type(value)
    if kind in LEAVES or isinstance(value, np.generic | np.ndarray):
        return value
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, references, path)
    if depth <= 0:
        raise Unsavable(f"{path} has more than {_DEPTH} levels")
    if kind is torch.dtype:
        return ("dtype", str(value).removeprefix("torch."))
    if kind is torch.device:
        return ("device", str(value))
    if isinstance(value, GENERATORS):
        return ("generator", state_of(value))
    if kind in _SEQUENCES.values():
        return (_NAMES[kind], [pack(item, references, f"{path}[..]", depth - 1) for item in value])
    if kind is deque:
        return ("deque", [pack(item, references, f"{path}[..]", depth - 1) for item in value], value.maxlen)
    if kind in _MAPPINGS.values() or kind is defaultdict:
        pairs = [
            [pack_key(key, references, path), pack(item, references, f"{path}[{key!r}]", depth - 1)]
            for key, item in value.items()
        ]
        return (_NAMES.get(kind, "defaultdict"), pairs)
    raise Unsavable(f"{path} is a {kind.__qualname__}")


def _pack_tensor(value: torch.Tensor, references: References, path: str) -> Any:
    place = references.place(value)
    if place is not None:
        return place
    if not is_plain_tensor(value):
        raise Unsavable(f"{path} is a tensor of class {type(value).__qualname__} and layout {value.layout}")
    if references.shares(value):
        raise Unsavable(f"{path} is a view of another tensor's memory")
    return ("tensor", value.device.type == "cpu", value.detach())


def pack_key(key: Any, references: References, path: str) -> Any:
    """Pack a key of a dict. Some optimizers use the id of a parameter."""
    if type(key) is int:
        for number, parameter in enumerate(references.parameters):
            if id(parameter) == key:
                return ("id", number)
    return pack(key, references, f"a key of {path}")


def unpack(node: Any, references: References, live: Any = None) -> Any:
    """Return the packed value. live: the present value, restored in place if possible. Raises UsageError for others."""
    if type(node) is not tuple:
        return node
    kind = node[0] if node else None
    body = node[1] if len(node) > 1 else None
    if kind in ("parameter", "slot"):
        return references.at(node)
    if kind == "id":
        return id(references.at(("parameter", body)))
    if kind == "tensor":
        return _unpack_tensor(node, references, live)
    if kind == "dtype":
        found = getattr(torch, str(body), None)
        if isinstance(found, torch.dtype):
            return found
    elif kind == "device":
        return torch.device(str(body))
    elif kind == "generator":
        if isinstance(live, GENERATORS):
            restore_state(live, body)
            return live
        raise UsageError("this optimizer lacks a random number generator that the store has")
    elif kind in _SEQUENCES:
        return _SEQUENCES[kind]([unpack(item, references) for item in node[1]])
    elif kind == "deque":
        return deque((unpack(item, references) for item in node[1]), node[2])
    elif kind in (*_MAPPINGS, "defaultdict"):
        found = {unpack(key, references): unpack(item, references) for key, item in node[1]}
        return _fill(kind, found, live)
    raise UsageError(f"the store has an optimizer value of unknown kind: {kind!r}")


def _fill(kind: str, found: Mapping[Any, Any], live: Any) -> Any:
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](found)
    if not isinstance(live, defaultdict):
        return dict(found)
    live.clear()
    live.update(found)
    return live


def _unpack_tensor(node: tuple[Any, ...], references: References, live: Any) -> torch.Tensor:
    _, on_host, value = node
    if not isinstance(value, torch.Tensor):
        raise UsageError("the store has an optimizer tensor that is not a tensor")
    if (
        isinstance(live, torch.Tensor)
        and is_plain_tensor(live)
        and (live.shape, live.stride(), live.dtype) == (value.shape, value.stride(), value.dtype)
        and references.place(live) is None
    ):
        with torch.no_grad():  # other objects may refer to it
            return live.copy_(value)
    return value.clone() if on_host else value.to(references.device(), copy=True)


def _memory(tensor: torch.Tensor) -> int:
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if plain else -id(tensor)
