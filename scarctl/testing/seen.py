"""What can be seen of a training from outside: compared bit by bit, and sent from one process to another."""

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
from scarctl.layout import Layout
from scarctl.session import Session
from scarctl.testing.training import Training

K = TypeVar("K")
Digests = dict[str, str]
Description = list[list[Any]]

_GENERATORS: dict[str, Callable[[], Any]] = {
    "python": lambda: repr(random.getstate()),  # 625 numbers: one by one takes longer than an iteration
    "numpy": np.random.get_state,
    "torch": torch.get_rng_state,
}


@dataclass(frozen=True)
class Seen:
    """A training between two iterations: SHA-256 of everything, by name."""

    values: Digests
    extras: Digests
    generators: Digests

    @classmethod
    def of(cls, training: Training, generators: Iterable[str]) -> Seen:
        """What there is now."""
        return cls(
            {name: digest(value) for name, value in training.values().items()},
            {name: digest(value) for name, value in training.extras().items()},
            {name: digest(_GENERATORS[name]()) for name in generators},
        )

    def differences(self, other: Seen) -> list[str]:
        """Names of all that differs."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{kind} {name}" for kind in mine for name in differing(mine[kind], theirs[kind])]


class Recorder:
    """The `visit` of one run: records what is seen, checks the count, and does something at chosen iterations."""

    def __init__(
        self,
        training: Training,
        generators: Iterable[str],
        at: Mapping[int, Callable[[Session], object]] | None = None,
    ) -> None:
        """at: what to do once the iteration of that number is over; 0 or where the run resumes: before the first."""
        self.training = training
        self.seen: dict[int, Seen] = {}
        """By the number of the iteration. The first is what was resumed."""
        self.layouts: dict[int, Description] = {}
        self.session: weakref.ref[Session] | None = None
        self._generators = tuple(generators)
        self._at = dict(at or {})

    def __call__(self, session: Session) -> None:
        step = max(self.seen) + 1 if self.seen else session.head_step
        assert session.head_step == step, (
            f"iteration {step} is over, and the session has counted {session.head_step}: each iteration has to count "
            "once, also one of several backward passes or several optimizers"
        )
        self.session = weakref.ref(session)
        self.seen[step] = Seen.of(self.training, self._generators)
        self.layouts[step] = describe(adapter_of(session))
        if step in self._at:
            self._at[step](session)

    @property
    def start(self) -> int:
        """The iteration after which the run began, as the session says. Raises AssertionError when it never began."""
        assert self.seen, "run() has never called visit()"
        return min(self.seen)


def adapter_of(session: Session) -> Adapter:
    """The adapter that a session works with."""
    return session._adapter


def layout_of(session: Session) -> Layout:
    """The layout of a session, after its first iteration."""
    assert session._engine is not None
    return session._engine.layout


def describe(adapter: Adapter) -> Description:
    """Groups in their order: [name, kind, role, scope, place, [[slot, dtype, shape], ...]], as JSON has them."""
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
    """Copies of all tensors by (group, slot): uint8 of shape (rows, bytes per row)."""
    return {
        (group.name, slot): _rows(tensor)
        for group in adapter.groups()
        for slot, tensor in group.tensors.items()
    }


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether it stands for a slot that the optimizer has not made yet: an expanded zero."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def differing(a: Mapping[K, object], b: Mapping[K, object]) -> list[K]:
    """Names under which two mappings do not have the same."""
    return [name for name in {**a, **b} if name not in a or name not in b or a[name] != b[name]]


def digest(value: Any) -> str:
    """SHA-256 of a value, with its types; what is not a container, a tensor, an array or a plain value is refused."""
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
