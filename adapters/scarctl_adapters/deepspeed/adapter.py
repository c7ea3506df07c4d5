"""Adapt DeepSpeed's engine: master weights and optimizer state of ZeRO; all else is left to the torch adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from scarctl.adapter import StateGroup
from scarctl.errors import UsageError
from scarctl.state.layout import Layout
from scarctl.state.torch_dtypes import private
from scarctl.util.ranks import world_size
from scarctl_adapters.deepspeed.checking import check_engine
from scarctl_adapters.deepspeed.optimizer_state import EngineState, FlatState
from scarctl_adapters.deepspeed.partitions import Fragment, Partitions, place_of_run
from scarctl_adapters.deepspeed.stepping import Stepping
from scarctl_adapters.torch.adapter import TorchAdapter
from scarctl_adapters.torch.names import model_names
from scarctl_adapters.torch.settings import Settled


class DeepSpeedAdapter(TorchAdapter):
    """State of a `DeepSpeedEngine` with ZeRO of stage 1, 2 or 3: an `Adapter` that `Derives` the model's weights.

    A trained parameter is a group under its name in the model: this rank's run of its fp32 master weights, as a vector
    of elements, with the optimizer's slots of the same run. So any number of ranks, and any of these stages, takes it
    over. The model's own weights are rebuilt from the master weights.

    Parameters that no optimizer has are saved as they are, also as vectors. Buffers are those of `TorchAdapter`.

    A step begins when ZeRO first changes master weights. The end of the engine's `step` ends the iteration, unless it
    only accumulates or was skipped.
    """

    def __init__(
        self,
        engine: Any,
        optimizers: Sequence[Optimizer],
        objects: Mapping[str, Any],
        extras: Mapping[str, Any],
        replicated: Sequence[str] = (),
    ) -> None:
        super().__init__(engine.module, [], objects, extras, replicated)
        self._engine, self._zero = engine, engine.optimizer
        self._partitions = Partitions(self._zero)
        self._flat_state = FlatState(self._zero.optimizer, self._partitions)
        self._engine_state = EngineState(engine)
        self._runs = {id(run.parameter): run for run in self._partitions.fragments}
        lists = self._zero.fp16_groups if self._partitions.shards_weights else self._zero.bit16_groups
        self._mastered = {id(parameter) for parameters in lists for parameter in parameters}
        """Ids of the parameters that have master weights, on any rank."""
        self._by_name: dict[str, Fragment] = {}
        self._there: tuple[list[object], list[object]] = [], []
        """Facts about the tensors of the newest groups, and the tensors, kept so that no others get their ids."""
        self._groups: list[StateGroup] = []

    @classmethod
    def build(cls, model: Any, optimizers: Sequence[Any], **options: Any) -> TorchAdapter:
        """Return an adapter; see `TorchAdapter.build`. Raises UsageError for an engine that cannot be saved."""
        check_engine(model, list(optimizers))
        if options.get("scaler") is not None:
            raise UsageError("an engine has its own loss scale", hint="leave scaler out")
        return super().build(model, [], **options)

    @property
    def optimizer(self) -> str:
        """Name of the inner optimizer's class: "DeepSpeed(AdamW)"."""
        return f"DeepSpeed({type(self._zero.optimizer).__name__})"

    @torch.no_grad()
    def groups(self) -> list[StateGroup]:
        """Return this rank's runs of trained parameters, then other parameters, then buffers."""
        facts, kept = self._facts()
        if not self._groups or facts != self._there[0]:
            groups = self._parameter_groups() + self._buffer_groups()
            self._note_names([group.name for group in groups])
            self._there, self._groups = (facts, kept), groups
        return list(self._groups)

    def _facts(self) -> tuple[list[object], list[object]]:
        flats = self._partitions.flats
        slots = [item for flat in flats for item in self._flat_state.slots(flat).items()]
        plain = [p for p in self._model.parameters() if id(p) not in self._mastered]
        buffers = [b for m in self._model.modules() for b in m._buffers.values() if b is not None]
        kept: list[Any] = [*flats, *(slot for _, slot in slots), *plain, *buffers]
        facts = [[key for key, _ in slots], [p.requires_grad for p in plain], *map(id, kept)]
        return [*facts, *(tensor.data_ptr() for tensor in kept), *map(_part_ptr, plain)], kept

    def _parameter_groups(self) -> list[StateGroup]:
        flats = self._partitions.flats
        role = "shared" if world_size() > 1 else "own"
        groups, names = [], {}
        slots = [self._flat_state.slots(flat) for flat in flats]
        for wrapped, parameter in self._model.named_parameters():
            name, run = self._wrapping.clean(wrapped), self._runs.get(id(parameter))
            if run is not None:
                names[name] = run
                found = {"": flats[run.flat], **slots[run.flat]}
                tensors = {slot: run.of(flat) for slot, flat in found.items()}
                groups.append(StateGroup(name, "parameter", tensors, run.place, role))
            elif id(parameter) not in self._mastered:
                groups += self._plain_group(name, parameter, role)
        self._by_name = names
        return groups

    def _plain_group(self, name: str, parameter: Any, role: str) -> list[StateGroup]:
        """Return the group of a parameter without master weights; [] if other ranks have all of it."""
        place, values = None, parameter.detach()
        if self._partitions.shards_weights:
            start, count = self._partitions.part_of(parameter)
            if not count:
                return []
            place = place_of_run(start, count, parameter.ds_numel)
            values = parameter.ds_tensor.detach().narrow(0, 0, count)
        if not values.is_contiguous():
            raise UsageError(f"{name} is not contiguous, and not trained by the engine's optimizer")
        frozen = not parameter.requires_grad
        return [StateGroup(name, "parameter", {"": values.view(-1)}, place, role, frozen=frozen)]

    def _note_names(self, groups: list[str]) -> None:
        names = {id(p): self._wrapping.clean(name) for name, p in self._model.named_parameters()}
        found = model_names(self._model, self._wrapping.clean, self._resident, names, groups)
        shapes = {names[id(p)]: list(getattr(p, "ds_shape", p.shape)) for p in self._model.parameters()}
        self._names_in_model = {**found, "shapes": shapes}

    def _resident(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return parameter

    def capture(self) -> dict[str, Any]:
        """Return the extras of `TorchAdapter`, the engine's counts, and the inner optimizer's state outside slots."""
        zero = Settled(self._zero.optimizer, self._flat_state.capture)
        return {**super().capture(), "engine": private(self._engine_state.capture()), "zero": zero}

    def restore(self, state: Any) -> None:
        """Restore everything, the random number generators last. A collective."""
        self._engine_state.restore(state["engine"])
        self._flat_state.restore(state["zero"])
        self.derive()
        super().restore(state)

    def derive(self) -> None:
        """See `Derives`."""
        self._partitions.rebuild()

    def create_slots(self, layout: Layout) -> Callable[[], None]:
        """Make every missing slot of `layout` in the inner optimizer's state. Return the function that removes them."""
        self.groups()
        return self._flat_state.create_slots(layout, self._by_name)

    def install(self, before: Callable[[], None], after: Callable[[], None] | None) -> Callable[[], None]:
        """Call `before` when ZeRO is about to change master weights, `after` when the engine's step has ended."""
        return Stepping.install(self._engine, before, after)


def _part_ptr(parameter: Any) -> int:
    part = getattr(parameter, "ds_tensor", None)
    return 0 if part is None else int(part.data_ptr())
