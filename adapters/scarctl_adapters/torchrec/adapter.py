"""Adapt `DistributedModelParallel`: tables with their fused optimizers; all else is left to the torch adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel, get_module

from scarctl.adapter import StateGroup, Watching
from scarctl.errors import UsageError
from scarctl.state.caveats import Caveats
from scarctl.state.layout import Place
from scarctl.state.torch_dtypes import private
from scarctl.util.ranks import world_size
from scarctl_adapters.torch.adapter import TorchAdapter
from scarctl_adapters.torch.sharding import params_of, scope_of_group
from scarctl_adapters.torchrec.lookups import Lookups
from scarctl_adapters.torchrec.optimizers import FusedState, mixed, torch_optimizers
from scarctl_adapters.torchrec.tables import Table, fused_optimizers, kernels_of


class TorchRecAdapter(TorchAdapter):
    """State of a model with embedding tables that TorchRec has sharded.

    A table is a group under its name in the model; this rank's part of it is a box of the whole table, so another plan
    takes it over. Slots are the states of the fused optimizer. All other groups are those of `TorchAdapter`.

    A step begins when the first lookup's backward pass does. The last torch optimizer's step ends the iteration.
    Without one, where everything is trained in the backward pass, that pass ends it.
    """

    _knows_tables: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        objects: Mapping[str, Any],
        extras: Mapping[str, Any],
        replicated: Sequence[str] = (),
    ) -> None:
        self._scope = _scope_of(model)
        inner = get_module(model)
        super().__init__(inner, optimizers, objects, extras, replicated)
        kernels = kernels_of(inner)
        # These modules run in the model's place, and are not among its modules.
        self._kernels = [kernel.lookup for kernel in kernels]
        fused = [kernel for kernel in kernels if kernel.fused]
        self._fused = [table for kernel in fused for table in kernel.tables]
        self._dense = {
            self._wrapping.clean(table.name): table
            for kernel in kernels
            if not kernel.fused
            for table in kernel.tables
        }
        self._fused_names = fused_optimizers(inner)
        self._lookups = Lookups(fused)
        self._fused_state = FusedState(
            [(self._wrapping.clean(kernel.module), kernel) for kernel in fused], lambda: self._caveats
        )
        self._table_groups = [self._group(table) for table in self._fused]
        self._ends_backward = bool(self._fused_names) and not self._optimizers

    @classmethod
    def build(cls, model: Any, optimizers: Sequence[Any], **options: Any) -> TorchAdapter:
        """Return an adapter; see `TorchAdapter.build`. Raises UsageError for a model that cannot be saved."""
        return super().build(model, list(torch_optimizers(optimizers)), **options)

    @property
    def optimizer(self) -> str:
        """Names of the torch optimizers' classes, then FBGEMM's names of the fused ones."""
        return "+".join(filter(None, [super().optimizer, *self._fused_names]))

    def groups(self) -> list[StateGroup]:
        """Return the groups of `TorchAdapter`, and this process's parts of fused tables."""
        return [*super().groups(), *self._table_groups]

    def _group(self, table: Table) -> StateGroup:
        role = ("shared", self._scope) if world_size() > 1 else ("own", "")
        name = self._wrapping.clean(table.name)
        return StateGroup(
            name, "parameter", {"": table.weight, **table.slots}, table.place, *role, is_table=True
        )

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in super()._named_parameters() if not _is_in_backward(p))

    def _place_of(self, tensor: torch.Tensor, name: str) -> Place | None:
        table = self._dense.get(name)
        return super()._place_of(tensor, name) if table is None else table.place

    def _role_of(self, name: str, wrapped: str, parameter: nn.Parameter) -> tuple[str, str]:
        if name in self._dense and world_size() > 1:
            return "shared", self._scope
        return super()._role_of(name, wrapped, parameter)

    def touched_rows(self, *, dense: bool) -> dict[str, torch.Tensor]:
        """Return the rows of fused tables that were looked up since the last call, and those of `TorchAdapter`."""
        read = {self._wrapping.clean(name): rows for name, rows in self._lookups.touched().items()}
        return {**super().touched_rows(dense=dense), **read}

    def capture(self) -> dict[str, Any]:
        """Return the extras of `TorchAdapter`, and learning rates and counts of fused optimizers."""
        tables = {"tables": private(self._fused_state.capture()), "trained": self._trained_names()}
        return {**super().capture(), **tables}

    def _trained_names(self) -> list[list[str]]:
        names = {id(parameter): name for name, _, parameter in self._parameters()}
        return [[names.get(id(p), "") for p in params_of(optimizer)] for optimizer in self._optimizers]

    def mix(self, theirs: Any, own: Any) -> Any:
        return {**super().mix(theirs, own), "tables": mixed(theirs["tables"], own["tables"])}

    def restore(self, state: Any) -> None:
        """Restore everything, the random number generators last."""
        if state.get("trained", self._trained_names()) != self._trained_names():
            raise UsageError(
                "other tables than before are trained in the backward pass, so that the state of "
                f"{super().optimizer} does not fit",
                hint="keep the tables that are data-parallel or dense, or begin with a new store",
            )
        self._fused_state.restore(state.get("tables", {"rates": {}, "counts": {}}))
        super().restore(state)

    def watch(self, caveats: Caveats) -> Watching:
        """See `KnowsCaveats`."""
        devices = sorted({table.weight.device.type for table in self._fused} - {"cpu"})
        if devices:
            caveats.say(
                "untested-tables",
                f"embedding tables on {devices[0]} are saved like those on a CPU, but that was never tested: see "
                "docs/torchrec.md",
            )
        return super().watch(caveats)

    def install(self, before: Callable[[], None], after: Callable[[], None] | None) -> Callable[[], None]:
        """Call `before` also before the backward passes of lookups. Return the removal of all hooks."""
        ending = False

        def ended() -> None:
            self._fused_state.step_begins()
            assert after is not None
            after()

        def backward_ended() -> None:
            nonlocal ending
            ending = False
            ended()

        def backward_begins() -> None:
            nonlocal ending
            before()
            self._fused_state.step_begins()
            if self._ends_backward and after is not None and not ending:
                ending = True
                torch.autograd.Variable._execution_engine.queue_callback(backward_ended)

        removals = [self._lookups.install(self._fused_state.forward_begins, backward_begins)]
        if not self._ends_backward:
            removals.append(super().install(before, after and ended))

        def remove() -> None:
            while removals:
                removals.pop()()

        return remove


def _is_in_backward(parameter: object) -> bool:
    """Return whether a parameter is trained in the backward pass, or is an empty one for other ranks' table."""
    return hasattr(parameter, "_in_backward_optimizers")


def _scope_of(model: nn.Module) -> str:
    if not isinstance(model, DistributedModelParallel):
        return ""
    if type(model) is not DistributedModelParallel:
        raise UsageError(
            f"{type(model).__name__} keeps copies of tables that differ between two synchronizations",
            hint="use DistributedModelParallel",
        )
    group = model._env.process_group
    return scope_of_group(group) if group is not None else ""
