"""Adapt an `nn.Module` with any `torch.optim` optimizers, learning-rate schedulers and gradient scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from scarctl.adapter import StateGroup, Watching
from scarctl.checkpoint.randomness import raw, restore_rng, undisturbed
from scarctl.errors import UsageError
from scarctl.lint.unattached import Unattached
from scarctl.state.caveats import Caveats
from scarctl.state.layout import Layout, Place
from scarctl.state.torch_dtypes import private
from scarctl.stateful import check_names, check_stateful, restore_state, state_of
from scarctl.util.ranks import world_size
from scarctl_adapters.torch.checking import check_trained, unsaved_hooks
from scarctl_adapters.torch.derived import recompute
from scarctl_adapters.torch.homes import Holder, homes_of
from scarctl_adapters.torch.identity import Tensors, tensors_now
from scarctl_adapters.torch.lost import restore_lost
from scarctl_adapters.torch.names import model_names, persistent_buffers
from scarctl_adapters.torch.optimizer_state import OptimizerState
from scarctl_adapters.torch.settings import Later, Settled, object_of
from scarctl_adapters.torch.sharding import (
    Wrapping,
    distinct_part,
    is_dtensor,
    is_elsewhere,
    is_gathered,
    local_part,
    params_of,
    place_of,
    scope_of_group,
    with_state,
    zero_of,
)
from scarctl_adapters.torch.slots import Slots, create_slots
from scarctl_adapters.torch.stepping import around, at_the_change


class TorchAdapter:
    """State of a module and its optimizers: an `Adapter` that `KnowsCaveats`.

    Groups are the module's parameters and persistent buffers, then parameters that only an optimizer has. Parameters
    that share memory are one group, under the first name. Optimizer state of the parameter's shape is in its slots.
    Other optimizer state (step counts, param_groups) is in the extras.

    The step of the last optimizer ends an iteration.

    On several ranks a group is this rank's part of a DTensor, and names omit DistributedDataParallel's prefix. A tensor
    is this rank's own unless a DTensor, a wrapper or `replicated` makes it equal on all ranks.
    """

    automatic: ClassVar[bool] = True
    _knows_tables: ClassVar[bool] = False
    """Whether the adapter saves tables that TorchRec has sharded."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        objects: Mapping[str, Any],
        extras: Mapping[str, Any],
        replicated: Sequence[str] = (),
    ) -> None:
        """objects: schedulers and scaler. extras: the user's objects."""
        self._model = model
        self._optimizers = list(optimizers)
        self._objects, self._extras = dict(objects), dict(extras)
        self._given = bool(objects or extras)
        self._rests = [partial(self._capture_optimizer, number) for number in range(len(optimizers))]
        self._modules = Later(self._capture_modules)
        self._wrapping = Wrapping(model, replicated)
        self._sharded: dict[str, Any] = {}
        # Walking all modules takes longer than the rest of the work after every step.
        self._places: list[tuple[str, nn.Module, str]] = []
        self._trained: list[tuple[str, nn.Parameter, int]] = []
        """Name, parameter, and number of the optimizer that changes the parameter."""
        self._tables: set[str] = set()
        """Names of the weights of embedding modules."""
        self._sparse: set[str] = set()
        """Names of parameters that have had a sparse gradient."""
        self._names_in_model: dict[str, Any] = {"tied": {}, "outside": []}
        """See `scarctl_adapters.torch.names`."""
        self._known: tuple[Tensors | None, list[StateGroup]] = None, []
        """The tensors and the groups of the newest call of `groups`."""
        self._named: tuple[Tensors | None, dict[int, str]] = None, {}
        """Such tensors, and the names of their parameters by id."""
        states = [homes_of(optimizer, self._optimizers) for optimizer in self._optimizers]
        self._homes = [home for homes in states for home in homes]
        self._states = [OptimizerState(o, homes) for o, homes in zip(self._optimizers, states, strict=True)]
        self._slots = [(home.prefix, Slots(home.optimizer)) for home in self._homes if not home.shares]
        self._caveats = Caveats()
        self._stepping: int | None = None
        """Number of the optimizer whose step has begun."""

    @classmethod
    def build(
        cls,
        model: Any,
        optimizers: Sequence[Any],
        *,
        schedulers: Sequence[Any] = (),
        scaler: Any = None,
        extras: Mapping[str, Any] | None = None,
        replicated: Sequence[str] = (),
    ) -> TorchAdapter:
        """Return an adapter; see `scarctl.attach` for the arguments. Raises UsageError for unsuitable objects."""
        check_trained(model, optimizers, knows_tables=cls._knows_tables)
        objects = {f"scheduler{i}": scheduler for i, scheduler in enumerate(schedulers)}
        objects |= {} if scaler is None else {"scaler": scaler}
        for name, item in {**objects, **(extras or {})}.items():
            check_stateful(name, item)
        adapter = cls(model, optimizers, objects, extras or {}, replicated)
        if replicated or cls._knows_tables or any(map(is_dtensor, model.parameters())):
            # Parts of a tensor may be unsuitable, and patterns may match nothing.
            adapter._wrapping.check_patterns([group.name for group in adapter.groups()])
        return adapter

    @property
    def optimizer(self) -> str:
        """Class names of the optimizers, such as "AdamW" or "Adam+SGD"."""
        names = []
        for optimizer in self._optimizers:
            inner, name = with_state(optimizer), type(optimizer).__name__
            names.append(name if inner is optimizer else f"{name}({type(inner).__name__})")
        return "+".join(names)

    @property
    def extras_per_rank(self) -> bool:
        """True with ZeRO, with parameters of this rank alone, or with modules that have extra state."""
        if world_size() == 1:
            return False
        return (
            any(zero_of(o) is not None for o in self._optimizers)
            or any(group.role == "own" and group.kind == "parameter" for group in self.groups())
            or any(True for _ in self._modules_with_extra_state())
        )

    @torch.no_grad()
    def groups(self) -> list[StateGroup]:
        """Return parameters with their slots, then buffers. A DTensor is represented by this rank's part."""
        stepped = self._stepping is not None or any(home.optimizer.state for home in self._homes)
        known, groups = self._known
        if not stepped or known is None or not known.hold():
            # Before the first step the model may still move to a GPU.
            known = tensors_now(self._model, self._optimizers) if stepped else None
            groups = self._new_groups(predict=stepped)
            # Gathered parameters stay the same while the sharded ones, which they hide, may change.
            known = None if self._is_gathered() else known
            # One assignment, after success: a signal handler may call this method meanwhile.
            self._known = (None, []) if known is None else (known, groups)
        return list(groups)

    def _new_groups(self, *, predict: bool) -> list[StateGroup]:
        for _, slots in self._slots:
            slots.learn(predict=predict)
        for state in self._states if predict else ():
            state.check_places()
        zeros = self._zeros()
        groups = []
        numbers = {id(p): i for i, o in enumerate(self._optimizers) for p in params_of(o)}
        trained, owners = [], {}
        modules = self._model.modules()
        tables = {id(m.weight): m.sparse for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        for name, wrapped, holders in self._holders():
            parameter = holders[0][0]
            for tied, _ in holders:
                owners[id(tied)] = name
                if id(tied) in numbers:
                    trained.append((name, tied, numbers[id(tied)]))
                if id(tied) in numbers and id(tied) in tables:
                    self._tables.add(name)
            if is_elsewhere(parameter):
                continue
            tensors, owned = {"": local_part(parameter)}, False
            for prefix, slots in self._slots:
                for tied, label in holders:
                    if tied in slots:
                        owned = True
                        tensors |= {f"{prefix}{key}{label}": slot for key, slot in slots.of(tied).items()}
            if id(parameter) in zeros:
                # ZeRO broadcasts the parameters after every step, but not their slots.
                role, scope = "shared" if owned else "replica", zeros[id(parameter)]
            else:
                role, scope = self._role_of(name, wrapped, parameter)
            place = self._place_of(parameter, name)
            frozen = not any(tied.requires_grad for tied, _ in holders)
            is_table = not frozen and any(tables.get(id(tied)) for tied, _ in holders)
            groups.append(StateGroup(name, "parameter", tensors, place, role, scope, is_table, frozen))
        groups += self._buffer_groups()
        self._trained = trained
        names = [group.name for group in groups]
        self._names_in_model = model_names(self._model, self._wrapping.clean, self._resident, owners, names)
        return groups

    def _buffer_groups(self) -> list[StateGroup]:
        groups, places = [], []
        for wrapped, module, key in persistent_buffers(self._model):
            name, buffer = self._wrapping.clean(wrapped), module._buffers[key]
            places.append((name, module, key))
            if buffer is not None and not is_elsewhere(buffer):
                role, scope = self._wrapping.role(name, wrapped, buffer, buffer=True)
                place = place_of(buffer, name)
                tensors = {"": distinct_part(buffer).detach()}
                groups.append(StateGroup(name, "buffer", tensors, place, role, scope))
        self._places = places
        return groups

    def _zeros(self) -> dict[int, str]:
        """Return the scopes, by id, of parameters whose slots ZeRO divides among ranks."""
        found: dict[int, str] = {}
        for optimizer in self._optimizers:
            zero = zero_of(optimizer)
            if zero is not None and world_size() > 1:
                found |= dict.fromkeys(map(id, params_of(zero)), scope_of_group(zero.process_group))
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the persistent buffers of the modules as of the newest call of `groups`."""
        if not self._places:
            return {}
        found = ((name, module._buffers.get(key)) for name, module, key in self._places)
        return {name: distinct_part(buffer) for name, buffer in found if buffer is not None}

    def touched_rows(self, *, dense: bool) -> dict[str, torch.Tensor]:
        """Return the rows with a gradient by table: indices if it is sparse, otherwise a mask, bool of shape (rows,).

        Tables are parameters that have had a sparse gradient. dense: also the weights of `nn.Embedding` and
        `nn.EmbeddingBag`, whose gradients are read once.
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

    def capture(self) -> dict[str, Any]:
        """Return random generators, the user's objects, schedules and scaler, and optimizers' settings as they are now.

        The rest of the optimizers' state, which only a step changes, and modules' extra state are read later.
        """
        rng = raw()
        if not self._given:
            extras: dict[str, Any] = {}
            objects: dict[str, Any] = {}
        else:
            with undisturbed():
                extras = {name: private(state_of(item)) for name, item in self._extras.items()}
                objects = {name: private(object_of(item)) for name, item in self._objects.items()}
        optimizers = list(map(Settled, self._optimizers, self._rests))
        return {
            "rng": rng,
            "extras": extras,
            "objects": objects,
            "optimizers": optimizers,
            "modules": self._modules,
            "model": self._names_in_model,
        }

    def _capture_optimizer(self, number: int) -> dict[str, Any]:
        """Return an optimizer's state outside of slots, which only its step changes."""
        state, optimizer = self._states[number], self._optimizers[number]
        return {**state.capture(self._unsavable, self._known[0]), **self._names(optimizer)}

    def ranks_may_differ(self) -> bool:
        """See `LetsRanksDiffer`."""
        return bool(unsaved_hooks(self._model, self._extras.values()))

    def _capture_modules(self) -> dict[str, Any]:
        if kinds := unsaved_hooks(self._model, self._extras.values()):
            self._caveats.say(
                "communication-hook",
                f"a communication hook of DistributedDataParallel has a state ({', '.join(kinds)}) that is not saved: "
                "a resumed run reduces its next gradients differently",
            )
        else:
            self._caveats.withdraw("communication-hook")
        return {name: module.get_extra_state() for name, module in self._modules_with_extra_state()}

    def _captured(self) -> None:
        self._caveats.say(
            "captured-step",
            "an optimizer's step was captured in a CUDA graph. Replays of the graph call no hook, so none of their "
            "steps is saved. Pass hooks='off' to attach, and call session.step() after each replay",
        )

    def _unsavable(self, what: str) -> None:
        self._caveats.say("optimizer-attribute", what)

    def _names(self, optimizer: Optimizer) -> dict[str, list[str]]:
        """Return the names of the optimizer's parameters by number: numbers may differ by rank."""
        if world_size() == 1:
            return {}
        known, names = self._named
        mine = list(map(id, params_of(optimizer)))
        if known is None or known is not self._known[0] or not names.keys() >= set(mine):
            names = {id(parameter): name for name, _, parameter in self._parameters()}
            self._named = self._known[0], names
        return {"names": [names.get(each, "") for each in mine]}

    def watch(self, caveats: Caveats) -> Watching:
        """See `KnowsCaveats`."""
        self._caveats = caveats
        attached = {id(o) for o in self._optimizers} | {id(home.optimizer) for home in self._homes}
        return Unattached(self._model.parameters(), attached, caveats)

    def mix(self, theirs: Any, own: Any) -> Any:
        if not self.extras_per_rank:
            return theirs
        zeros = {id(p) for o in self._optimizers if zero_of(o) is not None for p in params_of(o)}
        roles = {group.name: group.role for group in self.groups()}
        shared = {
            name
            for name, _, parameter in self._parameters()
            if roles.get(name) == "shared" and id(parameter) not in zeros
        }
        from scarctl_adapters.torch.mixing import mix_optimizers

        return mix_optimizers(theirs, own, shared)

    def restore(self, state: Any) -> None:
        """Restore everything, the random number generators last."""
        if (count := len(state["optimizers"])) != len(self._optimizers):
            raise UsageError(f"the store has {count} optimizers, not {len(self._optimizers)}")
        check_names("schedulers or scaler", state["objects"], self._objects)
        check_names("extras", state["extras"], self._extras)
        for own, saved in zip(self._states, state["optimizers"], strict=True):
            own.restore(saved)
        for name, item in self._objects.items():
            restore_state(item, state["objects"][name])
        for name, module in self._modules_with_extra_state():
            if name in state["modules"]:
                module.set_extra_state(state["modules"][name])
        for name, item in self._extras.items():
            restore_state(item, state["extras"][name])
        recompute(self._model)
        restore_rng(state["rng"])

    def derive(self) -> None:
        recompute(self._model)

    @torch.no_grad()
    def restore_lost(self, lost: Mapping[str, NDArray[np.bool_]], saved: Callable[[], Any]) -> None:
        """Restore optimizer state of lost parameters outside their slots; see `scarctl_adapters.torch.lost`."""
        names = {id(parameter): name for name, _, parameter in self._parameters()}
        restore_lost([state.homes for state in self._states], names, lost, saved)

    def create_slots(self, layout: Layout) -> Callable[[], None]:
        """Make every missing slot of `layout` in the optimizers' state. Return the function that removes them."""
        return create_slots(layout, {name: holders for name, _, holders in self._holders()}, self._homes)

    def install(self, before: Callable[[], None], after: Callable[[], None] | None) -> Callable[[], None]:
        """Register step hooks, `before` on every optimizer and `after` on the last one. Return their removal.

        Without `after` a step begins when its closure has returned. No torch optimizer changes a parameter before that,
        and frameworks run forward and backward inside the closure.
        """
        if not self._optimizers:
            raise UsageError(
                "no optimizer to hook into", hint="pass the optimizer, or hooks='off' and session.step()"
            )
        handles: list[Any] = []
        for number, optimizer in enumerate(self._optimizers):

            def enter(number: int = number) -> None:
                self._stepping = number
                before()

            if after is None:
                handles.append(at_the_change(optimizer, enter, self._captured))
            else:
                last = optimizer is self._optimizers[-1]
                handles += around(optimizer, enter, after if last else None, self._captured)

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def _parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield name, name with wrappers, and first parameter of every group."""
        return ((name, wrapped, holders[0][0]) for name, wrapped, holders in self._holders())

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter after its name with wrappers; a tied one under each of its names."""
        return self._model.named_parameters(remove_duplicate=False)

    def _place_of(self, tensor: torch.Tensor, name: str) -> Place | None:
        return place_of(tensor, name)

    def _role_of(self, name: str, wrapped: str, parameter: nn.Parameter) -> tuple[str, str]:
        return self._wrapping.role(name, wrapped, parameter)

    def _holders(self) -> list[tuple[str, str, list[Holder]]]:
        """Return name, name with wrappers, and parameters of every group: several if they share memory."""
        found: dict[tuple[Any, ...], tuple[str, str, list[Holder]]] = {}
        seen: set[int] = set()
        named = [(self._wrapping.clean(name), name, p) for name, p in self._named_parameters()]
        for i, optimizer in enumerate(self._optimizers):
            numbered = ((f"optimizer{i}.param{j}", p) for j, p in enumerate(params_of(optimizer)))
            named += [(name, name, p) for name, p in numbered]
        for name, wrapped, parameter in named:
            known = self._resident(name, parameter)
            if known is parameter and is_dtensor(parameter):
                self._sharded[name] = parameter
            parameter = known
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            # Tied parameters may be two Parameter objects over one storage, so memory identifies them.
            part = local_part(parameter)
            where = (part.data_ptr(), part.shape, part.stride(), part.dtype)
            key = where if part.numel() else (id(parameter),)
            group = found.setdefault(key, (name, wrapped, []))
            group[2].append((parameter, f"@{name}" if group[2] else ""))
        return list(found.values())

    def _resident(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Return the sharded parameter of a gathered one: FSDP2 replaces them from a forward to the next backward."""
        known = self._sharded.get(name)
        return known if known is not None and is_gathered(parameter, known) else parameter

    def _is_gathered(self) -> bool:
        """Return whether FSDP2 has gathered any parameter."""
        named = ((self._wrapping.clean(name), p) for name, p in self._named_parameters())
        return bool(self._sharded) and any(self._resident(name, p) is not p for name, p in named)

    def _modules_with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield self._wrapping.clean(name), module
