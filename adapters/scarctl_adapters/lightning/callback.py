"""Save a Lightning fit during training, and resume it: a callback for `Trainer`.

    from scarctl_adapters.lightning import ScarCallback
    trainer = Trainer(callbacks=[ScarCallback(store="ckpt")])

Lightning is published twice, as `lightning` and as `pytorch_lightning`: two copies with unrelated classes. A trainer
calls callbacks by their methods' names, which are the same in both, so one class serves both. The class derives from
the `Callback` of each copy that is already loaded, otherwise from the installed copy's.

An iteration is a training batch in which an optimizer steps. It begins right before the first parameter changes, and
ends with the batch: Lightning runs forward and backward inside the optimizer's step, may step several optimizers in
one batch, and advances schedules and counters afterwards.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from scarctl.api import attach
from scarctl.config import Extra, Mode
from scarctl.config.checks import check_mode
from scarctl.errors import NoIntactCopy, UsageError
from scarctl.lint import UNSAVED
from scarctl.lint.attributes import Attributes, message
from scarctl.session.resumed import Resumed
from scarctl.state.codec import encode
from scarctl.state.torch_dtypes import plain
from scarctl_adapters.lightning.data_order import DataOrder
from scarctl_adapters.lightning.late_state import LateState
from scarctl_adapters.lightning.loops import LoopHooks
from scarctl_adapters.lightning.position import FitPosition
from scarctl_adapters.options import check_options, with_extras

if TYPE_CHECKING:
    from scarctl.session.session import Session

log = logging.getLogger("scarctl")

_DISTRIBUTIONS = ("lightning.pytorch", "pytorch_lightning")
_GIVEN = ("model", "optimizer", "schedulers", "scaler", "hooks")
"""Arguments of `attach` that come from the trainer."""
_LOOK = 3
"""Iterations after which the module's attributes are looked at."""
_POSITION, _ORDER = "lightning", "lightning_data"
"""Names of the callback's own extras."""
_UNSUPPORTED = {
    "FSDPStrategy": "use ModelParallelStrategy and fully_shard",
    "DeepSpeedStrategy": 'use strategy="ddp", or ModelParallelStrategy and fully_shard',
    "XLAStrategy": "use another accelerator",
    "SingleDeviceXLAStrategy": "use another accelerator",
}
_SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _callback_classes() -> tuple[Any, ...]:
    loaded = [name for name in _DISTRIBUTIONS if sys.modules.get(name) is not None]
    found: list[Any] = []
    for name in loaded or _DISTRIBUTIONS:
        try:
            found.append(importlib.import_module(name).Callback)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise  # Lightning is installed, but a package that it needs is not
        if found and not loaded:
            break
    if not found:
        raise ImportError("Lightning is not installed: pip install 'scarctl[lightning]'")
    return tuple(found)


class ScarCallback(*_callback_classes()):  # type: ignore[misc]
    """Saves a fit during training. The next fit with the same store continues where it ended.

    It does nothing in validate, test and predict, nor with `fast_dev_run`. It leaves Lightning's own checkpoints alone.

    mode: see `Session.resume`. Without a state of one step, "rollback" takes the newest copies.
    snapshot: restore the snapshot of this name, and no other state.
    options: see `scarctl.attach`. The callback adds optimizers, schedulers, gradient scaler and the loops' counters. It
    also adds the order of the training data, and the states of the data module and of other callbacks.

    `fit(ckpt_path=...)` continues from that checkpoint. From the first step on, its state replaces an earlier run's
    state in the store. A second fit of the same process likewise continues from the live state.

    Raises UsageError for unknown options. Before training, `fit` raises the errors of `attach` and `Session.resume`,
    and UsageError for a trainer that cannot be saved. From the first step on, `on_error` decides.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None = None,
        *,
        mode: Mode = "auto",
        snapshot: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_mode(mode)
        check_options(options, given=_GIVEN, owner="the Trainer", names=(_POSITION, _ORDER))
        if options.get("ranks") is False:
            raise UsageError("all ranks of a fit save together", hint="omit ranks=False")
        self.resumed: Resumed | None = None
        """The state from which the newest fit resumed; None when it continues from another state, and did not
        resume."""
        self._options = {"store": store, **options}
        self._mode, self._snapshot = mode, snapshot
        self._session: Session | None = None
        self._fit: _Fit | None = None
        self._trained = False

    @property
    def session(self) -> Session:
        """The session of the running fit. Raises UsageError when no fit is running."""
        if self._session is None:
            raise UsageError(
                "no fit is running", hint="use callback.session from on_train_start to on_train_end"
            )
        return self._session

    # -- called by the trainer ------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See `Callback`. Raises UsageError for a trainer that cannot be saved."""
        if stage == "fit" and not trainer.fast_dev_run:
            _check_callbacks(trainer.callbacks)
            _check_strategy(trainer.strategy)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """See `Callback`. Attaches, and restores the store's state."""
        if trainer.fast_dev_run:
            log.info("fast_dev_run: nothing is saved")
            return
        handlers = _handlers()
        fit = self._fit = _Fit(trainer, self)
        self._session = attach(
            trainer.strategy.model,
            _optimizers(trainer),
            schedulers=fit.late,
            hooks="begin",
            **with_extras(self._options, {_POSITION: fit.position, _ORDER: Extra(fit.order, per_rank=True)}),
        )
        fit.replaced = {s: (old, new) for s, old in handlers.items() if (new := _handlers()[s]) != old}
        self.resumed = None
        if not trainer.ckpt_path and not self._trained:
            self.resumed = _resume(self._session, self._mode, self._snapshot)
        if self.resumed is not None and self.resumed.step:
            fit.hooks.resume()
            log.info(
                "continuing after step %d (%s)",
                self.resumed.step,
                self.resumed.label,
            )
        else:
            fit.wait_for(_optimizers(trainer))
        fit.first_step = self._session.head_step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See `Callback`. From now on the live state is the run's."""
        if self._session is None or self._fit is None:
            return
        if self.resumed is None:
            self._supersede(trainer, self._session)
            self._fit.first_step = self._session.head_step
        elif trainer.ckpt_path and self.resumed.step:
            # A sharding strategy loads ckpt_path after on_fit_start, over the restored state.
            raise UsageError(
                f"{self._session.store.url} holds an earlier run, but ckpt_path is {trainer.ckpt_path!s}",
                hint="omit ckpt_path to continue from the store's state, or use a new store; nothing was saved",
            )
        self._fit.hooks.train_starts()
        self._fit.attributes = Attributes(pl_module, set(map(id, self._extras())))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._fit is not None:
            self._fit.late.batch_starts()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """See `Callback`. Ends an iteration if an optimizer stepped."""
        if self._session is None or self._fit is None or self._fit.is_waiting():
            return
        if self._session.stepping:
            self._fit.position.batch_ended()
            self._fit.late.batch_ended()
            self._session.step()
            self._look(pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.late.settle()
            self._fit.hooks.validation_starts()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is None:
            return
        self._fit.late.settle()
        for number in sorted(self._fit.waits):
            log.warning(
                "optimizer %d has not stepped yet: nothing is saved before its first step, which makes its state",
                number,
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """See `Callback`. Saves the last state, sealed, and waits until it is durable."""
        if self._fit is not None:
            self._fit.position.fit_ended()
            self._fit.late.batch_ended()
            self._close(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """See `Callback`. Saves the newest step to this host's memory; the daemon writes it to the store."""
        # Before the first step the store already has this state.
        self._close(trainer, seal=self._session is not None and self._has_trained(self._session))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See `Callback`. Closes the session of a fit that had nothing left to train."""
        self._close(trainer, seal=False)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _supersede(self, trainer: Any, session: Session) -> None:
        """Replace the store's state with the trainer's, and warn if there was one."""
        stored = session.store.current_layout() is not None
        session.supersede(trainer.global_step)
        if stored and trainer.is_global_zero:
            log.warning(
                "continuing from %s, at step %d: the first step replaces the state in %s",
                f"ckpt_path={trainer.ckpt_path!s}" if trainer.ckpt_path else "the state of this process",
                trainer.global_step,
                session.store.url,
            )

    def _extras(self) -> list[Any]:
        """Return the objects that the user gave to be saved."""
        given = (self._options.get("extras") or {}).values()
        return [one.value if isinstance(one, Extra) else one for one in given]

    def _look(self, pl_module: Any) -> None:
        """Say once, after some iterations, which of the module's attributes nobody saves."""
        session, fit = self._session, self._fit
        if (
            session is None
            or fit is None
            or fit.attributes is None
            or session.head_step < fit.first_step + _LOOK
        ):
            return
        if names := fit.attributes.changed():
            session.caveats.say(UNSAVED, message(pl_module, names))
        fit.attributes = None

    def _has_trained(self, session: Session) -> bool:
        return self._fit is not None and session.head_step > self._fit.first_step

    def _close(self, trainer: Any, *, seal: bool = True) -> None:
        session, fit = self._session, self._fit
        if session is not None:
            self._trained = self._trained or self._has_trained(session)
        self._session = self._fit = None
        try:
            if session is not None:
                session.close(seal=seal)
        finally:
            if fit is not None:
                fit.close(trainer)


class _Fit:
    """The objects of one fit."""

    def __init__(self, trainer: Any, own: ScarCallback) -> None:
        datamodule = trainer.datamodule
        if datamodule is not None and not _can_be_kept("the data module", datamodule.state_dict()):
            datamodule = None
        others = {
            callback.state_key: callback
            for callback in trainer.callbacks
            if callback is not own and _can_be_kept(callback.state_key, callback.state_dict())
        }
        self.position = FitPosition(trainer, datamodule)
        self.order = DataOrder(trainer, self.position)
        self.late = LateState(trainer, others)
        self.hooks = LoopHooks(trainer, self.position, self.order)
        self.first_step = 0
        """Iterations finished when the fit began."""
        self.replaced: dict[int, tuple[Any, Any]] = {}
        """By signal, the handlers before and after the session set its own."""
        self.attributes: Attributes | None = None
        """The module's attributes when training began; None before and after they are looked at."""
        self.waits: set[int] = set()
        """Numbers of the optimizers that have not stepped yet. The first iteration ends when all have: the layout
        needs the state that an optimizer makes in its first step."""
        self._hooks: list[Any] = []

    def wait_for(self, optimizers: list[Any]) -> None:
        """Wait for the first step of each of `optimizers`, in a new run."""
        for number, optimizer in enumerate(optimizers):
            self.waits.add(number)
            hook = optimizer.register_step_post_hook(lambda *_, number=number: self.waits.discard(number))
            self._hooks.append(hook)

    def is_waiting(self) -> bool:
        """Return whether an optimizer has not stepped yet. Removes hooks, so do not call it inside a step."""
        if not self.waits:
            while self._hooks:
                self._hooks.pop().remove()
        return bool(self.waits)

    def close(self, trainer: Any) -> None:
        """Restore the trainer's methods and signal handlers."""
        self.hooks.close()
        self.forget_handlers(trainer)
        self.waits.clear()
        self.is_waiting()

    def forget_handlers(self, trainer: Any) -> None:
        """Have Lightning restore the handlers from before the session, because it has noted the session's own."""
        noted = getattr(trainer._signal_connector, "_original_handlers", {})
        for signum, (before, after) in self.replaced.items():
            if noted.get(signum) == after:
                noted[signum] = before


def _resume(session: Session, mode: Mode, snapshot: str | None) -> Resumed:
    try:
        return session.resume(mode, snapshot)
    except NoIntactCopy as error:
        if error.kind != "no-sealed-state" or snapshot is not None:
            raise
        # The run died before its first sealed state was durable: the arena, if on this host, has the only copies.
        log.warning("%s: continuing from the newest copies", error.message)
        return session.resume("partial")


def _check_callbacks(callbacks: Iterable[Any]) -> None:
    if sum(isinstance(callback, ScarCallback) for callback in callbacks) > 1:
        raise UsageError(
            "the trainer has more than one ScarCallback",
            hint="a fit is saved to one store: give the trainer one callback, once",
        )


def _check_strategy(strategy: Any) -> None:
    names = [kind.__name__ for kind in type(strategy).__mro__]
    refused = next((name for name in names if name in _UNSUPPORTED), None)
    if refused is not None or not set(names) & set(_SUPPORTED):
        hint = _UNSUPPORTED.get(refused or "", f"use one of {', '.join(_SUPPORTED)}")
        raise UsageError(
            f"{names[0]} keeps the state where scarctl cannot see it", hint=hint, kind="unsupported-strategy"
        )


def _optimizers(trainer: Any) -> list[Any]:
    """Return torch's optimizers. Raises UsageError if the trainer has no optimizers."""
    found = [getattr(optimizer, "_optimizer", optimizer) for optimizer in trainer.optimizers]
    if not found or any(type(optimizer).__name__ == "_MockOptimizer" for optimizer in found):
        raise UsageError(
            f"{type(trainer.lightning_module).__name__}.configure_optimizers returns no optimizer",
            hint="return one, or remove the callback",
        )
    return found


def _can_be_kept(what: str, state: Any) -> bool:
    try:
        encode(plain(state))
    except UsageError as error:
        log.warning("the state of %s is not saved: %s", what, error)
        return False
    return True


def _handlers() -> dict[int, Any]:
    return {signum: signal.getsignal(signum) for signum in _SIGNALS}
