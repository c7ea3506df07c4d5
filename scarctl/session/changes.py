"""Find hyperparameters of modules that a loop has changed, and that are not saved: a dropout, what is frozen.

They are compared with those at `attach`. A run that resumes must have made the same changes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

_MOST = 1000
"""Most changes that are saved by name."""
_NAMED = 3
_PLAIN = (bool, int, float, str, type(None))


class Changes:
    """The hyperparameters of one model's modules that differ from those at the beginning."""

    def __init__(self, modules: Callable[[], Iterable[nn.Module]] | None) -> None:
        self._modules = modules
        self._first = self._read()

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, module in enumerate(() if self._modules is None else self._modules()):
            inner, kind = vars(module), type(module)
            for name in _hyperparameters(kind):  # type: ignore[arg-type]
                value = inner.get(name)
                if isinstance(value, _PLAIN):
                    found[f"{number} {kind.__name__}.{name}"] = value
            for name, parameter in inner.get("_parameters", {}).items():
                if parameter is not None:
                    found[f"{number} {kind.__name__}.{name}.requires_grad"] = parameter.requires_grad
        return found

    def now(self) -> dict[str, str]:
        """Return the changed hyperparameters and their values as texts."""
        now = self._read()
        if now == self._first:
            return {}
        changed = {name: repr(value) for name, value in now.items() if self._first.get(name, ...) != value}
        return dict(sorted(changed.items())[:_MOST])

    def differences(self, saved: object, *, followed: bool) -> list[str]:
        """Return what says that this run has made other changes than the earlier one; takes hostile input.

        saved: the result of `now` in the earlier run. followed: whether that was read when its next iteration had
        begun. Otherwise a change may have followed.
        """
        if not isinstance(saved, Mapping):
            return []
        now = self.now()
        other = {name for name in {*saved, *now} if saved.get(name) != now.get(name)}
        if not followed:
            other &= saved.keys()
        if not other:
            return []
        names = sorted(map(str, other))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return [
            "the loop had changed hyperparameters of modules, which are not saved, and they differ now: "
            + ", ".join(name[:80] for name in names[:_NAMED])
            + more
        ]


@functools.cache
def _hyperparameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the arguments of a module's constructor."""
    try:
        return tuple(inspect.signature(kind.__init__).parameters)[1:]
    except (TypeError, ValueError):
        return ()
