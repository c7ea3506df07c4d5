"""PyTorch: an `nn.Module` with any `torch.optim` optimizers, learning-rate schedulers and gradient scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from scarctl.adapter import StateGroup
from scarctl.dtypes import torch_of
from scarctl.errors import UsageError
from scarctl.layout import Layout
from scarctl.stateful import (
    capture_host_rng,
    check_names,
    check_stateful,
    restore_host_rng,
    restore_state,
    state_of,
)

# Adam's step counts are 0-dim tensors, like the moments of a 0-dim parameter: only the name tells them apart.
_NEVER_SLOTS = frozenset({"step"})


class TorchAdapter:
    """State of a module and its optimizers.

    Groups are the module's parameters and persistent buffers, then parameters that only an optimizer knows. Parameters
    that share memory are one group, under the first name. Optimizer state of the parameter's shape are its slots;
    everything else that an optimizer holds (step counts, param_groups) is extras.

    The last optimizer given ends an iteration.
    """

    automatic: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        late: Mapping[str, Any],
        early: Mapping[str, Any],
    ) -> None:
        self._model = model
        self._optimizers = list(optimizers)
        self._late = dict(late)
        self._early = dict(early)
        # Going through all modules takes longer than all else that is done after every step.
        self._places: list[tuple[str, nn.Module, str]] = []

    @classmethod
    def build(
        cls,
        model: Any,
        optimizers: Sequence[Any],
        *,
        schedulers: Sequence[Any] = (),
        scaler: Any = None,
        extras: Mapping[str, Any] | None = None,
    ) -> TorchAdapter:
        """See `scarctl.attach` for the arguments. Raises UsageError for objects that are not what they should be."""
        if not isinstance(model, nn.Module):
            raise UsageError(f"model is a {type(model).__name__}, not a torch.nn.Module")
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise UsageError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        late = {f"scheduler{i}": scheduler for i, scheduler in enumerate(schedulers)}
        if scaler is not None:
            late["scaler"] = scaler
        for name, item in {**late, **(extras or {})}.items():
            check_stateful(name, item)
        return cls(model, optimizers, late, extras or {})

    @property
    def optimizer(self) -> str:
        """Class names of the optimizers, such as "AdamW" or "Adam+SGD"."""
        return "+".join(type(o).__name__ for o in self._optimizers)

    def groups(self) -> list[StateGroup]:
        """Parameters with their slots, then buffers."""
        owners = {id(p): o for o in self._optimizers for p in _params(o)}
        templates = {id(o): _slot_template(o) for o in self._optimizers}
        groups = []
        for name, parameter in self._parameters():
            tensors = {"": parameter.detach()}
            optimizer = owners.get(id(parameter))
            if optimizer is not None:
                tensors |= _slots(optimizer, parameter, templates[id(optimizer)])
            groups.append(StateGroup(name, "parameter", tensors))
        self._places = list(_buffers(self._model))
        groups += [
            StateGroup(name, "buffer", {"": buffer.detach()}) for name, buffer in self.buffers().items()
        ]
        return groups

    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers of the modules that the model had when `groups` was last called."""
        found = ((name, module._buffers.get(key)) for name, module, key in self._places)
        return {name: buffer for name, buffer in found if buffer is not None}

    def capture_early(self) -> dict[str, Any]:
        """Random number generators, and the user's extras."""
        return {"rng": _capture_rng(), "extras": {name: state_of(item) for name, item in self._early.items()}}

    def capture_late(self) -> dict[str, Any]:
        """Optimizers' param_groups and scalars, schedulers, gradient scaler, modules' extra state."""
        return {
            "optimizers": [_optimizer_extras(o) for o in self._optimizers],
            "objects": {name: state_of(item) for name, item in self._late.items()},
            "modules": {name: module.get_extra_state() for name, module in self._modules_with_extra_state()},
        }

    def restore(self, early: Any, late: Any) -> None:
        """Put everything back, the random number generators last."""
        if len(late["optimizers"]) != len(self._optimizers):
            raise UsageError(
                f"the store has {len(late['optimizers'])} optimizers, not {len(self._optimizers)}"
            )
        check_names("schedulers or scaler", late["objects"], self._late)
        check_names("extras", early["extras"], self._early)
        for optimizer, saved in zip(self._optimizers, late["optimizers"], strict=True):
            _restore_optimizer(optimizer, saved)
        for name, item in self._late.items():
            restore_state(item, late["objects"][name])
        for name, module in self._modules_with_extra_state():
            if name in late["modules"]:
                module.set_extra_state(late["modules"][name])
        for name, item in self._early.items():
            restore_state(item, early["extras"][name])
        _restore_rng(early["rng"])

    def create_slots(self, layout: Layout) -> Callable[[], None]:
        """Tensors in the optimizers' state for every slot of `layout` that is not there yet."""
        owners = {id(p): o for o in self._optimizers for p in _params(o)}
        parameters = dict(self._parameters())
        created: list[tuple[Optimizer, nn.Parameter, str]] = []
        for group in layout.groups:
            parameter = parameters.get(group.name)
            if parameter is None or id(parameter) not in owners:
                continue
            state = owners[id(parameter)].state[parameter]
            for spec in group.tensors[1:]:
                if spec.slot not in state:
                    # Filled by whoever restores: to fill it here as well would take as long again.
                    state[spec.slot] = torch.empty_like(parameter.detach(), dtype=torch_of(spec.dtype))
                    created.append((owners[id(parameter)], parameter, spec.slot))

        def remove() -> None:
            for optimizer, parameter, slot in created:
                optimizer.state[parameter].pop(slot, None)
                if not optimizer.state[parameter]:
                    del optimizer.state[parameter]

        return remove

    def install(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        """Step hooks: `before` on every optimizer, `after` on the last one."""
        if not self._optimizers:
            raise UsageError(
                "no optimizer to hook into", hint="pass the optimizer, or auto=False and session.step()"
            )
        handles = [o.register_step_pre_hook(lambda *_: before()) for o in self._optimizers]
        handles.append(self._optimizers[-1].register_step_post_hook(lambda *_: after()))

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[tuple[Any, ...]] = set()
        named = list(self._model.named_parameters())
        for i, optimizer in enumerate(self._optimizers):
            named += [(f"optimizer{i}.param{j}", p) for j, p in enumerate(_params(optimizer))]
        for name, parameter in named:
            # Tied parameters may be two Parameter objects over one storage: memory is what makes them one.
            where = (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype)
            key = where if parameter.numel() else (id(parameter),)
            if key not in seen:
                seen.add(key)
                yield name, parameter

    def _modules_with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield name, module


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Persistent buffers, as name, module and name there: the others are rebuilt by the module itself."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield (f"{prefix}.{name}" if prefix else name), module, name


def _is_slot(key: str, value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and key not in _NEVER_SLOTS and value.shape == parameter.shape


def _slot_template(optimizer: Optimizer) -> dict[str, torch.dtype | None]:
    """Slots that this optimizer gives a parameter, and their dtype (None: the parameter's)."""
    for parameter, state in optimizer.state.items():
        slots = {key: value for key, value in state.items() if _is_slot(key, value, parameter)}
        if slots:
            return {
                key: None if value.dtype == parameter.dtype else value.dtype for key, value in slots.items()
            }
    return {}


def _slots(
    optimizer: Optimizer, parameter: nn.Parameter, template: Mapping[str, torch.dtype | None]
) -> dict[str, torch.Tensor]:
    state = optimizer.state.get(parameter, {})
    slots = {key: value.detach() for key, value in state.items() if _is_slot(key, value, parameter)}
    if slots or not parameter.requires_grad:
        return slots
    # No gradient has reached this parameter yet. Its slots will come, and are zero until then: the layout has
    # them from the start.
    zero = torch.zeros((), device=parameter.device)
    return {key: zero.to(dtype or parameter.dtype).expand(parameter.shape) for key, dtype in template.items()}


def _optimizer_extras(optimizer: Optimizer) -> dict[str, Any]:
    """param_groups without parameters, and per key of the state the values that are no slots, by parameter number."""
    numbers = {id(p): i for i, p in enumerate(_params(optimizer))}
    columns: dict[str, tuple[list[int], list[Any]]] = {}
    stateful = []
    for parameter, state in optimizer.state.items():
        stateful.append(numbers[id(parameter)])
        for key, value in state.items():
            if not _is_slot(key, value, parameter):
                where, values = columns.setdefault(key, ([], []))
                where.append(numbers[id(parameter)])
                values.append(value)
    return {
        "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "stateful": np.array(stateful, dtype=np.int64),
        "columns": {key: (np.array(where), _stack(values)) for key, (where, values) in columns.items()},
    }


def _stack(values: list[Any]) -> Any:
    """Many 0-dim tensors of one dtype as one tensor: a model has hundreds of step counts."""
    if (
        all(isinstance(v, torch.Tensor) and v.dim() == 0 for v in values)
        and len({v.dtype for v in values}) == 1
    ):
        return torch.stack([v.detach().cpu() for v in values])
    return list(values)


def _restore_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    parameters = _params(optimizer)
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        raise UsageError(f"{type(optimizer).__name__} has {len(optimizer.param_groups)} param_groups, the store has "
                         f"{len(saved['param_groups'])}")  # fmt: skip
    for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update(values)
    groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    stateful = set(saved["stateful"].tolist())
    for number, parameter in enumerate(parameters):
        if number not in stateful:
            optimizer.state.pop(parameter, None)
    for key, (where, values) in saved["columns"].items():
        for number, value in zip(where.tolist(), values, strict=True):
            parameter = parameters[number]
            if isinstance(value, torch.Tensor):
                group = groups[id(parameter)]
                # The same rule as torch's own load_state_dict: counts stay on the host unless a kernel reads them.
                moves = key != "step" or group.get("capturable") or group.get("fused")
                value = value.clone().to(parameter.device) if moves else value.clone()
            optimizer.state[parameter][key] = value


def _capture_rng() -> dict[str, Any]:
    """Global random number generators of Python, numpy, torch, and of CUDA where it is in use."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return capture_host_rng() | {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda else [],
    }


def _restore_rng(state: Mapping[str, Any]) -> None:
    """Put `_capture_rng` back; CUDA's only as far as there are devices."""
    restore_host_rng(state)
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
