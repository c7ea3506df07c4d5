"""Provide adapters and loops with one defect each, as an author might make it. The suite has to find them."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import scarctl
import scarctl.api
from scarctl.adapter import StateGroup
from scarctl.state.layout import Layout
from scarctl.testing import AdapterConformance, Training, Visit
from scarctl_adapters.torch import TorchAdapter
from tests.adapters.torch.test_conformance import TorchTraining

Hook = Callable[[], None]


class Mutated(AdapterConformance):
    """The suite of the torch adapter, with another adapter or another loop."""

    loop: ClassVar[type[TorchTraining]] = TorchTraining
    variants = frozenset({"bfloat16", "factored"})

    def training(self, variant: str = "") -> Training:
        return self.loop(variant)


def with_adapter(adapter: type[TorchAdapter]) -> type[TorchTraining]:
    """Return the suite with the loop of torch, in which the session finds this adapter."""

    class Loop(TorchTraining):
        def run(self, store: Path, until: int, visit: Visit, **more: Any) -> None:
            with finding(adapter):
                super().run(store, until, visit, **more)

    return Loop


@contextmanager
def finding(adapter: type[TorchAdapter]) -> Iterator[None]:
    """Make `attach` use this adapter for every object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            scarctl.api,
            "find_adapter",
            lambda model, optimizers, **options: adapter.build(model, optimizers, **options),
        )
        yield


# -- layout ------------------------------------------------------------------------------------------------------


class TurnsOrder(TorchAdapter):
    """Groups come in another order each time."""

    turned = False

    def groups(self) -> list[StateGroup]:
        self.turned = not self.turned
        return super().groups()[:: -1 if self.turned else 1]


class OrderOfHashes(TorchAdapter):
    """The order is that of a set of names, which differs between processes."""

    def groups(self) -> list[StateGroup]:
        groups = {group.name: group for group in super().groups()}
        return [groups[name] for name in set(groups)]


class NamesOfAddresses(TorchAdapter):
    """Groups are named by their address in memory."""

    def groups(self) -> list[StateGroup]:
        return [replace(group, name=f"p{group.tensors[''].data_ptr()}") for group in super().groups()]

    def buffers(self) -> dict[str, torch.Tensor]:
        return {f"p{tensor.data_ptr()}": tensor for tensor in super().buffers().values()}


class SameMemoryTwice(TorchAdapter):
    """Tied parameters are two groups."""

    def groups(self) -> list[StateGroup]:
        groups = super().groups()
        return [*groups, replace(groups[0], name="again")]


class WindowsOverlap(TorchAdapter):
    """A group is part of another one."""

    def groups(self) -> list[StateGroup]:
        groups = super().groups()
        tensors = {slot: tensor[1:] for slot, tensor in groups[0].tensors.items()}
        return [*groups, replace(groups[0], name="window", tensors=tensors)]


# -- what is saved -----------------------------------------------------------------------------------------------


class ForgetsBuffers(TorchAdapter):
    """Batch norm's statistics are not saved."""

    def groups(self) -> list[StateGroup]:
        return [group for group in super().groups() if group.kind != "buffer"]

    def buffers(self) -> dict[str, torch.Tensor]:
        return {}


class SlotsAsExtras(TorchAdapter):
    """The optimizer's slots are extras: a resume is exact, but a recovery does not restore them."""

    def groups(self) -> list[StateGroup]:
        return [replace(group, tensors={"": group.tensors[""]}) for group in super().groups()]

    def capture(self) -> dict[str, Any]:
        slots = [
            {slot: t.detach().clone() for slot, t in group.tensors.items() if slot}
            for group in super().groups()
        ]
        return {**super().capture(), "slots": slots}

    def restore(self, state: Any) -> None:
        super().restore(state)
        parameters = [parameter for _, _, parameter in self._parameters()]
        for parameter, slots in zip(parameters, state["slots"], strict=False):
            self._optimizers[0].state[parameter].update(slots)


class LeavesFactored(TorchAdapter):
    """An adapter that knows only slots."""

    def restore_lost(self, lost: object, saved: object) -> None: ...


class Copies(TorchAdapter):
    """Groups are copies of the live tensors."""

    def groups(self) -> list[StateGroup]:
        return [
            replace(group, tensors={slot: t.detach().clone() for slot, t in group.tensors.items()})
            for group in super().groups()
        ]


class Upcasts(TorchAdapter):
    """Tensors whose dtype numpy lacks are converted, and therefore copied."""

    def groups(self) -> list[StateGroup]:
        return [
            replace(
                group,
                tensors={s: t.float() if t.is_floating_point() else t for s, t in group.tensors.items()},
            )
            for group in super().groups()
        ]


class ForgetsExtras(TorchAdapter):
    """The data position is saved, but not restored."""

    def restore(self, state: Any) -> None:
        position = dict(self._extras["position"])
        super().restore(state)
        self._extras["position"].update(position)


class ForgetsRandomNumbers(TorchAdapter):
    """Generators continue from their present state."""

    def restore(self, state: Any) -> None:
        kept = torch.get_rng_state()
        super().restore(state)
        torch.set_rng_state(kept)


class KeepsSlots(TorchAdapter):
    """Slots that were made for a resume stay if there is nothing to resume from."""

    def create_slots(self, layout: Layout) -> Hook:
        super().create_slots(layout)
        return lambda: None


class ChangesBeforeRefusing(TorchAdapter):
    """The model is prepared before it is known to be the right one."""

    @classmethod
    def build(cls, model: Any, optimizers: Any, **options: Any) -> TorchAdapter:
        with torch.no_grad():
            model.out.bias.zero_()
        return super().build(model, optimizers, **options)


class TakesAnything(TorchAdapter):
    """Groups that do not match are left out."""

    def groups(self) -> list[StateGroup]:
        return [group for group in super().groups() if not group.name.startswith("out.")]

    def restore(self, state: Any) -> None:
        super().restore(state)
        for parameter in self._model.out.parameters():
            self._optimizers[0].state.pop(parameter, None)


# -- hooks -------------------------------------------------------------------------------------------------------


class KeepsHooks(TorchAdapter):
    """Removing the hooks removes nothing."""

    def install(self, before: Hook, after: Hook) -> Hook:
        super().install(before, after)
        return lambda: None


class CountsTwice(TorchAdapter):
    """`after` is called twice."""

    def install(self, before: Hook, after: Hook) -> Hook:
        return super().install(before, lambda: (after(), after(), None)[2])


class NeverBefore(TorchAdapter):
    """`before` is never called."""

    def install(self, before: Hook, after: Hook) -> Hook:
        return super().install(lambda: None, after)


class AfterTooEarly(TorchAdapter):
    """An iteration counts as finished when its step begins."""

    def install(self, before: Hook, after: Hook) -> Hook:
        return super().install(lambda: (before(), after(), None)[2], lambda: None)


# -- what is left ------------------------------------------------------------------------------------------------


class KeepsModel(TorchAdapter):
    """Every model stays referenced."""

    kept: ClassVar[list[torch.nn.Module]] = []

    def install(self, before: Hook, after: Hook) -> Hook:
        self.kept.append(self._model)
        return super().install(before, after)


class KeepsThread(TorchAdapter):
    """A thread waits forever."""

    end: ClassVar[threading.Event] = threading.Event()

    def install(self, before: Hook, after: Hook) -> Hook:
        threading.Thread(target=self.end.wait, name="forgotten", daemon=True).start()
        return super().install(before, after)


class KeepsHandler(TorchAdapter):
    """A signal handler stays installed forever."""

    def install(self, before: Hook, after: Hook) -> Hook:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        return super().install(before, after)


class KeepsFile(TorchAdapter):
    """A file stays open."""

    kept: ClassVar[list[Any]] = []

    def install(self, before: Hook, after: Hook) -> Hook:
        self.kept.append(Path(__file__).open())  # noqa: SIM115
        return super().install(before, after)


# -- loops ------------------------------------------------------------------------------------------------------


class Parted(TorchTraining):
    """The loop of the torch suite, split into its parts."""

    def run(
        self, store: Path, until: int, visit: Visit, *, resume: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        extras = {"position": self.position}
        session = scarctl.attach(
            self.model, self.optimizers, store=store, schedulers=self.schedulers, extras=extras, **options
        )
        try:
            self.begin(session, resume)
            visit(session)
            while session.head_step < until:
                self.step()
                self.step_done(session)
                visit(session)
        except BaseException as error:
            if not self.failed(error):
                raise
        finally:
            self.end(session)

    def begin(self, session: scarctl.Session, resume: Mapping[str, Any]) -> None:
        session.resume(**resume)

    def step_done(self, session: scarctl.Session) -> None: ...

    def failed(self, error: BaseException) -> bool:
        return False

    def end(self, session: scarctl.Session) -> None:
        session.close()


class NeverSeals(Parted):
    """State that is not saved when the loop ends is never saved, and memory is gone."""

    def step_done(self, session: scarctl.Session) -> None:
        session._saving.finish()
        assert session._started().saver.drain(60)  # else it is up to the store what the last step may save

    def end(self, session: scarctl.Session) -> None:
        memory = session._started().arena.folder
        session.close(seal=False)
        shutil.rmtree(memory, ignore_errors=True)


class SwallowsExceptions(Parted):
    """An exception from a callback ends the loop without being reported."""

    def failed(self, error: BaseException) -> bool:
        return True


class IgnoresSnapshot(Parted):
    """The loop always resumes from the newest state."""

    def begin(self, session: scarctl.Session, resume: Mapping[str, Any]) -> None:
        session.resume()


class WaitsForStore(Parted):
    """The loop requires every iteration to be durable."""

    def step_done(self, session: scarctl.Session) -> None:
        session.checkpoint(wait=True)


class CountsItself(Parted):
    """The loop counts iterations without the hooks."""

    def step_done(self, session: scarctl.Session) -> None:
        session.step()


# -- their suites ------------------------------------------------------------------------------------------------


class Suites:
    """A suite for every mutant, by its name. They are in a module so that another process can import them."""


def suite_of(mutant: type[TorchAdapter] | type[TorchTraining]) -> type[Mutated]:
    """Return the suite that runs this adapter or this loop."""
    found: type[Mutated] = getattr(Suites, mutant.__name__)
    return found


for _mutant in [item for item in vars().values() if isinstance(item, type)]:
    if issubclass(_mutant, TorchAdapter | TorchTraining) and _mutant.__module__ == __name__:
        _loop = _mutant if issubclass(_mutant, TorchTraining) else with_adapter(_mutant)
        _names = {"loop": _loop, "__qualname__": f"Suites.{_mutant.__name__}", "__module__": __name__}
        setattr(Suites, _mutant.__name__, type(_mutant.__name__, (Mutated,), _names))
