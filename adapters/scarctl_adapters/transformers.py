"""Hugging Face's Trainer: partial checkpoints beside its own, and going on by itself after a failure.

    trainer = Trainer(...)
    trainer.add_callback(ScarCallback(trainer, store="ckpt"))
    trainer.train()  # the same command again goes on where the last one has ended

A callback alone cannot tell the Trainer where to go on: it computes that, before the first event, from the
`trainer_state.json` of the checkpoint that it is told to resume from. So `trainer.train` becomes one that names such a
folder, with nothing but this file in it. The Trainer asks its own methods for the rest of a checkpoint, and while it
trains these do what scarctl does:

    _load_from_checkpoint           attach to model and optimizer, resume, write trainer_state.json
    _load_optimizer_and_scheduler   what making the scheduler has changed, as it was
    _load_rng_state                 random numbers, after the batches that were trained on are skipped
    _load_best_model                let go of the store first: those weights are not the run's newest
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import inspect
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import scarctl
from scarctl.errors import UsageError
from scarctl.prediction import Mode
from scarctl.randomness import capture_rng, restore_rng
from scarctl.restore import Resumed, check_mode

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import TrainOutput
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"scarctl_adapters.transformers needs {error.name}: pip install 'scarctl[transformers]'",
        name=error.name,
    ) from error

from scarctl_adapters.transformers_progress import Generators, Progress, Scheduler

log = logging.getLogger("scarctl")

_OURS = frozenset(("model", "optimizer", "schedulers", "scaler", "replicated", "ranks", "auto"))
"""Arguments of `scarctl.attach` that come from the Trainer."""


class ScarCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Saves a Trainer's run while it trains, and lets `trainer.train()` go on with it.

    A checkpoint that `train(resume_from_checkpoint=...)` names wins over the store: the run goes on from there, a
    warning says so, and the store gets all of that state before the next step. Otherwise the store counts. A run that
    has taken all its steps is not trained again.

    `session` is the `scarctl.Session` while the Trainer trains, `resumed` what it found at the start.
    """

    def __init__(
        self, trainer: Trainer, *, mode: Mode = "partial", snapshot: str | None = None, **options: Any
    ) -> None:
        """Beside `trainer`, which it still has to be added to (`trainer.add_callback`).

        mode: "partial" goes on with every partition's newest copy; "rollback" with the newest state that is of one step
            everywhere, which ends bit for bit like a run that was not interrupted.
        snapshot: go back to this snapshot, exactly, at the beginning of every `train()`.
        options: those of `scarctl.attach` (store, fraction, interval, ...), but what the Trainer knows itself: model,
            optimizer, schedulers, scaler, replicated, ranks, auto.

        Raises UsageError for options that do not exist, for a second callback, and for a Trainer that cannot be saved:
        DeepSpeed, FSDP, TPUs, optimizers that step while they go backward, `auto_find_batch_size`.
        """
        _check_options(options, mode)
        _check_trainer(trainer)
        if _added(trainer):
            raise UsageError("the Trainer has a ScarCallback already", hint="one saves all of its state")
        self._trainer, self._mode, self._snapshot, self._options = trainer, mode, snapshot, options
        self.session: scarctl.Session | None = None
        self.resumed: Resumed | None = None
        self._reset()
        self._train: Callable[..., TrainOutput] = trainer.train
        trainer.train = self._train_beside

    def _reset(self) -> None:
        self._progress = Progress(self._trainer)
        self._generators = Generators()
        self._scheduler = Scheduler(self._trainer)
        self._theirs: dict[str, Callable[..., None]] = {}
        """What the Trainer does by itself."""
        self._folder: Path | None = None
        """Of the trainer_state.json; None where the user's own checkpoint counts."""
        self._groups: list[dict[str, Any]] = []
        self._remove_hook: Callable[[], None] = lambda: None

    # -- train ------------------------------------------------------------------------------------------------------

    def _train_beside(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """`trainer.train`, with a session beside it."""
        added = _added(self._trainer)
        if self not in added:
            if not added:
                log.warning("the ScarCallback is not among the Trainer's callbacks: nothing is saved")
            return self._train(resume_from_checkpoint, *args, **kwargs)
        if len(added) > 1:
            raise UsageError(
                "the Trainer has two ScarCallbacks", hint="add one of them, once; nothing was trained"
            )
        _check_trainer(self._trainer)
        if kwargs.get("trial") is not None or (args and args[0] is not None):
            raise UsageError(
                "a search for hyperparameters trains many runs, and a store has one",
                hint="give every trial a process, a ScarCallback and a store of its own",
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
            # An exception on its way makes this a flush.
            self._close()
        assert finished
        return self._train_output()

    @contextlib.contextmanager
    def _instead_of_loading(self) -> Iterator[None]:
        """Inside, the Trainer loads from scarctl what it would load from a checkpoint. See the module."""
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
        """In the place of the model's weights: model and optimizer are there, nothing is wrapped yet."""
        if self.session is not None:
            self._theirs["_load_from_checkpoint"](checkpoint, model)
            return
        trainer, rng = self._trainer, capture_rng()
        trainer.create_optimizer()
        optimizer = trainer.optimizer
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        # Before the session's, which reads what this one changes.
        self._remove_hook = optimizer.register_step_post_hook(lambda *_: self._progress.stepped()).remove
        options = dict(self._options)
        own = {**(options.pop("rank_extras", None) or {}), "trainer": self._generators}
        self.session = scarctl.attach(
            trainer.model,
            optimizer,
            schedulers=[self._scheduler, self._progress],
            scaler=trainer.accelerator.scaler,
            rank_extras=own,
            replicated=_replicated(trainer),
            **options,
        )
        self.resumed = self.session.resume(self._mode, self._snapshot)
        if self._folder is None:
            self._progress.forget()
            # What comes next is not what came after the step in the store.
            self.session._progress.witness.forget()
            self._theirs["_load_from_checkpoint"](checkpoint, model)
            if self.resumed.step:
                log.warning(
                    "%s counts, not step %d in %s, which gets this state now",
                    checkpoint,
                    self.resumed.step,
                    self.session.store.url,
                )
            return
        if self.resumed.step:
            if self._progress.finished():
                raise _Finished
            for name in self._progress.other_data():
                log.warning(
                    "%s is not as it was in %s: other batches come next", name, self.session.store.url
                )
            held = self._progress.rng or self._generators.held or capture_rng()
            self._generators.held = held
            self._progress.hold(held)
        self._groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        # Samplers take seeds from the generators as they are in a new process.
        restore_rng(rng)
        self._progress.trainer_state().save_to_json(str(Path(checkpoint) / "trainer_state.json"))

    def _after_preparation(self, checkpoint: str) -> None:
        """In the place of optimizer and scheduler. Making a scheduler sets learning rates."""
        del checkpoint
        self._scheduler.made()
        if self.resumed is not None and self.resumed.step:
            for group, values in zip(self._trainer.optimizer.param_groups, self._groups, strict=True):
                group.update(values)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """In the place of random numbers: called before the epoch's data are drawn, or when batches were skipped."""
        del checkpoint
        held, self._generators.held = self._generators.held, None
        if held is None:
            return
        epoch = self._generators.epoch
        if epoch is None or torch.equal(torch.get_rng_state(), epoch["torch"]):
            # Nothing was drawn yet: it is another epoch than that of the step before.
            self._generators.epoch = held
        restore_rng(held)

    def _load_best_model(self) -> None:
        self._end()
        self._theirs["_load_best_model"]()

    # -- events -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All is loaded."""
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
            # A share is one of all steps, which were not known when the state was made.
            steps = getattr(args, kind)
            if steps is not None:
                setattr(state, kind, math.ceil(state.max_steps * steps) if steps < 1 else steps)
        self._progress.restore_callbacks()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The next batches are drawn."""
        if self.session is None:
            return
        if self._generators.held is None:
            self._progress.settle()
            self._generators.epoch = capture_rng()
        elif self._generators.epoch is not None:
            # An order of the data may be drawn from these. See `_load_rng_state`.
            restore_rng(self._generators.epoch)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All that belongs to the last step is done."""
        if self.session is not None:
            self._progress.settle()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step is counted."""
        if self.session is not None:
            self._progress.counted()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All is trained."""
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
        """Of a run that has nothing left to do."""
        trainer = self._trainer
        trainer.state, trainer.is_in_train = self._progress.trainer_state(), False
        state = trainer.state
        log.warning(
            "all %d steps are taken already: nothing is trained. Raise max_steps or num_train_epochs to go on, or take "
            "another store to start again",
            state.global_step,
        )
        if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            trainer._load_best_model()
        metrics = next((dict(entry) for entry in reversed(state.log_history) if "train_loss" in entry), {})
        return TrainOutput(state.global_step, metrics.get("train_loss", float("nan")), metrics)


class _Finished(Exception):
    """The store's run has taken all its steps."""


def _added(trainer: Trainer) -> list[ScarCallback]:
    return [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, ScarCallback)]


def _check_options(options: dict[str, Any], mode: str) -> None:
    known = sorted(set(inspect.signature(scarctl.attach).parameters) - _OURS)
    for name in options:
        if name in _OURS:
            raise UsageError(f"{name} comes from the Trainer", hint=f"leave {name} out")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise UsageError(
                f"no option {name!r}", hint=f"{close[0]}?" if close else f"there are: {', '.join(known)}"
            )
    check_mode(mode)
    if any("trainer" in (options.get(kind) or {}) for kind in ("extras", "rank_extras")):
        raise UsageError("the extra 'trainer' is scarctl's own", hint="give yours another name")


def _check_trainer(trainer: Trainer) -> None:
    """Raise UsageError for what cannot be saved."""
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
            "a Trainer with fsdp shards the model after it has decided where to go on",
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
            "auto_find_batch_size starts again with other batches after some steps",
            hint="set per_device_train_batch_size to what fits",
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise UsageError(
            "a model that was sharded while it was loaded cannot be resumed by a Trainer",
            hint="use scarctl.attach in a loop of your own",
        )
    if any(name in str(args.optim).lower() for name in ("layerwise", "lomo")):
        raise UsageError(
            f"{args.optim} steps within the backward pass, where nothing can be saved",
            hint="use an optimizer that steps after it, such as adamw_torch",
        )


def _replicated(trainer: Trainer) -> list[str]:
    """Patterns of what all ranks keep equal once the Trainer has wrapped the model: it does so after `attach`."""
    if trainer.args.world_size == 1:
        return []
    if trainer.args.ddp_broadcast_buffers is False:
        return [glob.escape(name) for name, _ in trainer.model.named_parameters()]
    return ["*"]
