"""Name the attributes of an object that training changes, and that nothing saves: a replay buffer, an environment."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

_DEPTH = 4
_ENDS = 4
"""Items at each end of a container that are looked at."""
_VALUES = 4096
"""Most values of a tensor or array that are looked at."""
_SKIPPED = (nn.Module, torch.optim.Optimizer, DataLoader, Dataset, type, FunctionType, MethodType, ModuleType)


class Attributes:
    """The attributes of an object as they are now, but for those with names that begin with an underscore."""

    def __init__(self, owner: object, saved: Collection[int] = ()) -> None:
        """saved: ids of the objects that are saved elsewhere."""
        self._owner, self._saved = owner, saved
        self._before = self._prints()

    def changed(self) -> list[str]:
        """Return the names of those that have changed, or are new.

        Only the ends of long containers are looked at, objects in objects to a depth of four, and no modules,
        optimizers and data sets.
        """
        now = self._prints()
        return [name for name in now if now[name] != self._before.get(name)]

    def _prints(self) -> dict[str, str]:
        found = {}
        for name, value in vars(self._owner).items():
            if not name.startswith("_") and id(value) not in self._saved and not isinstance(value, _SKIPPED):
                digest = hashlib.blake2b()
                _feed(digest, value, _DEPTH)
                found[name] = digest.hexdigest()
        return found


def message(owner: object, names: Collection[str]) -> str:
    """Return the warning about such attributes."""
    return (
        f"nothing saves these attributes of the module {type(owner).__name__}, which training changes: "
        f"{', '.join(names)}. Register tensors as buffers, and pass objects in extras="
    )


def _feed(digest: Any, value: Any, depth: int) -> None:
    """Add what a value looks like from outside to a digest; reading it has no effect and does not wait for a GPU."""
    digest.update(type(value).__qualname__.encode())
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        digest.update(repr(value).encode())
    elif isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.device.type == "cpu" and value.layout is torch.strided and value.numel() <= _VALUES:
            digest.update(repr(value.detach().tolist()).encode())
        else:
            digest.update(f"{id(value)} {value._version}".encode())
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(f"{value.dtype}{value.shape}{value.reshape(-1)[:_VALUES].tolist()}".encode())
    elif isinstance(value, torch.Generator):
        digest.update(repr(value.get_state().tolist()).encode())
    elif isinstance(value, _SKIPPED) or depth == 0:
        return
    elif isinstance(value, Mapping):
        _feed(digest, [len(value), *islice(value.items(), _ENDS)], depth - 1)
        if isinstance(value, dict):
            _feed(digest, list(islice(reversed(value.items()), _ENDS)), depth - 1)
    elif isinstance(value, list | tuple) or hasattr(value, "appendleft"):
        digest.update(str(len(value)).encode())
        for item in [*islice(value, _ENDS), *islice(reversed(value), _ENDS)]:
            _feed(digest, item, depth - 1)
    elif isinstance(value, set | frozenset):
        digest.update(str(len(value)).encode())
    elif hasattr(value, "getstate") and type(value).__module__ == "random":
        digest.update(repr(value.getstate()).encode())
    elif isinstance(value, np.random.Generator | np.random.RandomState):
        found = value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state()
        digest.update(repr(found).encode())
    elif type(value).__module__.partition(".")[0] not in _LIBRARIES:
        for name, item in getattr(value, "__dict__", {}).items():
            digest.update(name.encode())
            _feed(digest, item, depth - 1)


_LIBRARIES = frozenset(
    ("torch", "lightning", "pytorch_lightning", "torchmetrics", "logging", "threading", "builtins")
)
"""Libraries whose objects count by their class."""
