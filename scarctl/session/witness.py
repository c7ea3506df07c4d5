"""Detect a resumed run that continues differently, by saving digests of the next forward with each checkpoint.

A checkpoint of step k has digests of the random numbers and inputs with which the first forward pass of step k+1 began.
The first forward pass of a run that resumes from it must begin with the same. That holds whatever the loop does
before that pass: make an iterator, skip batches, draw noise, read the environment.

If nothing followed the step, for example because the run was closed, no comparison is possible. Then the loop must draw
as many random numbers as before each of its last steps, and must not read a DataLoader.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from scarctl.checkpoint.randomness import Raw, digests, draws, raw, untransformed, unwrapped
from scarctl.checkpoint.streams import is_capturing
from scarctl.session.changes import Changes
from scarctl.session.loader import iterators

_GAPS = 3
"""Number of gaps between steps that are kept, to learn how much the loop usually draws in one."""
_MODULES = 64
"""Number of modules without tensor arguments after which the search for inputs ends."""
_SAMPLES = 4096
"""Values in the digest of one input on a GPU."""


@dataclass(slots=True)
class _Gap:
    """The time from the end of a step, or from the moment the loop received a batch, to the next forward pass."""

    step: int
    begun: Raw
    ended: Raw | None = None
    inputs: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Inputs of the forward pass, with their counts of in-place writes at that time."""
    values: Mapping[str, Any] | None = None
    """Hyperparameters at the gap's end; None in later iterations. See `Changes.within`."""
    trains: bool = False
    """Whether a forward pass recorded gradients, so that it was not one that only measures statistics."""

    def drawn(self) -> list[int] | None:
        return None if self.ended is None else draws(self.begun, self.ended)


class Witness:
    """Observes the first forward pass in training mode after each step."""

    def __init__(
        self, modules: Callable[[], Iterable[nn.Module]] | None, rank: int, *, framework: bool
    ) -> None:
        """modules: returns the trained model's modules; None: nothing is observed. framework: one owns the loop."""
        self._framework = framework
        self.first: Callable[[], None] | None = None
        """Called before the first module runs after a step."""
        self._modules = modules
        self._rank = rank
        self._world = 1
        """Number of processes at the first step: a loop may leave its group before it closes the session."""
        self._ids: frozenset[int] = frozenset()
        self._gpu = False
        """Whether a parameter is on a GPU."""
        self._gaps: deque[_Gap] = deque(maxlen=_GAPS)
        """Recent gaps, the newest last."""
        self._handle: Any = None
        self._left = 0
        self._looking = False
        """Whether the hook is installed."""
        self._seen: Callable[[bool], None] = lambda trains: None
        self._expected: Mapping[str, Any] | None = None
        self._kept: tuple[int, Mapping[str, Any]] | None = None
        """The step from which the run resumed, and the digests saved with it."""
        self._changes = Changes(modules)
        self.looks = modules is not None
        """Whether a model can be observed."""

    def seen(self, step: int) -> bool:
        """Return whether the forward pass after `step` has begun."""
        return bool(self._gaps) and self._gaps[-1].step == step and self._gaps[-1].ended is not None

    def trains(self, step: int) -> bool:
        """Return whether the next iteration's forward pass has begun after `step`, with gradients."""
        return self.seen(step) and self._gaps[-1].trains

    def begin(self, step: int, seen: Callable[[bool], None], now: Raw | None = None) -> None:
        """Start observing after `step`, ended or resumed from.

        seen: called when the next forward begins, with whether it records gradients. now: the random numbers, if they
        were read already.
        """
        if self._looking:
            self.stop()
        if self._modules is None:
            return
        self._gaps.append(_Gap(step, now or raw()))
        if not self._changes.settled:
            self._changes.iteration_ends()
        self._seen = seen
        if not self._ids:
            self._world = _world()
            self._ids = frozenset(map(id, self._modules()))
            self._gpu = any(p.is_cuda for module in self._modules() for p in module.parameters(recurse=False))
        self._look_on()

    def restart(self, step: int) -> None:
        """Forget a forward pass that was seen after `step`: it was not the next iteration's."""
        if self.seen(step):
            self._gaps[-1] = _Gap(step, raw())
            self._look_on()

    def _look_on(self) -> None:
        self._left, self._looking = _MODULES, True
        # The hook is for all modules, because one on the model would be copied and pickled with it; it is soon
        # removed.
        if self._handle is None:
            self._handle = nn.modules.module.register_module_forward_pre_hook(self._look)
        else:
            # The same as registering the hook, without another handle for each step.
            self._handle.hooks_dict_ref()[self._handle.id] = self._look

    def given(self, step: int) -> None:
        """Restart the gap, because `Session.batches` returned a batch: draws for it do not count."""
        if self._gaps and self._gaps[-1].step == step and self._gaps[-1].ended is None:
            self._gaps[-1].begun = raw()

    def step_begins(self) -> None:
        """Stop observing this gap, because the next step is about to change parameters."""
        values = None if self._changes.settled else self._changes.within()
        if self._looking and self._gaps:
            gap = self._gaps[-1]
            if gap.ended is None:
                gap.ended, gap.values = raw(), values
            self.stop()
            if not gap.inputs:
                self._seen(True)

    def stop(self) -> None:
        """Stop observing."""
        if self._looking:
            self._looking = False
            self._handle.remove()

    def _look(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not module.training or (self._gpu and is_capturing()):
            return
        if id(module) not in self._ids and id(getattr(module, "_orig_mod", None)) not in self._ids:
            return
        trains = torch.is_grad_enabled()
        with untransformed():
            self._note(args, trains=trains)

    def _note(self, args: Any, *, trains: bool) -> None:
        """Note the beginning of a forward pass. trains: it records gradients."""
        gap = self._gaps[-1]
        if gap.ended is None:
            if self.first is not None:
                self.first()
            gap.ended = raw()
            gap.values = None if self._changes.settled else self._changes.within()
        known = bool(gap.inputs)
        if known:
            pass  # a pass without gradients came first: frozen layers, or statistics that are measured again
        elif len(args) == 1 and isinstance(args[0], torch.Tensor):  # as for `_tensors`, which takes longer
            gap.inputs = [_input(args[0])]
        else:
            gap.inputs = list(map(_input, _tensors(args)))
        gap.trains = gap.trains or trains
        if not known:  # a long pass without gradients must not end the search for the one with them
            self._left -= 1
        # If the inputs are keywords, an inner module gets them unchanged.
        if not self._left or (gap.inputs and gap.trains):
            self.stop()
        if not known and (gap.inputs or not self._left):
            self._seen(gap.trains)

    def following(self, step: int) -> dict[str, Any] | None:
        """Return the digests that `differences` compares with, for `Extras.following`; None without a model."""
        gap = next((gap for gap in self._gaps if gap.step == step), None)
        if not self.looks:
            return None
        values = None if gap is None else gap.values
        found: dict[str, Any] = {"rank": self._rank, "world": self._world, **self._changes.found(values)}
        if gap is not None and gap.ended is not None:
            found |= {"drawn": digests(gap.ended), "inputs": _digest(gap.inputs)}
        elif self._kept is not None and self._kept[0] == step:
            found = dict(self._kept[1])
        else:
            found["usual"] = [gap.drawn() for gap in self._gaps if gap.step < step]
        return found

    def expect(self, following: Mapping[str, Any] | None, step: int) -> None:
        """Expect the loop to continue after `step` as the extras' `following` describes. It may be hostile input."""
        mine = following if following is not None and following.get("rank") == self._rank else None
        self._expected = mine
        self._kept = None if mine is None else (step, mine)
        if mine is not None:
            self._changes.expect(mine)

    @property
    def expecting(self) -> bool:
        """Whether `differences` has something to compare with."""
        return self._expected is not None

    def forget(self) -> None:
        """Expect nothing, because the loop does not continue from the resumed state."""
        self._expected = self._kept = None

    def differences(self, *, by_hand: bool, positioned: bool) -> list[str]:
        """Return why the run does not continue as the stopped one would have; call it once, after the first forward.

        by_hand: whether the loop reads its data without `Session.batches`. positioned: whether it has extras, which
        may contain its position.
        """
        expected, self._expected = self._expected, None
        if expected is None or not self._gaps or self._gaps[-1].ended is None:
            return []
        gap = self._gaps[-1]
        found = self._changes.differences(expected, gap.values, followed="drawn" in expected)
        now = _world()
        before = expected.get("world", now)
        if before != now:  # this process saves alone: otherwise the state would be divided otherwise
            found.append(
                f"the number of processes was {before!r:.20} when the run was stopped, and is {now} now"
            )
        if isinstance(expected.get("drawn"), dict):
            begun = digests(gap.ended)  # type: ignore[arg-type]
            moved = [name for name, digest in begun.items() if expected["drawn"].get(name) != digest]
            if moved:
                found.append(f"the first forward begins with other random numbers of {' and '.join(moved)}")
            inputs = _digest(gap.inputs)
            if expected.get("inputs") and inputs and expected["inputs"] != inputs:
                found.append("the first batch is not the one that came next in the run that was stopped")
            return found
        if self._framework:
            return found  # the framework restores its own position
        usual = expected.get("usual")
        usual = [counts for counts in usual if counts is not None] if isinstance(usual, list) else []
        drawn = gap.drawn()
        if drawn != [0, 0, 0] or usual:
            # A run that stopped before its second step has no usual counts.
            same = drawn is not None and usual and all(list(counts) == drawn for counts in usual)
            if not same:
                found.append(
                    "random numbers are drawn before the first forward, and may differ from the earlier run's next ones"
                )
        if by_hand and _reads_a_loader():
            found.append("a DataLoader is read, and which batch came next is not saved")
        elif by_hand and not positioned and drawn == [0, 0, 0]:
            found.append("neither saved random numbers nor extras show which data came next")
        return found


def _world() -> int:
    """Return the number of processes that train together, whether or not they save together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _reads_a_loader() -> bool:
    """Return whether this process has an iterator over a DataLoader."""
    return any(True for _ in iterators())


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among a module's arguments."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from (item for item in arg if isinstance(item, torch.Tensor))
        elif isinstance(arg, Mapping):
            yield from (item for item in arg.values() if isinstance(item, torch.Tensor))


def _input(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return an input with its count of writes."""
    tensor = unwrapped(tensor)
    return tensor, tensor._version


def _digest(inputs: list[tuple[torch.Tensor, int]]) -> str | None:
    """Digest all values of the inputs, or a sample on a GPU; None without inputs, or if one was written to since."""
    total = hashlib.blake2b(digest_size=12)
    for tensor, version in inputs:
        if tensor._version != version or tensor.layout != torch.strided or tensor.is_nested:
            return None
        flat = tensor.detach().reshape(-1)
        if flat.device.type != "cpu" and flat.numel() > _SAMPLES:
            flat = flat[:: flat.numel() // _SAMPLES]
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return total.hexdigest() if inputs else None
