"""Save and resume a loop with Accelerate, with everything that an `Accelerator` has prepared.

    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    run = attach_and_resume(accelerator, store="ckpt")
    for epoch in run.epochs(10):
        for batch in run.batches(loader):
            with accelerator.accumulate(model):
                ...

An Accelerator does not know its position in the data, and the loop changes schedulers, meters and averages after the
optimizer's step. The session's `epochs` and `batches` show when the loop is done with a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

from torch import nn

import scarctl
from scarctl.config import Mode
from scarctl.config.checks import check_mode
from scarctl.errors import UsageError
from scarctl.session.resumed import Resumed
from scarctl.state.codec import encode
from scarctl.state.torch_dtypes import plain
from scarctl.stateful import check_stateful, state_of
from scarctl_adapters.options import check_options, with_extras

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"scarctl_adapters.accelerate needs {error.name}: pip install 'scarctl[accelerate]'", name=error.name
    ) from error

_GIVEN = frozenset(("model", "optimizer", "schedulers", "scaler", "hooks"))
"""Arguments of `scarctl.attach` that come from the Accelerator."""
_NAME = "accelerate"
"""Name of the adapter's own extra."""

T = TypeVar("T")


def attach_and_resume(
    accelerator: Accelerator, *, mode: Mode = "auto", snapshot: str | None = None, **options: Any
) -> Run:
    """Resume the store's run, and from now on save everything that `accelerator` has prepared.

    This covers models, optimizers, schedulers, gradient scaler, and the objects of `register_for_checkpointing`. Call
    it after `accelerator.prepare`, on all ranks, right before the loop.

    mode, snapshot: the state to resume, see `Session.resume`.
    options: options of `scarctl.attach` (store, fraction, interval, extras, ...), except model, optimizer, schedulers,
    scaler and hooks. Registered objects and schedulers are read right before the next optimizer's step. Pass state
        that the next batch changes as `extras`.

    Raises UsageError for unknown options, without a prepared model or optimizer, and for an object whose state is more
    than plain values and arrays. Raises UsageError for DeepSpeed, Megatron-LM, TPUs and FSDP of version 1. Raises the
    errors of `scarctl.attach` and `Session.resume`. After an error nothing was changed, and no session is open.
    """
    check_mode(mode)
    check_options(options, given=_GIVEN, owner="the Accelerator", names=(_NAME,))
    _check_strategy(accelerator)
    # Accelerate has no public names for these; its own users rely on the private ones.
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
    run.session = scarctl.attach(
        models[0] if len(models) == 1 else nn.ModuleList(models),
        [o.optimizer if isinstance(o, AcceleratedOptimizer) else o for o in optimizers],
        schedulers=late,
        scaler=accelerator.scaler,
        **with_extras(options, {_NAME: _Count(accelerator)}),
    )
    with contextlib.ExitStack() as undo:
        undo.callback(run.close)
        run.resumed = run.session.resume(mode, snapshot)
        undo.pop_all()
    return run


class Run:
    """A training loop and its `session`. Made by `attach_and_resume`.

    The end of `epochs` closes the run. A loop that ends otherwise calls `close`, or uses a `with` statement.
    """

    session: scarctl.Session
    resumed: Resumed
    """The state from which the run resumed."""

    def __init__(self) -> None:
        self._closed = False

    @property
    def epoch(self) -> int:
        """Number of the loop's current epoch, from 0."""
        return self.session.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate like `Session.epochs`, and close the run after the last epoch.

        Raises UsageError when the run is closed.
        """
        self._check_open()
        yield from self.session.epochs(count)
        self.close()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate like `Session.batches`. Raises UsageError when the run is closed."""
        self._check_open()
        yield from self.session.batches(loader)

    def close(self) -> None:
        """Seal the state, wait until it is durable, and close the session. See `Session.close`."""
        self._closed = True
        self.session.close()

    def _check_open(self) -> None:
        """Raise UsageError when the run is closed: nothing of the loop would be saved."""
        if self._closed:
            raise UsageError(
                "the run is closed: further changes would not be saved",
                hint="pass the number of all epochs to epochs(), or attach again to continue",
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
    """The Accelerator's count of batches since gradient accumulation last began, as extras."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the count."""
        self._accelerator.step = state["step"]

    def __iter__(self) -> Iterator[int]:
        """Mark this as a position, which the next batch changes."""
        return iter([self._accelerator.step])


def _unique(items: Iterable[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())


def _check_plain(item: Any) -> None:
    """Raise UsageError for an object whose state cannot be saved."""
    name = f"the registered {type(item).__name__}"
    check_stateful(name, item)
    try:
        encode(plain(state_of(item)))
    except UsageError as error:
        raise UsageError(
            f"{name} has a state that cannot be saved: {error.message}", hint=error.hint
        ) from error


def _check_strategy(accelerator: Accelerator) -> None:
    """Raise UsageError for an Accelerator that cannot be saved."""
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
            "FSDP of version 1 flattens parameters, so their rows cannot be separated",
            hint="use FullyShardedDataParallelPlugin(fsdp_version=2)",
        )
