"""PyTorch: an `nn.Module` with any `torch.optim` optimizers, learning-rate schedulers and gradient scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from scarctl.adapter import StateGroup
from scarctl.errors import UsageError
from scarctl.layout import Layout
from scarctl.randomness import capture_rng, restore_rng, undisturbed
from scarctl.stateful import check_names, check_stateful, restore_state, state_of
from scarctl_adapters.fsdp import (
    Wrapping,
    is_dtensor,
    is_elsewhere,
    is_gathered,
    local_part,
    params_of,
    place_of,
    scope_of_group,
    with_state,
    world,
    zero_of,
)
from scarctl_adapters.light import light_of, with_light
from scarctl_adapters.mixing import mix_late
from scarctl_adapters.sameness import Tensors, tensors_now
from scarctl_adapters.slots import Slots, create_slots, is_slot


class TorchAdapter:
    """State of a module and its optimizers.

    Groups are the module's parameters and persistent buffers, then parameters that only an optimizer knows. Parameters
    that share memory are one group, under the first name. Optimizer state of the parameter's shape are its slots;
    everything else that an optimizer holds (step counts, param_groups) is extras.

    The last optimizer given ends an iteration.

    On several ranks a group is this rank's part of a DTensor, and names are those without DistributedDataParallel. What
    neither a DTensor nor a wrapper says to be equal on all ranks is taken to be this rank's own.
    """

    automatic: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        late: Mapping[str, Any],
        early: Mapping[str, Any],
        replicated: Sequence[str] = (),
    ) -> None:
        self._model = model
        self._optimizers = list(optimizers)
        self._late = dict(late)
        self._early = dict(early)
        self._wrapping = Wrapping(model, replicated)
        self._sharded: dict[str, Any] = {}
        # Going through all modules takes longer than all else that is done after every step.
        self._places: list[tuple[str, nn.Module, str]] = []
        self._trained: list[tuple[str, nn.Parameter, int]] = []
        """Name, parameter, and number of the optimizer that changes it."""
        self._tables: set[str] = set()
        """Weights of embedding modules."""
        self._sparse: set[str] = set()
        """What has had a sparse gradient."""
        self._known: tuple[Tensors | None, list[StateGroup]] = None, []
        """The groups when they were asked for last, and the tensors that there were."""
        self._slots = [Slots(optimizer) for optimizer in self._optimizers]
        self._stepping: int | None = None
        """Number of the optimizer whose step is about to begin."""

    @classmethod
    def build(
        cls,
        model: Any,
        optimizers: Sequence[Any],
        *,
        schedulers: Sequence[Any] = (),
        scaler: Any = None,
        extras: Mapping[str, Any] | None = None,
        after_step: Mapping[str, Any] | None = None,
        replicated: Sequence[str] = (),
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
        late |= after_step or {}
        for name, item in {**late, **(extras or {})}.items():
            check_stateful(name, item)
        adapter = cls(model, optimizers, late, extras or {}, replicated)
        adapter._wrapping.check_patterns([group.name for group in adapter.groups()])
        return adapter

    @property
    def optimizer(self) -> str:
        """Class names of the optimizers, such as "AdamW" or "Adam+SGD"."""
        names = []
        for optimizer in self._optimizers:
            inner = with_state(optimizer)
            name = type(optimizer).__name__
            names.append(name if inner is optimizer else f"{name}({type(inner).__name__})")
        return "+".join(names)

    @property
    def late_per_rank(self) -> bool:
        """With ZeRO, parameters of this rank alone, or modules whose extra state nobody knows to be the same."""
        if world() == 1:
            return False
        return (
            any(zero_of(o) is not None for o in self._optimizers)
            or any(group.role == "own" and group.kind == "parameter" for group in self.groups())
            or any(True for _ in self._modules_with_extra_state())
        )

    @torch.no_grad()
    def groups(self) -> list[StateGroup]:
        """Parameters with their slots, then buffers. Of a DTensor, this rank's part."""
        stepped = self._stepping is not None or any(with_state(o).state for o in self._optimizers)
        # Before the first step the model may go to a GPU yet, and where it was would be kept. What FSDP2 has gathered
        # looks the same from one forward to the next, and the parts that count need not be.
        keeps = stepped and not self._sharded
        there = tensors_now(self._model, self._optimizers) if keeps else None
        known, groups = self._known
        if there is None or there != known:
            groups = self._new_groups(foretell=stepped)
            # Both at once, and only now: a signal's handler may ask in between, and what fails here is asked again.
            self._known = (None, []) if there is None else (there, groups)
        return list(groups)

    def _new_groups(self, *, foretell: bool) -> list[StateGroup]:
        for slots in self._slots:
            slots.learn(foretell=foretell)
        zeros = self._zeros()
        groups = []
        numbers = {id(p): i for i, o in enumerate(self._optimizers) for p in params_of(o)}
        trained = []
        tables = {
            id(m.weight) for m in self._model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
        }
        for name, wrapped, parameter in self._parameters():
            if id(parameter) in numbers:
                trained.append((name, parameter, numbers[id(parameter)]))
                if id(parameter) in tables:
                    self._tables.add(name)
            if is_elsewhere(parameter):
                continue
            tensors = {"": local_part(parameter)}
            owner = next((slots for slots in self._slots if parameter in slots), None)
            if owner is not None:
                tensors |= owner.of(parameter)
            if id(parameter) in zeros:
                # ZeRO sends the parameters around after every step, but not their slots.
                role, scope = "shared" if owner is not None else "replica", zeros[id(parameter)]
            else:
                role, scope = self._wrapping.role(name, wrapped, parameter)
            place, frozen = place_of(parameter, name), not parameter.requires_grad
            groups.append(StateGroup(name, "parameter", tensors, place, role, scope, frozen))
        buffers = list(_buffers(self._model))
        places = [(self._wrapping.clean(name), module, key) for name, module, key in buffers]
        for (wrapped, module, key), (name, _, _) in zip(buffers, places, strict=True):
            buffer = module._buffers[key]
            if buffer is not None and not is_elsewhere(buffer):
                role, scope = self._wrapping.role(name, wrapped, buffer, buffer=True)
                place = place_of(buffer, name)
                groups.append(StateGroup(name, "buffer", {"": local_part(buffer)}, place, role, scope))
        self._trained, self._places = trained, places
        return groups

    def _zeros(self) -> dict[int, str]:
        """Scopes of the parameters, by id, whose slots ZeRO divides among ranks."""
        found: dict[int, str] = {}
        for optimizer in self._optimizers:
            zero = zero_of(optimizer)
            if zero is not None and world() > 1:
                found |= dict.fromkeys(map(id, params_of(zero)), scope_of_group(zero.process_group))
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers of the modules that the model had when `groups` was last called."""
        found = ((name, module._buffers.get(key)) for name, module, key in self._places)
        return {
            name: local_part(buffer) if is_dtensor(buffer) else buffer
            for name, buffer in found
            if buffer is not None
        }

    @torch.no_grad()
    def touched_rows(self, *, dense: bool) -> dict[str, torch.Tensor]:
        """Of a sparse gradient its indices; of a dense one a mask, for which it is read once.

        Tables are what has had a sparse gradient, and with `dense` the weights of `nn.Embedding` and
        `nn.EmbeddingBag` too.
        """
        found = {}
        for name, parameter, number in self._trained:
            grad = parameter.grad
            if grad is None or self._stepping not in (None, number):
                continue
            if grad.layout == torch.sparse_coo:
                self._sparse.add(name)
                found[name] = grad._indices()[0]
            elif name in self._sparse or (dense and name in self._tables):
                part = local_part(grad)
                if part.dim() and part.numel():
                    largest = torch.linalg.vector_norm(part.reshape(part.shape[0], -1), torch.inf, dim=1)
                    found[name] = largest != 0
        return found

    def capture_early(self) -> dict[str, Any]:
        """Random number generators, and the user's extras."""
        with undisturbed():
            return {"rng": capture_rng(), "extras": {n: state_of(item) for n, item in self._early.items()}}

    def modules(self) -> Iterator[nn.Module]:
        """See `KnowsLoop`."""
        return self._model.modules()

    def early_extras(self) -> dict[str, Any]:
        """See `KnowsLoop`."""
        return self._early

    def late_extras(self) -> dict[str, Any]:
        """See `KnowsLoop`."""
        return self._late

    def capture_light(self) -> list[Any]:
        """See `KnowsLoop`."""
        return light_of(self._late, self._optimizers)

    def with_light(self, late: Any, light: Any) -> Any:
        """See `KnowsLoop`."""
        return with_light(late, light)

    def capture_late(self) -> dict[str, Any]:
        """Optimizers' param_groups and scalars, schedulers, gradient scaler, modules' extra state."""
        return {
            "optimizers": [{**_optimizer_extras(o), **self._names(o)} for o in self._optimizers],
            "objects": {name: state_of(item) for name, item in self._late.items()},
            "modules": {name: module.get_extra_state() for name, module in self._modules_with_extra_state()},
        }

    def _names(self, optimizer: Optimizer) -> dict[str, list[str]]:
        """Names of the optimizer's parameters by number, where another rank's numbers may be others."""
        if world() == 1:
            return {}
        names = {id(parameter): name for name, _, parameter in self._parameters()}
        return {"names": [names.get(id(parameter), "") for parameter in params_of(optimizer)]}

    def mix_late(self, theirs: Any, own: Any) -> Any:
        """See `Adapter`."""
        if not self.late_per_rank:
            return theirs
        zeros = {id(p) for o in self._optimizers if zero_of(o) is not None for p in params_of(o)}
        roles = {group.name: group.role for group in self.groups()}
        shared = {
            name
            for name, _, parameter in self._parameters()
            if roles.get(name) == "shared" and id(parameter) not in zeros
        }
        return mix_late(theirs, own, shared)

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
        restore_rng(early["rng"])

    def create_slots(self, layout: Layout) -> Callable[[], None]:
        """Tensors in the optimizers' state for every slot of `layout` that is not there yet."""
        owners = {id(p): o for o in map(with_state, self._optimizers) for p in params_of(o)}
        return create_slots(layout, {name: parameter for name, _, parameter in self._parameters()}, owners)

    def install(self, before: Callable[[], None], after: Callable[[], None] | None) -> Callable[[], None]:
        """Step hooks: `before` on every optimizer, `after` on the last one.

        Without `after` a step begins when its closure has returned: of torch's own optimizers none changes a parameter
        before that, and frameworks pass all of forward and backward as one.
        """
        if not self._optimizers:
            raise UsageError(
                "no optimizer to hook into", hint="pass the optimizer, or auto=False and session.step()"
            )
        handles = []
        for number, optimizer in enumerate(self._optimizers):

            def entering(*_: object, number: int = number) -> None:
                self._stepping = number
                before()

            handles.append(optimizer.register_step_pre_hook(entering if after else _beginning(entering)))
        if after is not None:
            handles.append(self._optimizers[-1].register_step_post_hook(lambda *_: after()))

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def _parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Name, name with the wrappers', parameter."""
        seen: set[tuple[Any, ...]] = set()
        named = [(self._wrapping.clean(name), name, p) for name, p in self._model.named_parameters()]
        for i, optimizer in enumerate(self._optimizers):
            numbered = ((f"optimizer{i}.param{j}", p) for j, p in enumerate(params_of(optimizer)))
            named += [(name, name, p) for name, p in numbered]
        for name, wrapped, parameter in named:
            # From a forward to the next backward pass FSDP2 has gathered parameters in the place of its own.
            known = self._sharded.get(name)
            if known is not None and is_gathered(parameter, known):
                parameter = known
            elif is_dtensor(parameter):
                self._sharded[name] = parameter
            # Tied parameters may be two Parameter objects over one storage: memory is what makes them one.
            part = local_part(parameter)
            where = (part.data_ptr(), part.shape, part.stride(), part.dtype)
            key = where if part.numel() else (id(parameter),)
            if key not in seen:
                seen.add(key)
                yield name, wrapped, parameter

    def _modules_with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield self._wrapping.clean(name), module


def _beginning(before: Callable[[], None]) -> Callable[..., Any]:
    """A pre hook that calls `before` at the last moment at which no parameter has changed."""

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not type(optimizer).__module__.startswith("torch.optim."):
            before()
            return None

        def computed(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            before()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": computed}
        return (args[0], computed, *args[2:]), kwargs

    return hook


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Persistent buffers, as name, module and name there: the others are rebuilt by the module itself."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield (f"{prefix}.{name}" if prefix else name), module, name


def _optimizer_extras(optimizer: Optimizer) -> dict[str, Any]:
    """param_groups without parameters, and per key of the state the values that are no slots, by parameter number."""
    numbers = {id(p): i for i, p in enumerate(params_of(optimizer))}
    columns: dict[str, tuple[list[int], list[Any]]] = {}
    stateful = []
    for parameter, state in with_state(optimizer).state.items():
        stateful.append(numbers[id(parameter)])
        for key, value in state.items():
            if not is_slot(key, value, parameter):
                if is_dtensor(value):
                    raise UsageError(
                        f"{type(optimizer).__name__} keeps {key!r}, which is cut otherwise than its parameter",
                        hint="use an optimizer whose state has the shape of the parameters, such as AdamW",
                    )
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
        # On a GPU that is one wait instead of one for each.
        where = {v.device for v in values}
        return torch.stack(values if len(where) == 1 else [v.cpu() for v in values]).detach().cpu()
    return list(values)


def _restore_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    parameters, states = list(params_of(optimizer)), with_state(optimizer).state
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        raise UsageError(f"{type(optimizer).__name__} has {len(optimizer.param_groups)} param_groups, the store has "
                         f"{len(saved['param_groups'])}")  # fmt: skip
    for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        update_group(group, values)
    groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    stateful = set(saved["stateful"].tolist())
    for number, parameter in enumerate(parameters):
        if number not in stateful:
            states.pop(parameter, None)
    for key, (where, values) in saved["columns"].items():
        for number, value in zip(where.tolist(), values, strict=True):
            parameter = parameters[number]
            if isinstance(value, torch.Tensor):
                group = groups[id(parameter)]
                # The same rule as torch's own load_state_dict: counts stay on the host unless a kernel reads them.
                moves = key != "step" or group.get("capturable") or group.get("fused")
                value = value.clone().to(parameter.device) if moves else value.clone()
            states[parameter][key] = value


def update_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put values into an optimizer's group of parameters; a tensor, such as a rate, goes where the old one is."""
    for name, value in values.items():
        before = group.get(name)
        if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
            value = value.to(before.device)
        group[name] = value
