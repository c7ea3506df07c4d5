"""Find what takes part in training, changes, and is not saved: a target network, a teacher, another average.

So does the state of a communication hook of DistributedDataParallel, such as PowerSGD's error.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scarctl.checkpoint.randomness import untransformed
from scarctl.state.caveats import Caveats
from scarctl_adapters.torch.following import Following

_STEPS = 3
"""Number of first iterations in which forward passes are checked."""
_SAMPLES = 8
"""Number of a module's tensors that are compared, one value of each."""

_Place: TypeAlias = tuple[nn.Module, str]
"""A module and the name of one of its own tensors."""


class _Other:
    """A module that is not saved, as it was when it was first seen."""

    def __init__(self, module: nn.Module, places: Sequence[_Place]) -> None:
        self.module = weakref.ref(module)
        step = max(1, len(places) // _SAMPLES)
        # Not references to the tensors: torch swaps no tensor that has a weak one.
        self._places = [(weakref.ref(owner), name) for owner, name in places[::step][:_SAMPLES]]
        self._first = self._now()

    def _now(self) -> list[tuple[int, float | None] | None]:
        """Return the count of writes and one value of each tensor; None for a tensor that is gone."""
        found: list[tuple[int, float | None] | None] = []
        for known, name in self._places:
            owner = known()
            tensor = None if owner is None else _tensor_at(owner, name)
            if tensor is None or not _is_readable(tensor):
                found.append(None)
                continue
            # Writes through `.data` are not counted. A GPU is not waited for.
            value = tensor.detach().reshape(-1)[tensor.numel() // 2] if tensor.device.type == "cpu" else None
            found.append((tensor._version, None if value is None else value.item()))
        return found

    def changed(self) -> bool:
        """Return whether one of its tensors has changed. Moving a module to another device changes nothing."""
        return any(
            first is not None
            and now is not None
            and (first[0] != now[0] or (None not in (first[1], now[1]) and first[1] != now[1]))
            for first, now in zip(self._first, self._now(), strict=True)
        )


class Outside:
    """Looks at all forward passes of the first iterations, and later at the modules found then.

    A communication hook whose state has a true `settled` has nothing to save.
    """

    def __init__(
        self, model: nn.Module, parameters: Iterable[torch.Tensor], saved: Iterable[Any], caveats: Caveats
    ) -> None:
        """parameters: the optimizers' parameters, which are saved even if they are not the model's, such as a
        criterion's.

        saved: the objects whose state is saved in addition to that of `model`.
        """
        self._caveats = caveats
        self._parameters = list(parameters)
        self._saved = [model, *_modules_of(saved)]
        self._known = {id(module) for owner in self._saved for module in owner.modules()}
        self._others: list[_Other] = []
        self._ddp = weakref.WeakSet(m for m in self._saved if isinstance(m, DistributedDataParallel))
        self._given = {id(item) for item in saved}
        self.following = Following(model, self._parameters, caveats)
        self._steps = 0
        self._handle: Any = nn.modules.module.register_module_forward_pre_hook(self._runs)

    def _runs(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled():
            with untransformed():
                self.following.forward_begins()
        if id(module) in self._known:
            return
        if isinstance(module, DistributedDataParallel):
            self._ddp.add(module)
        self._known |= {id(inner) for inner in module.modules()}
        # Wrappers around the model have its tensors. Those of a transformed function have no memory.
        with contextlib.suppress(RuntimeError):
            saved = {t.data_ptr() for owner in self._saved for t in _tensors_of(owner)}
            saved |= {t.data_ptr() for t in _readable(self._parameters)}
            places = [(owner, name) for owner, name, t in _places_of(module) if t.data_ptr() not in saved]
            if places:
                self._others.append(_Other(module, places))

    def stepped(self) -> None:
        """Note that an iteration has ended."""
        self._steps += 1
        if self._steps == _STEPS:
            self.end()

    def look(self) -> None:
        """Report modules that have changed since they were first seen. Called for every checkpoint."""
        for other in self._others:
            module = other.module()
            if module is not None and other.changed():
                self._caveats.say(
                    "outside-module",
                    f"a {type(module).__name__} that is not part of the model runs in the loop and changes, and it is "
                    "not saved. Pass it in extras, with Extra(..., after_step=True) if the loop does not read "
                    "session.batches()",
                )

        if kinds := self.unsettled():
            self._caveats.say(
                "communication-hook",
                f"a communication hook of DistributedDataParallel has a state ({', '.join(kinds)}) that is not saved: "
                "a resumed run reduces its next gradients differently",
            )
        else:
            self._caveats.withdraw("communication-hook")

    def unsettled(self) -> list[str]:
        """Return the types of communication hooks' states that are not saved, and may let ranks differ."""
        states = [state for ddp in self._ddp for _, state in getattr(ddp, "_comm_hooks", ())]
        states = [s for s in states if not (s is None or _is_group(s) or id(s) in self._given)]
        return sorted({type(s).__name__ for s in states if not getattr(s, "settled", False)})

    def end(self) -> None:
        """Remove the hook."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()


def _is_group(state: object) -> bool:
    """Return whether a hook's state is only the ranks that it reduces over."""
    return dist.is_available() and isinstance(state, dist.ProcessGroup)


def _modules_of(items: Iterable[Any]) -> list[nn.Module]:
    """Return the modules among `items`, and modules in their attributes or values."""
    found = []
    for item in items:
        if isinstance(item, nn.Module):
            found.append(item)
            continue
        inner = (
            item.values()
            if isinstance(item, dict)
            else vars(item).values()
            if hasattr(item, "__dict__")
            else ()
        )
        found += [value for value in inner if isinstance(value, nn.Module)]
    return found


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return _readable((*module.parameters(), *module.buffers()))


def _places_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield owner, name and tensor of the readable parameters, then of the readable buffers."""
    for kind in (nn.Module.named_parameters, nn.Module.named_buffers):
        for owner in module.modules():
            for name, tensor in kind(owner, recurse=False):
                if _is_readable(tensor):
                    yield owner, name, tensor


def _tensor_at(owner: nn.Module, name: str) -> torch.Tensor | None:
    return owner._parameters.get(name, owner._buffers.get(name))


def _readable(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t for t in tensors if _is_readable(t)]


def _is_readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain, strided, and has elements."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return plain and tensor.layout is torch.strided and tensor.numel() > 0
