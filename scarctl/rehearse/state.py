"""Digest, write and compare the whole state of one session of a rehearsed program."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from scarctl.adapter import Adapter
from scarctl.checkpoint.randomness import capture_rng
from scarctl.rehearse.records import GENERATORS, Difference
from scarctl.state.group import DTYPES
from scarctl.state.raw_tensor import RawTensor
from scarctl.state.torch_dtypes import plain, to_raw
from scarctl.state.values import as_numbers

_LONG = 16
"""Numbers of a list that are compared one by one: a generator's state has hundreds."""
_SHOWN = 40
"""Most characters of a value that is shown."""


def digests(adapter: Adapter) -> dict[str, str]:
    """Return a digest each of the parameters, the optimizer's slots, the buffers, and of each random generator."""
    found = {kind: xxhash.xxh3_128() for kind in ("parameters", "slots", "buffers", *GENERATORS)}
    for kind, name, tensor in _tensors(adapter):
        found[kind].update(name.encode())
        found[kind].update(to_raw(tensor).data)
    for name, generator in capture_rng().items():
        feed(found[name], generator)
    return {kind: one.hexdigest() for kind, one in found.items()}


def rates(optimizers: Iterable[Any]) -> dict[str, str]:
    """Return the hyperparameters of all optimizers by name: lr, momentum, and the like."""
    groups = [
        (f" of optimizer {number}, group {place}", group)
        for number, optimizer in enumerate(optimizers)
        for place, group in enumerate(getattr(optimizer, "param_groups", ()))
    ]
    return {
        f"{name}{where if len(groups) > 1 else ''}": _text(plain(value))
        for where, group in groups
        for name, value in group.items()
        if name != "params"
    }


def feed(digest: Any, value: Any) -> None:
    """Add a nested value to a digest. What is neither a tensor nor a plain value counts by its class."""
    if isinstance(value, torch.Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.layout is torch.strided and not value.is_nested:
            digest.update(to_raw(value).data)
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, RawTensor):
        digest.update(f"{value.dtype}{value.shape}".encode() + bytes(value.data))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            feed(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(b"[")
        for item in value:
            feed(digest, item)
    elif isinstance(value, int | float | str | bytes | type(None)):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__qualname__.encode())


def keep(adapter: Adapter, path: Path) -> int:
    """Write the state, and return the number of its tensors."""
    index: dict[str, tuple[str, tuple[int, ...], int]] = {}
    with open(path, "wb") as file:
        for _, name, tensor in _tensors(adapter):
            raw = to_raw(tensor)
            index[name] = raw.dtype, raw.shape, file.tell()
            file.write(raw.data)
    path.with_suffix(".json").write_text(json.dumps({"tensors": index, "extras": _extras(adapter)}))
    return len(index)


def compare(adapter: Adapter, path: Path) -> tuple[Difference, ...]:
    """Compare the state with the one that `keep` has written, bit for bit."""
    kept = json.loads(path.with_suffix(".json").read_text())
    tensors, found = kept["tensors"], []
    with open(path, "rb") as file:
        for _, name, tensor in _tensors(adapter):
            raw = to_raw(tensor)
            dtype, shape, at = tensors.pop(name, (None, (), 0))
            if (dtype, tuple(shape)) != (raw.dtype, raw.shape):
                found.append(Difference(name, "has another shape or type, or is not there in the first run"))
                continue
            file.seek(at)
            before = np.frombuffer(file.read(raw.nbytes), np.uint8)
            after = np.frombuffer(raw.data, np.uint8)
            if not np.array_equal(before, after):
                found.append(Difference(name, _amount(before, after, raw)))
    found += [Difference(name, "is not there") for name in tensors]
    theirs, ours = kept["extras"], _extras(adapter)
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if theirs.get(name) != ours.get(name):
            text = f"{ours.get(name, 'missing')}, not {theirs.get(name, 'missing')}"
            found.append(Difference(name, text, tensor=False))
    return tuple(found)


def _amount(before: NDArray[np.uint8], after: NDArray[np.uint8], raw: RawTensor) -> str:
    """Return how many values differ, and by how much of the largest one."""
    size = DTYPES[raw.dtype]
    count = int((before.reshape(-1, size) != after.reshape(-1, size)).any(axis=1).sum())
    text = f"{count:,} of {before.size // size:,} values"
    with np.errstate(all="ignore"):
        was, now = (as_numbers(data, raw.dtype).astype(np.float64) for data in (before, after))
        ratio = np.abs(now - was).max() / max(np.abs(was).max(), np.abs(now).max())
    return f"{text}, by up to {ratio:.2g} of the largest" if np.isfinite(ratio) else text


def _tensors(adapter: Adapter) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield kind, name and live tensor, the parameters first."""
    groups = adapter.groups()
    for slots in (False, True):
        for group in groups:
            for slot, tensor in group.tensors.items():
                if bool(slot) == slots:
                    kind = "buffers" if group.kind == "buffer" else "slots" if slot else "parameters"
                    yield kind, f"{group.name}/{slot}" if slot else group.name, tensor


def _extras(adapter: Adapter) -> dict[str, str]:
    """Return the extras as texts by name: plain values as they are, arrays and long lists as digests."""
    found: dict[str, str] = {}
    _flatten(plain(adapter.capture()), "", found)
    return found


def _flatten(value: Any, name: str, found: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(item, f"{name}.{key}" if name else str(key), found)
    elif isinstance(value, list | tuple) and len(value) <= _LONG:
        for number, item in enumerate(value):
            _flatten(item, f"{name}[{number}]", found)
    else:
        found[name] = _text(value)


def _text(value: Any) -> str:
    """Return a value as text, an array or a long value as a digest."""
    if isinstance(value, RawTensor) and value.nbytes == DTYPES[value.dtype]:
        return repr(as_numbers(np.frombuffer(value.data, np.uint8), value.dtype)[0].item())
    if isinstance(value, set | frozenset):
        value = sorted(map(repr, value))  # their order differs between processes
    text = "" if isinstance(value, np.ndarray | RawTensor) else repr(value)
    if 0 < len(text) <= _SHOWN:
        return text
    digest = xxhash.xxh3_64()
    feed(digest, value)
    return f"digest {digest.hexdigest()}"
