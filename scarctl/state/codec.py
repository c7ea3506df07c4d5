"""Encode a small structure of plain values and arrays as JSON text plus tensors. Nothing is unpickled.

JSON represents plain values directly. Every other value is an object with one key that names its type, so that
decoding restores exactly the original types:

    null, true, 1, 1.5, "text", [..]       None, bool, int, finite float, str, list
    {"dict": {"lr": 0.1}}                  dict with str keys
    {"items": [[key, value], ..]}          dict with other keys
    {"Counter": [[key, count], ..]}        collections.Counter (milestones of a learning-rate schedule)
    {"OrderedDict": [[key, value], ..]}    collections.OrderedDict
    {"tuple": [..]}                        tuple
    {"set": [..]}, {"frozenset": [..]}     set, frozenset
    {"deque": [[..], 10]}                  collections.deque, and its maximum length or null
    {"float": "nan" | "inf" | "-inf"}      float that JSON lacks
    {"int": "0x1f.."}                      int of more than 64 bits (the state of a random number generator)
    {"complex": [re, im]}                  complex
    {"str": "ed a0 80"}                    str that is not valid Unicode, as UTF-8 bytes in hex
    {"bytes": "0"}                         bytes, in the U8 tensor "0"
    {"tensor": "0"}                        RawTensor, the tensor "0"
    {"permuted": ["0", [1, 0]]}            the same with its dimensions' order in memory, outermost first
    {"array": "0"}                         numpy array of a dtype that safetensors has, in the tensor "0"
    {"array": ["0", "<c16", [2, 3]]}       numpy array of another dtype, its bytes in the U8 tensor "0"
    {"scalar": ["<f4", "0000803f"]}        numpy scalar, bytes in hex
    {"np.str": ..}, {"np.bytes": ..}       numpy str_ and bytes_
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Corruption, UsageError
from scarctl.state.raw_tensor import NUMPY, RawTensor, fault_of
from scarctl.util.json_size import too_much

MAX_DEPTH = 64
"""Most levels of nested containers. A deeper structure contains itself, or is hostile."""

_MAX_CONTAINERS = 3 << 18
"""Most lists and objects in a text: those of a dict with a tensor for each of 196,000 parameters."""
_LEAF_DEPTH = 2
"""A leaf may be an object in an object: {"np.str": {"str": ..}}."""

_NAMES = {numpy: name for name, numpy in NUMPY.items()}
# Long doubles are left out, because their bytes differ between machines. Text of no length is left out, because
# zero bytes could then claim any number of values.
_PORTABLE = re.compile(
    r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f[248]|[<>]c(8|16)|\|S[1-9]\d{0,8}|[<>]U[1-9]\d{0,8}|[<>][mM]8(\[\w{1,16}\])?",
    re.ASCII,
)
_PLAIN = {type(None), bool, int, str}
_HEX_INT = re.compile(r"-?0x[0-9a-f]+", re.ASCII)
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Tensors: TypeAlias = "dict[str, RawTensor]"


def encode(obj: object) -> tuple[str, Tensors]:
    """Return JSON text (ASCII) for `obj`, and its tensors by the names "0", "1", ... that the text gives them.

    Leaves: None, bool, int, float, complex, str, bytes, numpy arrays and scalars, RawTensor. Containers:
    list, tuple, deque, dict, OrderedDict, Counter, set, frozenset. Subclasses are refused, because decoding would
    change their type. Arrays are copied, so later changes to them have no effect.

    Raises UsageError naming the place of any other value ("extras.sched.x is a socket"), and for more than 64 levels.
    """
    tensors: Tensors = {}
    try:
        tree = _encode(obj, MAX_DEPTH, tensors)
    except _Unfit as unfit:
        of = "a key of " if unfit.key else ""
        raise UsageError(f"{of}extras{unfit.place} {unfit.why}", hint=unfit.hint) from None
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False)
    if reason := too_much(text, containers=_MAX_CONTAINERS):
        raise UsageError(f"extras: {reason}", hint="put long lists of numbers into arrays")
    return text, tensors


def decode(text: str, tensors: Mapping[str, RawTensor]) -> object:
    """Return the structure that `encode` took; every array is new and writable.

    Takes hostile input: raises Corruption for anything that `encode` cannot have written. Memory use is bounded
    by a multiple of the sizes of `text` and `tensors`.
    """
    if reason := too_much(text, containers=_MAX_CONTAINERS):
        _bad(reason)
    decoder = _Decoder(tensors)
    try:
        tree = json.loads(text, object_pairs_hook=_one_of_each, parse_constant=_no_constant)
    except (ValueError, TypeError, RecursionError) as error:
        raise Corruption(f"extras: not JSON: {error}") from error
    result = decoder.decode(tree, MAX_DEPTH + _LEAF_DEPTH)
    if decoder.unused:
        raise Corruption(f"extras: no value refers to the tensors {sorted(decoder.unused)[:3]}")
    return result


# --- encoding -----------------------------------------------------------------------------------------------


class _Unfit(Exception):
    """A value that extras cannot hold. Its place is put together only then, as that takes longer than encoding."""

    def __init__(self, why: str, hint: str = "") -> None:
        self.why = why
        self.hint = hint
        self.place = ""
        self.key = False
        """It is a key of what is at the place."""


def _encode(obj: Any, depth: int, tensors: Tensors) -> Any:
    kind = type(obj)
    if obj is None or kind is bool:
        return obj
    if kind is int:
        # Hex, because Python limits how many decimal digits it parses, and other JSON readers round large numbers.
        return obj if -(1 << 63) <= obj < 1 << 64 else {"int": hex(obj)}
    if kind is float:
        return obj if math.isfinite(obj) else {"float": str(obj)}
    if kind is complex:
        return {"complex": [_encode(x, depth, tensors) for x in (obj.real, obj.imag)]}
    if kind is str:
        return obj if _is_unicode(obj) else {"str": obj.encode("utf-8", "surrogatepass").hex()}
    if kind is bytes:
        return {"bytes": _add(tensors, RawTensor("U8", (len(obj),), obj))}
    if kind is RawTensor:
        if reason := fault_of(obj):
            raise _Unfit(f"is not a valid tensor: {reason}")
        name = _add(tensors, obj)
        return {"permuted": [name, list(obj.order)]} if obj.order else {"tensor": name}
    if kind is np.ndarray:
        return _encode_array(obj, tensors)
    if isinstance(obj, np.generic):
        return _encode_scalar(obj, depth, tensors)
    return _encode_container(obj, depth - 1, tensors)


def _encode_container(obj: Any, depth: int, tensors: Tensors) -> Any:
    kind = type(obj)
    if kind not in (list, tuple, set, frozenset, deque, dict, OrderedDict, Counter):
        raise _Unfit(
            f"is a {kind.__name__}, which extras cannot hold",
            hint="convert it to plain Python values, lists, tuples, dicts, sets or arrays first",
        )
    if depth < 0:
        raise _Unfit(f"is nested more than {MAX_DEPTH} levels deep, or contains itself")
    if kind in (list, tuple):
        items = _items(obj, depth, tensors, "[{}]")
        return items if kind is list else {"tuple": items}
    if kind is deque:
        return {"deque": [_items(obj, depth - 1, tensors, "[..]"), obj.maxlen]}
    if kind in (set, frozenset):
        return {kind.__name__: _items(obj, depth, tensors, "{{}}")}
    if kind is dict and all(type(key) is str and _is_unicode(key) for key in obj):
        return {"dict": dict(zip(obj, _values(obj, depth, tensors), strict=True))}
    try:
        keys = _items(obj, depth, tensors, "")
    except _Unfit as unfit:
        unfit.key, unfit.place = True, ""
        raise
    pairs = zip(keys, _values(obj, depth, tensors), strict=True)
    return {"items" if kind is dict else kind.__name__: [list(pair) for pair in pairs]}


def _values(obj: Mapping[Any, Any], depth: int, tensors: Tensors) -> list[Any]:
    """Encode the values of a dictionary."""
    values: list[Any] = []
    try:
        for value in obj.values():
            values.append(_encode(value, depth, tensors))
    except _Unfit as unfit:
        unfit.place = _below(list(obj)[len(values)]) + unfit.place
        raise
    return values


def _items(values: Iterable[Any], depth: int, tensors: Tensors, place: str) -> list[Any]:
    """Encode the values of a container. place: names one of them, by its number."""
    items: list[Any] = []
    try:
        for value in values:
            items.append(_encode(value, depth, tensors))
    except _Unfit as unfit:
        unfit.place = place.format(len(items)) + unfit.place
        raise
    return items


def _encode_array(array: NDArray[Any], tensors: Tensors) -> Any:
    numpy = array.dtype.str
    if not _is_portable(array.dtype):
        raise _Unfit(
            f"is an array of dtype {array.dtype}, which extras cannot hold",
            hint="use an array of numbers, text or bytes",
        )
    data = array.tobytes()
    if numpy in _NAMES:
        return {"array": _add(tensors, RawTensor(_NAMES[numpy], array.shape, data))}
    return {"array": [_add(tensors, RawTensor("U8", (len(data),), data)), numpy, list(array.shape)]}


def _encode_scalar(scalar: np.generic, depth: int, tensors: Tensors) -> Any:
    # Strings come first, because arrays would strip their trailing zeros.
    if type(scalar) is np.str_:
        return {"np.str": _encode(str(scalar), depth, tensors)}
    if type(scalar) is np.bytes_:
        return {"np.bytes": _encode(bytes(scalar), depth, tensors)}
    if not _is_portable(scalar.dtype):
        raise _Unfit(f"is a {type(scalar).__name__}, which extras cannot hold")
    return {"scalar": [scalar.dtype.str, scalar.tobytes().hex()]}


def _add(tensors: Tensors, tensor: RawTensor) -> str:
    name = str(len(tensors))
    tensors[name] = tensor
    return name


def _below(key: object) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def _is_portable(dtype: np.dtype[Any]) -> bool:
    return _PORTABLE.fullmatch(dtype.str) is not None


# --- decoding -----------------------------------------------------------------------------------------------


class _Decoder:
    """Decodes each tag with a method of its own. Every tensor is used once, so hostile text cannot multiply it."""

    def __init__(self, tensors: Mapping[str, RawTensor]) -> None:
        self.unused = dict(tensors)
        self.tags: dict[str, Callable[[Any, int], object]] = {
            "dict": self._dict,
            "items": lambda body, depth: self._mapping(dict, body, depth),
            "OrderedDict": lambda body, depth: self._mapping(OrderedDict, body, depth),
            "Counter": lambda body, depth: self._mapping(Counter, body, depth),
            "tuple": lambda body, depth: tuple(self._list(body, depth)),
            "set": lambda body, depth: self._unique(set, body, depth),
            "frozenset": lambda body, depth: self._unique(frozenset, body, depth),
            "deque": self._deque,
            "permuted": self._permuted,
            "float": self._float,
            "int": self._int,
            "complex": self._complex,
            "str": self._str,
            "bytes": lambda body, _: bytes(self._tensor(body, "U8").data),
            "tensor": lambda body, _: self._tensor(body),
            "array": self._array,
            "scalar": self._scalar,
            "np.str": lambda body, depth: np.str_(self._only(str, body, depth)),
            "np.bytes": lambda body, depth: np.bytes_(self._only(bytes, body, depth)),
        }

    def decode(self, tree: Any, depth: int) -> object:
        if tree is None or isinstance(tree, (bool, int, str)):
            return tree
        if isinstance(tree, float):
            return tree if math.isfinite(tree) else _bad("a number is out of range")
        if depth <= 0:
            _bad(f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(tree, list):
            return self._list(tree, depth)
        tag, body = next(iter(tree.items())) if len(tree) == 1 else (None, None)
        if tag not in self.tags:
            _bad(f"unknown kind of value {tag!r}")
        return self.tags[tag](body, depth)

    def _list(self, body: Any, depth: int) -> list[object]:
        items = _checked(body, list)
        if set(map(type, items)) <= _PLAIN:  # a long list of numbers
            return list(items)
        return [self.decode(item, depth - 1) for item in items]

    def _dict(self, body: Any, depth: int) -> object:
        return {key: self.decode(value, depth - 1) for key, value in _checked(body, dict).items()}

    def _mapping(self, kind: type[dict[Any, Any]], body: Any, depth: int) -> object:
        pairs = [_checked(pair, list, 2) for pair in _checked(body, list)]
        decoded = [(self.decode(key, depth - 1), self.decode(value, depth - 1)) for key, value in pairs]
        result = kind()
        try:
            result.update(dict(decoded))
        except TypeError as error:
            _bad(f"a key is invalid: {error}")
        return result if len(result) == len(decoded) else _bad("two keys are equal")

    def _unique(self, kind: Callable[[Iterable[object]], Any], body: Any, depth: int) -> object:
        items = self._list(body, depth)
        try:
            result = kind(items)
        except TypeError as error:
            _bad(f"a member of a set is invalid: {error}")
        return result if len(result) == len(items) else _bad("two members of a set are equal")

    def _deque(self, body: Any, depth: int) -> object:
        items, most = _checked(body, list, 2)
        found = self._list(items, depth - 1)
        if most is not None and not (type(most) is int and len(found) <= most < 1 << 63):
            _bad("a deque holds more than its maximum length")
        return deque(found, most)

    def _permuted(self, body: Any, _: int) -> object:
        name, order = _checked(body, list, 2)
        tensor = self._tensor(name)
        if not all(type(dim) is int for dim in _checked(order, list)):
            _bad("the order of a tensor's dimensions is not a list of integers")
        if sorted(order) != list(range(len(tensor.shape))):
            _bad(f"{order} is not an order of {len(tensor.shape)} dimensions")
        return replace(tensor, order=tuple(order))

    def _only(self, kind: type, body: Any, depth: int) -> Any:
        value = self.decode(body, depth - 1)
        return value if type(value) is kind else _bad(f"not a {kind.__name__}")

    def _float(self, body: Any, _: int) -> object:
        return _FLOATS[body] if isinstance(body, str) and body in _FLOATS else _bad("not a float")

    def _int(self, body: Any, _: int) -> object:
        return int(body, 16) if _HEX_INT.fullmatch(_checked(body, str)) else _bad("not an integer")

    def _complex(self, body: Any, depth: int) -> object:
        real, imaginary = (self._only(float, part, depth) for part in _checked(body, list, 2))
        return complex(real, imaginary)

    def _str(self, body: Any, _: int) -> object:
        try:
            return _from_hex(body).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            return _bad(str(error))

    def _tensor(self, name: Any, dtype: str | None = None) -> RawTensor:
        tensor = self.unused.pop(_checked(name, str), None)
        if tensor is None:
            _bad(f"tensor {name!r} is missing, or used twice")
        reason = fault_of(tensor)
        if reason or (dtype is not None and tensor.dtype != dtype):
            _bad(f"tensor {name!r}: {reason or f'{tensor.dtype}, not {dtype}'}")
        return tensor

    def _array(self, body: Any, _: int) -> object:
        if isinstance(body, str):
            tensor = self._tensor(body)
            dtype, shape = _dtype(NUMPY.get(tensor.dtype)), tensor.shape
        else:
            name, text, sizes = _checked(body, list, 3)
            tensor, dtype, shape = self._tensor(name, "U8"), _dtype(text), tuple(_checked(sizes, list))
        return _filled(dtype, shape, tensor.data)

    def _scalar(self, body: Any, _: int) -> object:
        text, data = _checked(body, list, 2)
        dtype = _dtype(text)
        if dtype.kind in "SU":
            _bad("a numpy scalar has a dtype of text")
        return _filled(dtype, (), _from_hex(data))[()]


def _filled(dtype: np.dtype[Any], shape: tuple[Any, ...], data: bytes | memoryview) -> NDArray[Any]:
    if len(shape) > 64 or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        _bad("an array has an impossible shape")
    if dtype.itemsize * math.prod(shape) != memoryview(data).nbytes:
        _bad(f"{memoryview(data).nbytes} bytes for an array of {dtype} and shape {shape}")
    try:
        return np.ndarray(shape, dtype, bytearray(data))
    except (ValueError, TypeError) as error:  # numpy limits shapes further
        _bad(f"an array of shape {shape} is impossible: {error}")


def _dtype(text: Any) -> np.dtype[Any]:
    if not isinstance(text, str) or not _PORTABLE.fullmatch(text):
        _bad(f"not a dtype of numpy: {text!r}")
    try:
        return np.dtype(text)
    except (TypeError, ValueError) as error:
        _bad(f"not a dtype of numpy: {error}")


def _from_hex(text: Any) -> bytes:
    try:
        return bytes.fromhex(_checked(text, str))
    except ValueError as error:
        _bad(str(error))


def _checked(value: Any, kind: type[Any], length: int | None = None) -> Any:
    if not isinstance(value, kind):
        _bad(f"not a {kind.__name__}")
    if length is not None and len(value) != length:
        _bad(f"a {kind.__name__} has {len(value)} entries, not {length}")
    return value


def _one_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        _bad("an object has two equal keys")
    return result


def _no_constant(text: str) -> NoReturn:
    _bad(f"{text} is not JSON")


def _bad(reason: str) -> NoReturn:
    raise Corruption(f"extras: {reason}")
