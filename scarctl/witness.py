"""What comes right after a step, kept with its checkpoint: a resumed run that continues otherwise is found out.

A checkpoint of step k has digests of the random numbers and of the inputs with which the first forward pass of step k+1
began. The first forward of a run that resumes from it must begin with the same. That holds whatever the loop does in
between: make an iterator, skip batches, draw noise, read the environment.

Where nothing came after the step, as when the run was closed, there is nothing to compare with. Then the loop must draw
as many random numbers as it drew before each of its last steps, and not read a DataLoader.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from scarctl.randomness import Raw, digests, draws, raw

FIELD = "next"
"""Of a checkpoint's extras."""
_GAPS = 3
"""Between steps, kept to see how much the loop usually draws in one."""
_MODULES = 64
"""Modules without tensors as arguments, after which the search for inputs ends."""
_SAMPLES = 4096
"""Values of one input that count, of those that lie on a GPU."""


@dataclass(slots=True)
class _Gap:
    """From the end of a step, or the moment the loop was given a batch, to the next forward."""

    step: int
    begun: Raw
    ended: Raw | None = None
    inputs: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """With the counts of writes that they had."""

    def drawn(self) -> list[int] | None:
        return None if self.ended is None else draws(self.begun, self.ended)


class Witness:
    """Looks at the first forward pass, in training, after each step."""

    def __init__(
        self, modules: Callable[[], Iterable[nn.Module]] | None, rank: int, *, framework: bool
    ) -> None:
        """modules: of the trained model; None: nothing is looked at. framework: one owns the loop."""
        self._framework = framework
        self._modules = modules
        self._rank = rank
        self._ids: frozenset[int] = frozenset()
        self._gaps: list[_Gap] = []
        """The newest one last."""
        self._remove: Callable[[], None] = lambda: None
        self._left = 0
        self._looking = False
        """The hook is there."""
        self._seen: Callable[[], None] = lambda: None
        self._expected: Mapping[str, Any] | None = None
        self._kept: tuple[int, Mapping[str, Any]] | None = None
        """What came after the step that the run was resumed from."""

    @property
    def looks(self) -> bool:
        """Whether there is a model to look at."""
        return self._modules is not None

    def seen(self, step: int) -> bool:
        """Whether the forward after `step` has begun."""
        return any(gap.step == step and gap.ended is not None for gap in self._gaps[-1:])

    def begin(self, step: int, seen: Callable[[], None]) -> None:
        """Step `step` has ended, or is the one that was resumed from. seen: called when the next forward begins."""
        self.stop()
        if self._modules is None:
            return
        self._gaps = [*self._gaps[1 - _GAPS :], _Gap(step, raw())]
        self._seen = seen
        if not self._ids:
            self._ids = frozenset(map(id, self._modules()))
        self._left, self._looking = _MODULES, True
        # Of all modules, because a hook of the model's own would be copied and pickled with it; and for a moment only.
        self._remove = nn.modules.module.register_module_forward_pre_hook(self._look).remove

    def given(self, step: int) -> None:
        """The loop was given a batch by `Session.batches`: what was drawn for it is no part of the gap."""
        if self._gaps and self._gaps[-1].step == step and self._gaps[-1].ended is None:
            self._gaps[-1].begun = raw()

    def step_begins(self) -> None:
        """The next step is about to change parameters: what is not seen by now is not to be seen."""
        if self._gaps and self._looking:
            gap = self._gaps[-1]
            gap.ended = gap.ended or raw()
            self.stop()
            self._seen()

    def stop(self) -> None:
        """Look no more."""
        self._looking = False
        remove, self._remove = self._remove, lambda: None
        remove()

    def _look(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        inner = getattr(module, "_orig_mod", module)
        if not module.training or (id(module) not in self._ids and id(inner) not in self._ids):
            return
        gap = self._gaps[-1]
        first = gap.ended is None
        if first:
            gap.ended = raw()
        gap.inputs = [(tensor, tensor._version) for tensor in _tensors(args)]
        self._left -= 1
        # Where the inputs are keywords, a module inside gets them as they are.
        if gap.inputs or not self._left:
            self.stop()
            self._seen()

    def to_extras(self, step: int) -> dict[str, Any]:
        """What `differences` compares with, as one more field of extras."""
        gap = next((gap for gap in self._gaps if gap.step == step), None)
        if not self.looks:
            return {}
        found: dict[str, Any] = {"rank": self._rank}
        if gap is not None and gap.ended is not None:
            found |= {"drawn": digests(gap.ended), "inputs": _digest(gap.inputs)}
        elif self._kept is not None and self._kept[0] == step:
            found = dict(self._kept[1])
        else:
            found["usual"] = [gap.drawn() for gap in self._gaps if gap.step < step]
        return {FIELD: found}

    def expect(self, extras: Any, step: int) -> None:
        """The run resumes from these extras, of `step`. Takes hostile input."""
        found = extras.get(FIELD) if isinstance(extras, dict) else None
        mine = isinstance(found, dict) and found.get("rank") == self._rank
        self._expected = found if mine else None
        self._kept = (step, found) if mine and isinstance(found, dict) else None

    def forget(self) -> None:
        """The loop begins with another state than the one that was resumed."""
        self._expected = self._kept = None

    def differences(self, *, by_hand: bool, positioned: bool) -> list[str]:
        """Why the run does not continue as the one that it resumes would have. Once, right after the first forward.

        by_hand: the loop reads its data without `Session.batches`. positioned: it has extras, which may say
        where it is.
        """
        expected, self._expected = self._expected, None
        if expected is None or not self._gaps or self._gaps[-1].ended is None:
            return []
        gap = self._gaps[-1]
        if isinstance(expected.get("drawn"), dict):
            now = digests(gap.ended)  # type: ignore[arg-type]
            moved = [name for name, digest in now.items() if expected["drawn"].get(name) != digest]
            found = (
                [f"the first forward begins with other random numbers of {' and '.join(moved)}"]
                if moved
                else []
            )
            inputs = _digest(gap.inputs)
            if expected.get("inputs") and inputs and expected["inputs"] != inputs:
                found.append("the first batch is not the one that came next in the run that was stopped")
            return found
        if self._framework:
            return []  # it says itself where it is
        found = []
        usual = expected.get("usual")
        usual = [counts for counts in usual if counts is not None] if isinstance(usual, list) else []
        drawn = gap.drawn()
        if drawn != [0, 0, 0] or usual:
            # Where a run was stopped before it had taken two steps, nothing is usual.
            same = drawn is not None and usual and all(list(counts) == drawn for counts in usual)
            if not same:
                found.append(
                    "random numbers are drawn before the first forward, perhaps not those that came next"
                )
        if by_hand and _reads_a_loader():
            found.append("a DataLoader is read, and which batch came next is not saved")
        elif by_hand and not positioned and drawn == [0, 0, 0]:
            found.append("nothing that is saved says which data came next: neither random numbers nor extras")
        return found


def _reads_a_loader() -> bool:
    """Whether an iterator over a DataLoader is under way in this process."""
    return any(isinstance(item, _BaseDataLoaderIter) for item in gc.get_objects())


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    """Those among a module's arguments."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from (item for item in arg if isinstance(item, torch.Tensor))
        elif isinstance(arg, Mapping):
            yield from (item for item in arg.values() if isinstance(item, torch.Tensor))


def _digest(inputs: list[tuple[torch.Tensor, int]]) -> str | None:
    """Of all their values, or a sample on a GPU. None where one was written to since, or there are none."""
    total = hashlib.blake2b(digest_size=12)
    for tensor, version in inputs:
        if tensor._version != version or tensor.layout != torch.strided:
            return None
        flat = tensor.detach().reshape(-1)
        if flat.device.type != "cpu" and flat.numel() > _SAMPLES:
            flat = flat[:: flat.numel() // _SAMPLES]
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return total.hexdigest() if inputs else None
