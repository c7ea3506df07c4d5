"""Lightning: a callback that puts scarctl beside `Trainer.fit`.

    from scarctl_adapters.lightning import ScarCallback
    trainer = Trainer(callbacks=[ScarCallback(store="ckpt")])

Lightning is published twice, as `lightning` and as `pytorch_lightning`: two copies with unrelated classes. A callback
is called by its methods' names, and those are the same in both, so one class does for both. It derives from the
`Callback` of each that is loaded when this module is, or else of the one that is installed.

An iteration is a training batch in which an optimizer has stepped. It begins when the first parameter is about to
change, and ends with the batch: Lightning runs forward and backward inside the optimizer's step, may step several
optimizers in one batch, and moves schedules and counters on after it.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import signal
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from scarctl.attaching import attach
from scarctl.dtypes import plain
from scarctl.errors import NoIntactCopy, UsageError
from scarctl.extras import encode
from scarctl.prediction import Mode
from scarctl.restore import Resumed, check_mode
from scarctl_adapters.lightning_position import DataOrder, FitPosition, Settled, Watch

if TYPE_CHECKING:
    from scarctl.session import Session

log = logging.getLogger("scarctl")

_DISTRIBUTIONS = ("lightning.pytorch", "pytorch_lightning")
_OURS = ("model", "optimizer", "schedulers", "scaler", "ranks", "auto")
"""Arguments of `attach` that the callback gives by itself."""
_OPTIONS = tuple(name for name in inspect.signature(attach).parameters if name not in _OURS)
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
                raise  # it is there, and something that it needs is not
        if found and not loaded:
            break
    if not found:
        raise ImportError("Lightning is not installed: pip install 'scarctl[lightning]'")
    return tuple(found)


class ScarCallback(*_callback_classes()):  # type: ignore[misc]
    """Saves a fit beside training, and lets the next one with the same store go on where it ended.

    It does nothing in validate, test and predict, nor with `fast_dev_run`. Lightning's own checkpoints are not touched.

    mode: "partial" takes every partition's newest copy; "rollback" the newest state that is of one step everywhere,
        if there is one yet.
    snapshot: go back to the snapshot of this name, exactly.
    options: see `scarctl.attach`. Optimizers, schedulers, gradient scaler, the loops' counters, the order of the
        training data, the data module's and the other callbacks' states are known without being named.

    `fit(ckpt_path=...)` goes on from that checkpoint: it is what the store has from the first step on, instead of what
    an earlier run has saved there. So it is in a second fit of the same process, which goes on from the live state.

    Raises UsageError for options that do not exist. `fit` raises, before training, what `attach` and `Session.resume`
    raise, and UsageError for what cannot be saved; from the first step on, see `on_error`.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None = None,
        *,
        mode: Mode = "partial",
        snapshot: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_mode(mode)
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise UsageError(
                f"ScarCallback has no option {unknown[0]!r}", hint=f"it has {', '.join(sorted(_OPTIONS))}"
            )
        for kind in ("extras", "rank_extras"):
            taken = {_POSITION, _ORDER} & set(options.get(kind) or {})
            if taken:
                raise UsageError(
                    f"{min(taken)!r} in {kind} is the callback's own", hint="give it another name"
                )
        self.resumed: Resumed | None = None
        """What the newest fit found to go on from; None when it did not look, because it has another state."""
        self._options = {"store": store, **options}
        self._mode, self._snapshot = mode, snapshot
        self._session: Session | None = None
        self._fit: _Fit | None = None
        self._trained = False

    @property
    def session(self) -> Session:
        """The session of the fit that is under way. Raises UsageError when there is none."""
        if self._session is None:
            raise UsageError(
                "no fit is under way", hint="use callback.session from on_train_start to on_train_end"
            )
        return self._session

    # -- called by the trainer ------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See `Callback`. Raises UsageError for what scarctl cannot save."""
        if stage == "fit" and not trainer.fast_dev_run:
            _check_callbacks(trainer.callbacks)
            _check_strategy(trainer.strategy)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """See `Callback`. Attaches, and restores what the store has."""
        if trainer.fast_dev_run:
            log.info("fast_dev_run: nothing is saved")
            return
        handlers = _handlers()
        fit = self._fit = _Fit(trainer, self)
        self._session = attach(
            trainer.strategy.model,
            _optimizers(trainer),
            schedulers=fit.settled,
            auto="begin",
            **{
                **self._options,
                "extras": {**(self._options.get("extras") or {}), _POSITION: fit.position},
                "rank_extras": {**(self._options.get("rank_extras") or {}), _ORDER: fit.order},
            },
        )
        fit.replaced = {s: (old, new) for s, old in handlers.items() if (new := _handlers()[s]) != old}
        self.resumed = None
        if not trainer.ckpt_path and not self._trained:
            self.resumed = _resume(self._session, self._mode, self._snapshot)
        if self.resumed is not None and self.resumed.step:
            fit.watch.resume()
            log.info(
                "going on after step %d (%s)",
                self.resumed.step,
                "exact" if self.resumed.exact else "perturbed, partitions of several steps",
            )
        else:
            fit.wait_for(_optimizers(trainer))
        fit.first_step = self._session.head_step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See `Callback`. From here on the state is that of the run."""
        if self._session is None or self._fit is None:
            return
        if self.resumed is None:
            self._supersede(trainer, self._session)
            self._fit.first_step = self._session.head_step
        elif trainer.ckpt_path and self.resumed.step:
            # A sharding strategy reads it after on_fit_start, over what was just restored.
            raise UsageError(
                f"{self._session.store.url} holds an earlier run, and ckpt_path={trainer.ckpt_path!s} was given",
                hint="leave out ckpt_path to go on with the store's state, or use a new store; nothing was saved",
            )
        self._fit.watch.train_starts()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """See `Callback`."""
        if self._fit is not None:
            self._fit.settled.batch_starts()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """See `Callback`. An iteration is over, if there was one."""
        if self._session is None or self._fit is None or self._fit.is_waiting():
            return
        if self._session.stepping:
            self._fit.position.batch_ended()
            self._fit.settled.batch_ended()
            self._session.step()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """See `Callback`."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.settled.settle()
            self._fit.watch.validation_starts()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """See `Callback`."""
        if self._fit is None:
            return
        self._fit.settled.settle()
        for number in sorted(self._fit.waits):
            log.warning(
                "optimizer %d has not stepped yet: nothing is saved before it has, for what it will keep is not known",
                number,
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """See `Callback`. Saves the last state, sealed, and waits for the store."""
        if self._fit is not None:
            self._fit.position.fit_ended()
            self._fit.settled.batch_ended()
            self._close(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """See `Callback`. Brings the newest step into this host's memory, and leaves the rest to the daemon."""
        # As long as nothing was trained, the store has this state already.
        self._close(trainer, seal=self._session is not None and self._has_trained(self._session))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See `Callback`. A fit that had nothing left to train ends here."""
        self._close(trainer, seal=False)

    # -- parts of it ------------------------------------------------------------------------------------------------

    def _supersede(self, trainer: Any, session: Session) -> None:
        """What the trainer has now is what the store is to have."""
        stored = session.store.current_layout() is not None
        session.supersede(trainer.global_step)
        if stored and trainer.is_global_zero:
            log.warning(
                "going on from %s, at step %d, not from what %s has: the first step takes its place there",
                f"ckpt_path={trainer.ckpt_path!s}" if trainer.ckpt_path else "the state of this process",
                trainer.global_step,
                session.store.url,
            )

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
    """What belongs to one fit."""

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
        self.settled = Settled(trainer, others)
        self.watch = Watch(trainer, self.position, self.order)
        self.first_step = 0
        """Iterations that the fit began with."""
        self.replaced: dict[int, tuple[Any, Any]] = {}
        """Signals' handlers before and after the session has put its own in their place."""
        self.waits: set[int] = set()
        """Optimizers by number that have not stepped yet. The first iteration ends when all have: by then they have
        made the state that they keep per parameter, and from then on the layout is fixed."""
        self._hooks: list[Any] = []

    def wait_for(self, optimizers: list[Any]) -> None:
        """To be called before the first step of a new run."""
        for number, optimizer in enumerate(optimizers):
            self.waits.add(number)
            hook = optimizer.register_step_post_hook(lambda *_, number=number: self.waits.discard(number))
            self._hooks.append(hook)

    def is_waiting(self) -> bool:
        """Whether an optimizer has not stepped yet. Not to be called in a step: torch goes through the hooks then."""
        if not self.waits:
            while self._hooks:
                self._hooks.pop().remove()
        return bool(self.waits)

    def close(self, trainer: Any) -> None:
        """Leave the trainer as it was."""
        self.watch.close()
        self.forget_handlers(trainer)
        self.waits.clear()
        self.is_waiting()

    def forget_handlers(self, trainer: Any) -> None:
        """Lightning has noted the session's handlers, and would put them back after the session has gone."""
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
        # The run died before its first checkpoint was durable; what is in memory, if this is its host, is all there is.
        log.warning("%s: going on from the newest copies", error.message)
        return session.resume()


def _check_callbacks(callbacks: Iterable[Any]) -> None:
    if sum(isinstance(callback, ScarCallback) for callback in callbacks) > 1:
        raise UsageError(
            "the trainer has more than one ScarCallback",
            hint="a fit is saved to one store: give the trainer one of them, once",
        )


def _check_strategy(strategy: Any) -> None:
    names = [kind.__name__ for kind in type(strategy).__mro__]
    refused = next((name for name in names if name in _UNSUPPORTED), None)
    if refused is not None or not set(names) & set(_SUPPORTED):
        hint = _UNSUPPORTED.get(refused or "", f"use one of {', '.join(_SUPPORTED)}")
        raise UsageError(
            f"{names[0]} keeps the state where scarctl cannot see it",
            hint=hint,
            kind="unsupported-strategy",
        )


def _optimizers(trainer: Any) -> list[Any]:
    """Torch's own optimizers. Raises UsageError when there are none."""
    found = [getattr(optimizer, "_optimizer", optimizer) for optimizer in trainer.optimizers]
    if not found or any(type(optimizer).__name__ == "_MockOptimizer" for optimizer in found):
        raise UsageError(
            f"{type(trainer.lightning_module).__name__}.configure_optimizers returns no optimizer: nothing has steps",
            hint="return one, or leave out the callback",
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
