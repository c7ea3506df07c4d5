"""Find the torch optimizers inside TorchRec's, and save fused optimizers' state outside slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper

from scarctl.errors import UsageError
from scarctl.state.caveats import Caveats
from scarctl_adapters.torch.optimizer_state import is_savable, update_group
from scarctl_adapters.torchrec.tables import Kernel


def torch_optimizers(given: Iterable[Any]) -> Iterator[Any]:
    """Yield the optimizers that step parameters with gradients, in the order of the given optimizers' steps.

    Fused optimizers are left out: their steps only set the learning rate. Raises UsageError for a wrapper with its own
    state.
    """
    for optimizer in given:
        if isinstance(optimizer, CombinedOptimizer):
            yield from torch_optimizers(inner for _, inner in optimizer.optimizers)
        elif isinstance(optimizer, FusedOptimizer):
            continue
        elif isinstance(optimizer, KeyedOptimizerWrapper | GradientClippingOptimizer):
            yield from torch_optimizers([optimizer._optimizer])
        elif isinstance(optimizer, KeyedOptimizer):
            raise UsageError(
                f"the state of {type(optimizer).__name__} cannot be saved yet",
                hint="use a scheduler of torch.optim.lr_scheduler, or KeyedOptimizerWrapper and CombinedOptimizer",
            )
        else:
            yield optimizer


class FusedState:
    """Learning rates and step counts of fused kernels, as extras.

    Ranks and sharding plans have different kernels. So values are saved by sharded module and optimizer, and learning
    rates also by the rate at attach: tables with the same initial rate follow the same schedule.
    """

    def __init__(self, kernels: Iterable[tuple[str, Kernel]], caveats: Callable[[], Caveats]) -> None:
        """kernels: fused kernels, with the names of their modules. caveats: returns the session's caveats."""
        self._kernels = [
            (f"{name}: {k.lookup.optimizer.name}", f"{k.lookup.get_learning_rate():g}", k)
            for name, k in kernels
        ]
        self._caveats = caveats
        self._begun: dict[int, dict[str, Any]] = {}
        """Counts from before a forward pass that has begun, by id of the kernel: it counts before its step is taken."""

    def forward_begins(self, kernel: Kernel) -> None:
        """Keep the counts from before the first forward pass after a step."""
        if kernel.counts:
            self._begun.setdefault(id(kernel), _counts(kernel))

    def step_begins(self) -> None:
        """Take the present counts as those of the step that begins."""
        self._begun.clear()

    def capture(self) -> dict[str, Any]:
        """Return the state as plain values."""
        rates: dict[str, Any] = {}
        counts: dict[str, Any] = {}
        for name, first, kernel in self._kernels:
            rate = {
                "rate": kernel.lookup.get_learning_rate(),
                "settings": [
                    {key: value for key, value in group.items() if key != "params" and is_savable(value)}
                    for group in kernel.settings
                ],
            }
            if rates.setdefault(f"{name} {first}", rate) != rate:
                self._caveats().say(
                    "table-rates",
                    f"tables of {name} began with the learning rate {first}, and have different ones now: after a "
                    "resume all have the same one. Give them different rates before attach",
                )
            if kernel.counts:
                counts.setdefault(name, self._begun.get(id(kernel)) or _counts(kernel))
        return {"rates": rates, "counts": counts}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of `capture`. Raises UsageError where a step count is missing."""
        self._begun.clear()
        for name, _, kernel in self._kernels:
            if kernel.counts and name not in saved["counts"]:
                raise UsageError(
                    f"the step count of {name} is unknown: the rank that saved these extras had no table of it",
                    hint="start with the sharding plan and the number of ranks of the run to resume",
                )
        for name, first, kernel in self._kernels:
            if kernel.counts:
                _restore_counts(kernel, saved["counts"][name])
            found = saved["rates"].get(f"{name} {first}")
            if found is None:
                self._caveats().say(
                    "table-rates",
                    f"the learning rate of tables of {name} is unknown: they continue with {first}",
                )
                continue
            kernel.lookup.set_learning_rate(found["rate"])
            for group, values in zip(kernel.settings, found["settings"], strict=True):
                update_group(group, values)


def mixed(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return another rank's `FusedState.capture`, with values from `own` that only this rank has."""
    return {key: {**own.get(key, {}), **theirs[key]} for key in theirs}


def _counts(kernel: Kernel) -> dict[str, Any]:
    return {"iter": int(kernel.lookup.iter), "max_counter": float(kernel.lookup.max_counter)}


def _restore_counts(kernel: Kernel, saved: Mapping[str, Any]) -> None:
    kernel.lookup.iter.fill_(saved["iter"])
    kernel.lookup.iter_cpu.fill_(saved["iter"])
    kernel.lookup.max_counter.fill_(saved["max_counter"])
