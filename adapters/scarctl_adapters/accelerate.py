"""Accelerate: partial checkpoints of all that an `Accelerator` has prepared.

    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    run = attach(accelerator, store="ckpt")
    for epoch in run.epochs(10):
        for batch in run.batches(loader):
            with accelerator.accumulate(model):
                ...

An Accelerator does not know where its data are, and the loop changes its schedulers, meters and averages after the
optimizer's step. `epochs` and `batches`, which are the session's, say when all that belongs to a step is done.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

from torch import nn

import scarctl
from scarctl.dtypes import plain
from scarctl.errors import UsageError
from scarctl.extras import encode
from scarctl.prediction import Mode
from scarctl.restore import Resumed, check_mode
from scarctl.stateful import check_stateful, state_of

try:
    from accelerate import Accelerator
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
    run = Run()
    given = {**(options.pop("extras", None) or {})}
    if _NAME in given or _NAME in (options.get("rank_extras") or {}):
        raise UsageError(f"the extra {_NAME!r} is scarctl's own", hint="give yours another name")
    run.session = scarctl.attach(
        models[0] if len(models) == 1 else nn.ModuleList(models),
        [o.optimizer if isinstance(o, AcceleratedOptimizer) else o for o in optimizers],
        schedulers=late,
        scaler=accelerator.scaler,
        extras={**given, _NAME: _Count(accelerator)},
        **options,
    )
    with contextlib.ExitStack() as undo:
        undo.callback(run.close)
        run.resumed = run.session.resume(mode, snapshot)
        undo.pop_all()
    return run


class Run:
    """A training loop and its session, `session`. Made by `attach`.

    The end of `epochs` closes it. A loop that ends otherwise calls `close`, or uses it in a `with` statement.
    """

    session: scarctl.Session
    resumed: Resumed
    """What the run goes on from."""

    def __init__(self) -> None:
        self._closed = False

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, from 0."""
        return self.session.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """`Session.epochs`. After the last one the run is closed.

        Raises UsageError when it is closed already.
        """
        self._check_open()
        yield from self.session.epochs(count)
        self.close()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """`Session.batches`. Raises UsageError when the run is closed."""
        self._check_open()
        yield from self.session.batches(loader)

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


class _Count:
    """The Accelerator's count of batches since the last accumulation began anew, as extras."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        """A number."""
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Put it back."""
        self._accelerator.step = state["step"]

    def __iter__(self) -> Iterator[int]:
        """A position, which the next batch changes."""
        return iter([self._accelerator.step])


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
