"""Fingerprint a training from outside its adapter: digests to compare bit by bit, even between processes."""

from __future__ import annotations

import hashlib
import random
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.adapter import Adapter
from scarctl.session.session import Session
from scarctl.state.layout import Layout
from scarctl.testing.training import Training

K = TypeVar("K")
Digests = dict[str, str]
Description = list[list[Any]]

_GENERATORS: dict[str, Callable[[], Any]] = {
    "python": lambda: repr(
        random.getstate()
    ),  # hashing 625 numbers one by one takes longer than an iteration
    "numpy": np.random.get_state,
    "torch": torch.get_rng_state,
}


@dataclass(frozen=True)
class Seen:
    """SHA-256 of every part of a training between two iterations, by name."""

    values: Digests
    extras: Digests
    generators: Digests

    @classmethod
    def of(cls, training: Training, generators: Iterable[str]) -> Seen:
        """Return the current fingerprint. generators: names of global random generators."""
        return cls(
            {name: digest(value) for name, value in training.values().items()},
            {name: digest(value) for name, value in training.extras().items()},
            {name: digest(_GENERATORS[name]()) for name in generators},
        )

    def differences(self, other: Seen) -> list[str]:
        """Return the names of the parts that differ."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{kind} {name}" for kind in mine for name in differing(mine[kind], theirs[kind])]


class Recorder:
    """The `visit` callback of one run: records fingerprints, checks the count, and acts at chosen iterations."""

    def __init__(
        self,
        training: Training,
        generators: Iterable[str],
        at: Mapping[int, Callable[[Session], object]] | None = None,
    ) -> None:
        """at: actions by the iteration after which they run; the number resumed from: before the first iteration."""
        self.training = training
        self.seen: dict[int, Seen] = {}
        """Fingerprints by iteration. The first one is the resumed state's."""
        self.layouts: dict[int, Description] = {}
        self.session: weakref.ref[Session] | None = None
        self._generators = tuple(generators)
        self._at = dict(at or {})

    def __call__(self, session: Session) -> None:
        step = max(self.seen) + 1 if self.seen else session.head_step
        assert session.head_step == step, (
            f"after iteration {step} the session has counted {session.head_step}: each iteration must count once, even "
            "with several backward passes or several optimizers"
        )
        self.session = weakref.ref(session)
        self.seen[step] = Seen.of(self.training, self._generators)
        self.layouts[step] = describe(adapter_of(session))
        if step in self._at:
            self._at[step](session)

    @property
    def start(self) -> int:
        """The session's iteration when the run began. Raises AssertionError if run() never called visit()."""
        assert self.seen, "run() never called visit()"
        return min(self.seen)


def adapter_of(session: Session) -> Adapter:
    """Return the adapter of a session."""
    return session.adapter


def layout_of(session: Session) -> Layout:
    """Return the layout of a session, after its first iteration."""
    return session.layout


def describe(adapter: Adapter) -> Description:
    """Return the groups in order, as JSON values: [name, kind, role, scope, place, [[slot, dtype, shape], ...]]."""
    return [
        [
            group.name,
            group.kind,
            group.role,
            group.scope,
            repr(group.place),
            [[slot, str(tensor.dtype), list(tensor.shape)] for slot, tensor in group.tensors.items()],
        ]
        for group in adapter.groups()
    ]


def rows_of(adapter: Adapter) -> dict[tuple[str, str], NDArray[np.uint8]]:
    """Return copies of all tensors by (group, slot): uint8 of shape (rows, bytes per row)."""
    return {
        (group.name, slot): _rows(tensor)
        for group in adapter.groups()
        for slot, tensor in group.tensors.items()
    }


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for a slot that the optimizer has not created yet: an expanded zero."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def differing(a: Mapping[K, object], b: Mapping[K, object]) -> list[K]:
    """Return the names whose values differ between two mappings."""
    return [name for name in {**a, **b} if name not in a or name not in b or a[name] != b[name]]


def digest(value: Any) -> str:
    """Return the SHA-256 of a container, tensor, array or plain value, with types. Raises TypeError for others."""
    sha = hashlib.sha256()
    _add(sha.update, value)
    return sha.hexdigest()


def _add(add: Callable[[bytes], None], value: Any) -> None:
    if isinstance(value, torch.Tensor):
        add(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        add(_rows(value).tobytes())
    elif isinstance(value, np.ndarray | np.generic):
        add(f"array {value.dtype} {value.shape}".encode())
        add(value.tobytes())
    elif isinstance(value, Mapping):
        add(f"mapping {len(value)}".encode())
        for key in sorted(value, key=repr):
            _add(add, key)
            _add(add, value[key])
    elif isinstance(value, list | tuple):
        add(f"sequence {len(value)}".encode())
        for item in value:
            _add(add, item)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        add(f"{type(value).__name__} {value!r};".encode())
    else:
        raise TypeError(f"values() and extras() hold tensors, arrays and plain values, not {type(value)}")


def _rows(tensor: torch.Tensor) -> NDArray[np.uint8]:
    rows = tensor.shape[0] if tensor.dim() else 1
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: NDArray[np.uint8] = flat.view(torch.uint8).numpy().copy() if flat.numel() else np.empty(0, np.uint8)
    return data.reshape(rows, data.size // rows if rows else 0)
