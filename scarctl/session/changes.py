"""Find unsaved hyperparameters of modules that a loop has changed, such as a dropout rate or frozen parameters.

They are compared with those at `attach`. A run that resumes must have made the same changes. Two kinds prove nothing,
and are left out. A `requires_grad` that is set and reset within an iteration, as in a GAN, depends on when it is read.
After a run was closed, so does a value that the loop keeps setting as a function of the step.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod, PruningContainer

_MOST = 1000
"""Most changes that are saved by name."""
_NAMED = 3
_WINDOWS = 3
"""Iterations in which the hyperparameters are read at several moments."""
_MOVING = 3
"""Changes of one hyperparameter after which the loop is assumed to set it as a function of the step."""
_FROZEN = ".requires_grad"
_PLAIN = (bool, int, float, str, type(None))


class Changes:
    """The hyperparameters of one model's modules that differ from those at the beginning."""

    def __init__(self, modules: Callable[[], Iterable[nn.Module]] | None) -> None:
        self._modules = modules
        self._places: _Places | None = None
        self._first = self._last = self._read()
        self._moves: Counter[str] = Counter()
        """How often a hyperparameter was found changed since it was last read."""
        self._toggled: set[str] = set()
        self._ends = 0
        """Ends of iterations so far; counting stops after the first few."""
        self.settled = False
        """Whether the first iterations are over: hyperparameters are read in no others."""
        self._ended: dict[str, Any] = {}
        """Hyperparameters at the newest end."""
        self._within: list[dict[str, Any]] = []
        """Hyperparameters at each later reading."""
        self._pruned: dict[tuple[int, str], int] = {}
        """See `_prunings`, when the run was resumed."""

    def _read(self) -> dict[str, Any]:
        if self._modules is None:
            return {}
        places = self._places
        if places is None or not places.hold():
            places = self._places = _Places(self._modules())
        return places.read()

    def _look(self) -> dict[str, Any]:
        last, self._last = self._last, self._read()
        if self._last != last:
            self._moves.update(name for name, value in self._last.items() if last.get(name, ...) != value)
        return self._last

    def iteration_ends(self) -> None:
        """Find, in the first iterations, hyperparameters that are set within one and reset before its end."""
        if self.settled:
            return
        self._ends += 1
        before, self._ended = self._ended, self._look()
        within, self._within = self._within, []
        back = (name for name in before if name.endswith(_FROZEN) and self._ended.get(name) == before[name])
        self._toggled |= {n for n in back if any(values.get(n, before[n]) != before[n] for values in within)}
        if self._ends > _WINDOWS:
            self.settled, self._ended = True, {}

    def within(self) -> Mapping[str, Any] | None:
        """Return the hyperparameters now, as the forward pass or the optimizer's step begins; None in later iterations.

        Reading all modules takes time.
        """
        if self.settled:
            return None
        now = self._look()
        self._within.append(now)
        return now

    def found(self, read: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the fields that are saved for `differences`: changed values as text, and the names that are left out.

        read: the result of `within` for the next iteration. None: they are read now.
        """
        moving = sorted(name for name, count in self._moves.items() if count >= _MOVING)
        return {
            "changed": self._changed(read),
            "toggled": sorted(self._toggled)[:_MOST],
            "moving": moving[:_MOST],
        }

    def _changed(self, read: Mapping[str, Any] | None) -> dict[str, str]:
        now = self._look() if read is None else read
        if now == self._first:
            return {}
        changed = {name: repr(value) for name, value in now.items() if self._first.get(name, ...) != value}
        return dict(sorted(changed.items())[:_MOST])

    def expect(self, saved: Mapping[str, Any]) -> None:
        """Take over the names that the earlier run left out: this run may end before it finds them.

        The argument may be hostile input.
        """
        self._pruned = self._prunings()
        self._toggled |= _toggled(saved) & self._first.keys()
        for name in _names(saved, "moving") & self._first.keys():
            self._moves[name] = _MOVING

    def differences(
        self, saved: Mapping[str, Any], read: Mapping[str, Any] | None, *, followed: bool
    ) -> list[str]:
        """Return a sentence for each sign that this run has made other changes than the earlier one.

        saved: the result of `found` in the earlier run; it may be hostile input. read: the result of `within` in this
        one. followed: whether `saved` was read after the next iteration began. Otherwise a change may have followed.
        """
        return [*self._pruned_since(), *self._other(saved, read, followed=followed)]

    def _prunings(self) -> dict[tuple[int, str], int]:
        """Return how many times each pruned parameter was pruned, by number of its module and name."""
        modules = () if self._modules is None else self._modules()
        return {
            (number, hook._tensor_name): len(hook) if isinstance(hook, PruningContainer) else 1
            for number, module in enumerate(modules)
            for hook in module._forward_pre_hooks.values()
            if isinstance(hook, BasePruningMethod)
        }

    def _pruned_since(self) -> list[str]:
        # A parameter's first mask comes from the parameter itself.
        now = self._prunings()
        if all(now.get(place, count) == count for place, count in self._pruned.items()):
            return []
        return [
            "parameters were pruned between resume() and the first forward pass, and their mask comes from weights of "
            "the forward pass before, which are not saved: prune after a forward pass, or pass importance_scores"
        ]

    def _other(
        self, saved: Mapping[str, Any], read: Mapping[str, Any] | None, *, followed: bool
    ) -> list[str]:
        earlier = saved.get("changed")
        if not isinstance(earlier, Mapping):
            return []
        now = self._changed(read)
        other = {name for name in {*earlier, *now} if earlier.get(name) != now.get(name)}
        other -= self._toggled | _toggled(saved)
        if not followed:
            other &= earlier.keys() - _names(saved, "moving")
        if not other:
            return []
        names = sorted(map(str, other))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return [
            "the loop had changed hyperparameters of modules, which are not saved, and they differ now: "
            + ", ".join(name[:80] for name in names[:_NAMED])
            + more
        ]


class _Places:
    """The places of all hyperparameters. Finding them takes longer than reading them, with each checkpoint."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        inside = list(map(vars, self._modules))
        self._children = [inner.get("_modules", {}) for inner in inside]
        self._parameters = [inner.get("_parameters", {}) for inner in inside]
        self._structure = self._now()
        starts = [f"{number} {type(module).__name__}." for number, module in enumerate(self._modules)]
        self._values = [
            (start + name, inner, name)
            for start, inner, module in zip(starts, inside, self._modules, strict=True)
            for name in _hyperparameters(type(module))  # type: ignore[arg-type]
        ]
        self._frozen = [
            (start + name + _FROZEN, held, name)
            for start, held in zip(starts, self._parameters, strict=True)
            for name, _ in held.items()
        ]

    def _now(self) -> list[object]:
        children = list(chain.from_iterable(held.values() for held in self._children))
        names = [
            name for held in self._parameters for name, _ in held.items()
        ]  # of compiled modules, not dicts
        return [
            list(map(id, children)),
            names,
            list(map(len, self._parameters)),
            list(map(type, self._modules)),
        ]

    def hold(self) -> bool:
        """Return whether the model still has these modules, and they have parameters of the same names."""
        return self._now() == self._structure

    def read(self) -> dict[str, Any]:
        """Return the present values, by place."""
        found = {
            key: value for key, held, name in self._values if isinstance(value := held.get(name), _PLAIN)
        }
        for key, held, name in self._frozen:
            if (parameter := held[name]) is not None:
                found[key] = parameter.requires_grad
        return found


@functools.cache
def _hyperparameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of a module's constructor arguments."""
    try:
        return tuple(inspect.signature(kind.__init__).parameters)[1:]
    except (TypeError, ValueError):
        return ()


def _names(saved: Mapping[str, Any], key: str) -> set[str]:
    names = saved.get(key)
    return {name for name in names if isinstance(name, str)} if isinstance(names, list | tuple) else set()


def _toggled(saved: Mapping[str, Any]) -> set[str]:
    return {name for name in _names(saved, "toggled") if name.endswith(_FROZEN)}
