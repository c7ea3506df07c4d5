"""Save a run of Hugging Face's Trainer during training, and resume it: a callback that wraps `trainer.train`.

    trainer = Trainer(...)
    trainer.add_callback(ScarCallback(trainer, store="ckpt"))
    trainer.train()  # the same command again continues where the last one ended

A callback alone cannot set the Trainer's position. The Trainer computes it before the first event, from the
`trainer_state.json` of the checkpoint to resume from. So the callback replaces `trainer.train` by a method that names a
folder with only this file. For the rest of a checkpoint the Trainer calls its own methods, which the callback replaces
during training:

    _load_from_checkpoint           attach to model and optimizer, resume, write trainer_state.json
    _load_optimizer_and_scheduler   restore what making the scheduler has changed
    _load_rng_state                 restore random numbers, after the used batches are skipped
    _load_best_model                close the session first: those weights are not the run's newest
"""

from __future__ import annotations

import contextlib
import glob
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import scarctl
from scarctl.checkpoint.randomness import capture_rng, restore_rng
from scarctl.config import Mode
from scarctl.config.checks import check_mode
from scarctl.errors import UsageError
from scarctl.session.resumed import Resumed

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import TrainOutput
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"scarctl_adapters.transformers needs {error.name}: pip install 'scarctl[transformers]'",
        name=error.name,
    ) from error

from scarctl_adapters.options import check_options, with_extras
from scarctl_adapters.transformers.progress import Generators, Progress, Scheduler

log = logging.getLogger("scarctl")

_GIVEN = frozenset(("model", "optimizer", "schedulers", "scaler", "ranks", "hooks"))
"""Arguments of `scarctl.attach` that come from the Trainer."""
_NAME = "trainer"
"""Name of the callback's own extra."""


class ScarCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Saves a Trainer's run during training. The next `trainer.train()` with the same store continues it.

    A checkpoint named by `train(resume_from_checkpoint=...)` takes precedence over the store: the run continues from
    it, the callback warns, and saves all of that state before the next step. A run that has taken all its steps is
    not trained again.

    session: the `scarctl.Session` during training, otherwise None. resumed: the state from which the session resumed.
    """

    def __init__(
        self, trainer: Trainer, *, mode: Mode = "auto", snapshot: str | None = None, **options: Any
    ) -> None:
        """Wrap `trainer.train`. Add the callback to the trainer, too (`trainer.add_callback`).

        mode: see `Session.resume`.
        snapshot: restore the snapshot of this name, and no other state, at the beginning of every `train()`.
        options: options of `scarctl.attach` (store, fraction, interval, ...), except those that come from the Trainer:
        model, optimizer, schedulers, scaler, ranks, hooks.

        Raises UsageError for unknown options, for a second callback, and for a Trainer that cannot be saved: DeepSpeed,
        FSDP, TPUs, optimizers that step within the backward pass, `auto_find_batch_size`.
        """
        check_mode(mode)
        check_options(options, given=_GIVEN, owner="the Trainer", names=(_NAME,))
        _check_trainer(trainer)
        if _added(trainer):
            raise UsageError(
                "the Trainer already has a ScarCallback", hint="one callback saves all of the Trainer's state"
            )
        self._trainer, self._mode, self._snapshot, self._options = trainer, mode, snapshot, options
        self.session: scarctl.Session | None = None
        self.resumed: Resumed | None = None
        self._reset()
        self._train: Callable[..., TrainOutput] = trainer.train
        trainer.train = self._train_and_save

    def _reset(self) -> None:
        self._progress = Progress(self._trainer)
        self._generators = Generators()
        self._scheduler = Scheduler(self._trainer)
        self._theirs: dict[str, Callable[..., None]] = {}
        """The Trainer's own methods."""
        self._folder: Path | None = None
        """The folder of trainer_state.json; None if the user named a checkpoint."""
        self._groups: list[dict[str, Any]] = []
        self._remove_hook: Callable[[], None] = lambda: None

    # -- train ------------------------------------------------------------------------------------------------------

    def _train_and_save(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Run `trainer.train` with a session."""
        added = _added(self._trainer)
        if self not in added:
            if not added:
                log.warning(
                    "the Trainer does not have the ScarCallback (trainer.add_callback): nothing is saved"
                )
            return self._train(resume_from_checkpoint, *args, **kwargs)
        if len(added) > 1:
            raise UsageError(
                "the Trainer has two ScarCallbacks", hint="add one callback, once; nothing was trained"
            )
        _check_trainer(self._trainer)
        if kwargs.get("trial") is not None or (args and args[0] is not None):
            raise UsageError(
                "a hyperparameter search trains many runs, but a store holds one",
                hint="give every trial its own process, ScarCallback and store",
            )
        self._reset()
        finished = False
        try:
            with contextlib.ExitStack() as last:
                if resume_from_checkpoint in (None, False):
                    self._folder = Path(tempfile.mkdtemp(prefix="scarctl-trainer-"))
                    last.callback(self._remove_folder)
                    resume_from_checkpoint = str(self._folder)
                last.enter_context(self._instead_of_loading())
                try:
                    return self._train(resume_from_checkpoint, *args, **kwargs)
                except _Finished:
                    finished = True
        finally:
            # During an exception the session flushes instead.
            self._close()
        assert finished
        return self._train_output()

    @contextlib.contextmanager
    def _instead_of_loading(self) -> Iterator[None]:
        """Replace the Trainer's loading methods inside the block. See the module's docstring."""
        trainer, before = self._trainer, dict(vars(self._trainer))
        own = {"_load_from_checkpoint": self._start, "_load_best_model": self._load_best_model}
        if self._folder is not None:
            own |= {
                "_load_optimizer_and_scheduler": self._after_preparation,
                "_load_rng_state": self._load_rng_state,
                "_load_scaler": lambda *_: None,
                "_load_callback_state": lambda *_: None,
            }
        self._theirs = {
            name: getattr(trainer, name) for name in ("_load_from_checkpoint", "_load_best_model")
        }
        vars(trainer).update(own)
        try:
            yield
        finally:
            for name in own:
                vars(trainer).pop(name, None)
                if name in before:
                    setattr(trainer, name, before[name])

    def _start(self, checkpoint: str, model: Any = None) -> None:
        """Attach and resume, in place of loading weights: before the Trainer wraps the model."""
        if self.session is not None:
            self._theirs["_load_from_checkpoint"](checkpoint, model)
            return
        trainer, rng = self._trainer, capture_rng()
        trainer.create_optimizer()
        optimizer = trainer.optimizer
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        # Registered before the session's hook, which reads values that this hook changes.
        self._remove_hook = optimizer.register_step_post_hook(lambda *_: self._progress.stepped()).remove
        self.session = scarctl.attach(
            trainer.model,
            optimizer,
            schedulers=[self._scheduler, self._progress],
            scaler=trainer.accelerator.scaler,
            hooks="begin",
            ranks=scarctl.Ranks(replicated=_replicated(trainer)),
            **with_extras(self._options, {_NAME: scarctl.Extra(self._generators, per_rank=True)}),
        )
        self.resumed = self.session.resume(self._mode, self._snapshot)
        if self._folder is None:
            self._progress.forget()
            self._theirs["_load_from_checkpoint"](checkpoint, model)
            if self.resumed.step:
                log.warning(
                    "continuing from %s, not from step %d in %s: its state is saved there now",
                    checkpoint,
                    self.resumed.step,
                    self.session.store.url,
                )
            return
        if self.resumed.step:
            if self._progress.finished():
                raise _Finished
            held = self._progress.rng or self._generators.held or capture_rng()
            self._generators.held = held
            self._progress.hold(held)
        self._groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        # Samplers draw their seeds from the generators of a new process.
        restore_rng(rng)
        self._progress.trainer_state().save_to_json(str(Path(checkpoint) / "trainer_state.json"))

    def _after_preparation(self, checkpoint: str) -> None:
        """Restore param_groups, in place of loading optimizer and scheduler: making a scheduler sets learning rates."""
        del checkpoint
        self._scheduler.made()
        if self.resumed is not None and self.resumed.step:
            for group, values in zip(self._trainer.optimizer.param_groups, self._groups, strict=True):
                group.update(values)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore random numbers: called before the epoch's data order is drawn, or after batches were skipped."""
        del checkpoint
        held, self._generators.held = self._generators.held, None
        if held is None:
            return
        epoch = self._generators.epoch
        if epoch is None or torch.equal(torch.get_rng_state(), epoch["torch"]):
            # Nothing was drawn yet: a new epoch begins after the restored step.
            self._generators.epoch = held
        restore_rng(held)

    def _load_best_model(self) -> None:
        self._end()
        self._theirs["_load_best_model"]()

    # -- events -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See `TrainerCallback`. The Trainer has loaded everything."""
        if self.session is None:
            return
        self._remove_folder()
        self._progress.training = True
        self._progress.counted()
        if self._folder is None:
            self._scheduler.made(keep=True)
            self._progress.settle()
            if self.resumed is not None and self.resumed.step:
                self.session.checkpoint(full=True)
            return
        for kind in ("logging_steps", "eval_steps", "save_steps"):
            # A share refers to max_steps, which was unknown when the TrainerState was made.
            steps = getattr(args, kind)
            if steps is not None:
                setattr(state, kind, math.ceil(state.max_steps * steps) if steps < 1 else steps)
        self._progress.restore_callbacks()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See `TrainerCallback`. The Trainer draws the epoch's data order next."""
        if self.session is None:
            return
        if self._generators.held is None:
            self._progress.settle()
            self._generators.epoch = capture_rng()
        elif self._generators.epoch is not None:
            # The data order may be drawn from them. See `_load_rng_state`.
            restore_rng(self._generators.epoch)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See `TrainerCallback`. The Trainer is done with the last step."""
        if self.session is not None:
            self._progress.settle()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See `TrainerCallback`. The Trainer has counted the step, and stepped the schedule."""
        if self.session is not None:
            self._progress.counted()
            self.session.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()

    # -- end --------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if self.session is not None:
            self._progress.settle()
            self._close()

    def _close(self) -> None:
        session, self.session = self.session, None
        self._remove_hook()
        if session is not None:
            session.close()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _train_output(self) -> TrainOutput:
        """Return the output of a run that has taken all its steps."""
        trainer = self._trainer
        trainer.state, trainer.is_in_train = self._progress.trainer_state(), False
        state = trainer.state
        log.warning(
            "all %d steps are taken already: nothing is trained. Raise max_steps or num_train_epochs to continue, or "
            "use a new store to start again",
            state.global_step,
        )
        if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            trainer._load_best_model()
        metrics = next((dict(entry) for entry in reversed(state.log_history) if "train_loss" in entry), {})
        return TrainOutput(state.global_step, metrics.get("train_loss", float("nan")), metrics)


class _Finished(Exception):
    """Ends `trainer.train`: the store's run has taken all its steps."""


def _added(trainer: Trainer) -> list[ScarCallback]:
    return [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, ScarCallback)]


def _check_trainer(trainer: Trainer) -> None:
    """Raise UsageError for a Trainer that cannot be saved."""
    if not isinstance(trainer, Trainer):
        raise UsageError(
            f"trainer is a {type(trainer).__name__}, not a transformers.Trainer",
            hint="trainer.add_callback(ScarCallback(trainer, store=...))",
        )
    args = trainer.args
    kind = str(getattr(trainer.accelerator, "distributed_type", "")).rpartition(".")[2]
    if trainer.is_deepspeed_enabled or kind == "DEEPSPEED":
        raise UsageError(
            "DeepSpeed keeps parameters and moments where scarctl cannot see them",
            hint="train with DistributedDataParallel, or save with Trainer's own checkpoints only",
        )
    if args.fsdp or trainer.is_fsdp_enabled:
        raise UsageError(
            "a Trainer with fsdp shards the model after it has computed its position",
            hint="use DistributedDataParallel; or FSDP2 in a loop with Accelerate (scarctl_adapters.accelerate)",
        )
    if kind in ("XLA", "TPU", "MEGATRON_LM") or str(args.parallel_mode).endswith(
        ("TPU", "SAGEMAKER_MODEL_PARALLEL")
    ):
        raise UsageError(
            f"{kind} is not supported", hint="train on CPUs or GPUs, on one or with DistributedDataParallel"
        )
    if args.auto_find_batch_size:
        raise UsageError(
            "auto_find_batch_size restarts with other batches after some steps",
            hint="set per_device_train_batch_size to a size that fits",
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise UsageError(
            "a model that was sharded while loading cannot be resumed by a Trainer",
            hint="use scarctl.attach in a loop of your own",
        )
    if any(name in str(args.optim).lower() for name in ("layerwise", "lomo")):
        raise UsageError(
            f"{args.optim} steps within the backward pass, when no step can be saved",
            hint="use an optimizer that steps after it, such as adamw_torch",
        )


def _replicated(trainer: Trainer) -> list[str]:
    """Return patterns of the state that is equal on all ranks: the Trainer wraps the model only after `attach`."""
    if trainer.args.world_size == 1:
        return []
    if trainer.args.ddp_broadcast_buffers is False:
        return [glob.escape(name) for name, _ in trainer.model.named_parameters()]
    return ["*"]
