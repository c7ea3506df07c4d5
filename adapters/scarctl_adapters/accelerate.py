"""Accelerate: partial checkpoints of all that an `Accelerator` has prepared.

    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    run = attach(accelerator, store="ckpt")
    for epoch in run.epochs(10):
        for batch in run.batches(loader):
            with accelerator.accumulate(model):
                ...

An Accelerator does not know where its data are, and the loop changes its schedulers, meters and averages after the
optimizer's step. `epochs` and `batches` say when all that belongs to a step is done: when the loop asks for the next
batch, or for the next epoch. What a resumed run goes on with is the state of then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

import scarctl
from scarctl.dtypes import plain
from scarctl.errors import UsageError
from scarctl.extras import encode
from scarctl.prediction import Mode
from scarctl.randomness import capture_rng, restore_rng
from scarctl.restore import Resumed, check_mode
from scarctl.stateful import check_stateful, state_of

try:
    from accelerate import Accelerator, skip_first_batches
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"scarctl_adapters.accelerate needs {error.name}: pip install 'scarctl[accelerate]'", name=error.name
    ) from error

_OURS = frozenset(("model", "optimizer", "schedulers", "scaler", "auto"))
"""Arguments of `scarctl.attach` that come from the Accelerator."""
_NAME = "accelerate"

log = logging.getLogger("scarctl")

T = TypeVar("T")


def attach(
    accelerator: Accelerator, *, mode: Mode = "partial", snapshot: str | None = None, **options: Any
) -> Run:
    """Go on where the store's run has ended, and checkpoint from now on what `accelerator` has prepared: models,
    optimizers, schedulers, gradient scaler, and the objects of `register_for_checkpointing`.

    Call it after `accelerator.prepare`, on all ranks, right before the loop.

    mode, snapshot: what to go on from, see `Session.resume`.
    options: those of `scarctl.attach` (store, fraction, interval, extras, ...), but model, optimizer, schedulers,
        scaler and auto. Registered objects and schedulers are read right before the next optimizer's step; what the
        next batch changes is better given as `extras`.

    Raises UsageError for options that do not exist, where no model or optimizer is prepared, for an object whose state
    is more than plain values and arrays, and for DeepSpeed, Megatron-LM, TPUs and FSDP of version 1; what
    `scarctl.attach` and `Session.resume` raise. Then nothing was changed, and nothing is open.
    """
    check_mode(mode)
    known = set(inspect.signature(scarctl.attach).parameters) - _OURS
    for name in options:
        if name not in known:
            raise UsageError(f"no option {name!r}", hint=f"there are: {', '.join(sorted(known))}")
    _check_strategy(accelerator)
    # Accelerate has no other way to these; its own users rely on them.
    models, optimizers = _unique(accelerator._models), _unique(accelerator._optimizers)
    if not models or not optimizers:
        raise UsageError(
            f"the Accelerator has prepared no {'model' if not models else 'optimizer'}",
            hint="call accelerator.prepare(model, optimizer, ...) first",
        )
    late = [*_unique(accelerator._schedulers), *_unique(accelerator._custom_objects)]
    for item in late:
        _check_plain(item)
    run = Run(accelerator)
    given = {**(options.pop("rank_extras", None) or {})}
    if _NAME in given or _NAME in (options.get("extras") or {}):
        raise UsageError(f"the extra {_NAME!r} is scarctl's own", hint="give yours another name")
    run.session = scarctl.attach(
        models[0] if len(models) == 1 else nn.ModuleList(models),
        [o.optimizer if isinstance(o, AcceleratedOptimizer) else o for o in optimizers],
        schedulers=[*late, run._position],
        scaler=accelerator.scaler,
        rank_extras={**given, _NAME: run._generators},
        **options,
    )
    with contextlib.ExitStack() as undo:
        undo.callback(run.close)
        run._resume(mode, snapshot)
        undo.pop_all()
    return run


class Run:
    """A training loop beside its session, `session`. Made by `attach`.

    The end of `epochs` closes it. A loop that ends otherwise calls `close`, or uses it in a `with` statement.
    """

    session: scarctl.Session
    resumed: Resumed
    """What the run goes on from."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._position = _Position(self, accelerator)
        self._generators = _Generators()
        self._held: dict[str, Any] | None = None
        """Random numbers that a resumed run goes on with, until it does."""
        self._passed = False
        """All batches of this epoch were there."""
        self._closed = False
        self._began = 0
        """The session's step when this epoch began, or the run was resumed in it."""

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, from 0."""
        return self._position.epoch

    def _resume(self, mode: Mode, snapshot: str | None) -> None:
        self.resumed = self.session.resume(mode, snapshot)
        self._began = self.resumed.step
        if self.resumed.step:
            self._held = self._position.resumed(self.resumed.step) or capture_rng()

    def epochs(self, count: int) -> Iterator[int]:
        """Instead of `range(count)`: the epochs that are not trained yet. After the last one the run is closed.

        Raises UsageError when it is closed already.
        """
        self._check_open()
        for epoch in range(self._position.epoch, count):
            yield epoch
            if self._position.epoch == epoch:
                self._next_epoch()
        self.close()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Instead of `loader`: what of it was not trained on yet in this epoch, once per epoch.

        Raises UsageError when the run is closed.
        """
        self._check_open()
        if self._passed:
            self._next_epoch()
        position, skip = self._position, self._position.batches
        position.begin(loader)
        self._generators.watch(loader)
        if self._held is not None and skip:
            self._generators.begin_again()
        else:
            self._go_on()
            self._generators.begin()
        for batch in _after(loader, skip):
            self._go_on()
            position.batches += 1
            yield batch
            if position.stale():
                position.settle()
        self._go_on()
        position.end(loader)
        self._passed = True

    def _go_on(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._generators.go_on()
            restore_rng(held)

    def _next_epoch(self) -> None:
        if not self._position.batches and self.session.head_step != self._began:
            log.warning(
                "steps were taken in an epoch, but no batches from run.batches(loader): "
                "a run that fails in the middle of one trains on all of its batches again"
            )
        self._began = self.session.head_step
        self._passed = False
        self._position.epoch += 1
        self._position.batches = 0
        self._position.settle()

    def close(self) -> None:
        """`Session.close`: seal the state, wait for the store, let go."""
        self._closed = True
        self.session.close()

    def _check_open(self) -> None:
        """Raise UsageError for a loop of which nothing would be saved."""
        if self._closed:
            raise UsageError(
                "the run is closed: nothing more would be saved",
                hint="give epochs() all epochs at once, or attach again to go on",
            )

    def __enter__(self) -> Run:
        self.session.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self.session.__exit__(kind, error, trace)


@dataclasses.dataclass(frozen=True, slots=True)
class _Where:
    """Where the loop was when all that belongs to a step was done."""

    head: int
    """The session's step."""
    epoch: int
    batches: int
    """Batches of this epoch that were handed out."""
    iteration: int | None
    """Of the loader, which shuffles by it."""
    step: int
    """The Accelerator's count of batches since the last accumulation began anew."""
    rng: dict[str, Any] | None


class _Position:
    """Where the loop is, equal on all ranks. `state_dict` may be called in any thread."""

    def __init__(self, run: Run, accelerator: Accelerator) -> None:
        self._run, self._accelerator = run, accelerator
        self.epoch = self.batches = 0
        self._iteration: int | None = None
        self._begun = self._restored = False
        self._settled: _Where | None = None

    def begin(self, loader: Any) -> None:
        """A pass over `loader` begins. In a resumed run it is to be the iteration that was interrupted."""
        if self._restored and self._iteration is not None and hasattr(loader, "iteration"):
            loader.set_epoch(self._iteration)
        self._begun, self._restored = True, False
        self._iteration = getattr(loader, "iteration", None)

    def end(self, loader: Any) -> None:
        """The pass is over: the loader is at its next iteration."""
        self._iteration = getattr(loader, "iteration", None)

    def stale(self) -> bool:
        """Whether a step was taken since the last settlement."""
        return self._settled is None or self._settled.head != self._run.session.head_step

    def settle(self) -> None:
        """All that belongs to the newest step is done."""
        # Several ranks draw different numbers, and what is said here counts for all of them.
        self._settled = self._now(capture_rng() if self._accelerator.num_processes == 1 else None)

    def resumed(self, head: int) -> dict[str, Any] | None:
        """The restored position is that of step `head`; returns the random numbers that go with it, if there are."""
        assert self._settled is not None
        self._settled = dataclasses.replace(self._settled, head=head)
        return self._settled.rng

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        settled = self._settled
        if settled is None or self.stale():
            settled = self._now(None)
        return {name: getattr(settled, name) for name in ("epoch", "batches", "iteration", "step", "rng")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put `state_dict` back. In a loop that runs already the batches go on."""
        if self._begun:
            return
        self.epoch, self.batches, self._iteration = state["epoch"], state["batches"], state["iteration"]
        self._accelerator.step = state["step"]
        self._restored = True
        self._settled = self._now(state["rng"])

    def _now(self, rng: dict[str, Any] | None) -> _Where:
        head, step = self._run.session.head_step, self._accelerator.step
        return _Where(head, self.epoch, self.batches, self._iteration, step, rng)


class _Generators:
    """What the order of an epoch's data may be drawn from: a rank's random numbers at the epoch's beginning, and the
    generators of its loader. Where there are several ranks Accelerate gives a shuffled loader one of its own."""

    def __init__(self) -> None:
        self._epoch: dict[str, Any] | None = None
        self._begun: list[torch.Tensor] = []
        """Of the loader's generators, the states at the epoch's beginning."""
        self._loaders: list[torch.Generator] = []
        self._now: list[torch.Tensor] = []
        """Their states in the run that is resumed."""

    def watch(self, loader: Any) -> None:
        """The next epoch's data come from `loader`."""
        self._loaders = _generators_of(loader)

    def begin(self) -> None:
        """An epoch begins."""
        self._epoch, self._begun = capture_rng(), [generator.get_state() for generator in self._loaders]

    def begin_again(self) -> None:
        """The epoch that was interrupted begins: its data are drawn as they were."""
        self._restore(self._begun)
        if self._epoch is not None:
            restore_rng(self._epoch)

    def go_on(self) -> None:
        """What comes next was not trained on before."""
        self._restore(self._now)

    def _restore(self, states: list[torch.Tensor]) -> None:
        if len(states) == len(self._loaders):
            for generator, state in zip(self._loaders, states, strict=True):
                generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """Plain values; "epoch" is None before the first epoch."""
        now = [generator.get_state() for generator in self._loaders]
        return {"epoch": self._epoch, "begun": self._begun, "now": now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put `state_dict` back, as far as it is not for `begin_again` and `go_on` to do."""
        self._epoch, self._begun, self._now = state["epoch"], list(state["begun"]), list(state["now"])


def _generators_of(loader: Any) -> list[torch.Generator]:
    """The generators of a loader and its samplers, in a stable order."""
    owners, found = [loader], list[torch.Generator]()
    for owner in owners:
        for name in ("generator", "synchronized_generator"):
            generator = getattr(owner, name, None)
            if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
                found.append(generator)
        inner = (getattr(owner, name, None) for name in ("sampler", "batch_sampler"))
        owners += [item for item in inner if item is not None and all(item is not other for other in owners)]
    return found


def _after(loader: Any, skip: int) -> Iterator[Any]:
    """What comes after the first `skip` batches, at best without loading those."""
    if not skip:
        yield from loader
    elif isinstance(loader, DataLoaderShard | DataLoaderDispatcher) and not loader.use_stateful_dataloader:
        iteration = loader.iteration
        # Older versions hand out None where nothing is left.
        if not (_has_length(loader) and skip >= len(loader)):
            rest = skip_first_batches(loader, skip)
            rest.set_epoch(iteration)
            yield from rest
        loader.set_epoch(iteration + 1)
    else:
        yield from itertools.islice(loader, skip, None)


def _has_length(loader: Any) -> bool:
    """Whether a loader knows how many batches it has: one of a stream does not."""
    try:
        len(loader)
    except TypeError:
        return False
    return True


def _unique(items: Iterable[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())


def _check_plain(item: Any) -> None:
    """Raise UsageError for a state that no checkpoint could hold."""
    name = f"the registered {type(item).__name__}"
    check_stateful(name, item)
    try:
        encode(plain(state_of(item)))
    except UsageError as error:
        raise UsageError(
            f"{name} has a state that cannot be saved: {error.message}", hint=error.hint
        ) from error


def _check_strategy(accelerator: Accelerator) -> None:
    """Raise UsageError for what cannot be saved."""
    if not isinstance(accelerator, Accelerator):
        raise UsageError(f"accelerator is a {type(accelerator).__name__}, not an accelerate.Accelerator")
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise UsageError(
            f"{kind} keeps parameters and moments where scarctl cannot see them",
            hint="use DistributedDataParallel or FSDP2 (FullyShardedDataParallelPlugin(fsdp_version=2))",
        )
    if kind in ("XLA", "TPU"):
        raise UsageError("TPUs are not supported", hint="train on CPUs or GPUs")
    if kind == "FSDP" and getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        raise UsageError(
            "FSDP of version 1 flattens parameters, and their rows cannot be told apart",
            hint="use FullyShardedDataParallelPlugin(fsdp_version=2)",
        )
