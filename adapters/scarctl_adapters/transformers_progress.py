"""What Hugging Face's Trainer has done so far, as plain values: its counters, its log, its random numbers.

The Trainer changes these at other moments than the optimizer's step, after which scarctl saves:

    optimizer.step()            parameters are those of step k
    global_step += 1            the counters are
    log, evaluate, save         evaluation draws random numbers, and decides on the best metric
    next on_step_begin or       all that belongs to step k is done: "settled"
      on_epoch_begin

Going on after step k needs the settled values. `Progress` remembers them at those two events, and hands them out right
before the next optimizer step, when scarctl reads what is late. A flush that comes before they are settled gets the
counters as they are, and the random numbers of the step's end.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from scarctl.randomness import capture_rng

_FIELDS = (
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""What of a TrainerState belongs to the run. The rest (intervals, ranks) belongs to the process."""
_DATA = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "seed", "data_seed",
         "group_by_length", "train_sampling_strategy")  # fmt: skip
"""Arguments that decide which batches come in which order."""
_LENGTH = ("max_steps", "num_train_epochs")


@dataclasses.dataclass(frozen=True, slots=True)
class _Settled:
    """The Trainer's state when all that belongs to a step was done."""

    step: int
    fields: dict[str, Any]
    callbacks: dict[str, Any]
    logged: int
    """Entries of the log."""
    rng: dict[str, Any] | None = None


class Progress:
    """The Trainer's own state, equal on all ranks. `state_dict` may be called in any thread."""

    owns_loop = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._step = 0
        """Steps whose result the parameters are; `global_step` says so a little later."""
        self._max_steps = 0
        self._settled: _Settled | None = None
        self._log = ""
        self._logged = 0
        self.training = False
        """The Trainer has its TrainerState."""
        self.restored: dict[str, Any] | None = None
        """What `load_state_dict` was given."""

    def stepped(self) -> None:
        """Right after the optimizer's step, when `global_step` is still that of the step before."""
        self._step = self._trainer.state.global_step + 1

    def counted(self) -> None:
        """The Trainer has counted the step; a gradient scaler may have skipped the optimizer's."""
        self._step = self._trainer.state.global_step

    def settle(self) -> None:
        """All that belongs to the newest step is done. Only the first time counts: the next batches draw numbers."""
        self.counted()
        if self._settled is not None and self._settled.step == self._step:
            return
        # Several ranks draw different numbers, and what is said here counts for all of them.
        alone = self._trainer.args.world_size == 1
        self._settled = _Settled(*self._taken(), rng=capture_rng() if alone else None)

    def state_dict(self) -> dict[str, Any]:
        """Plain values: counters, the log and the states of callbacks as JSON, random numbers or None."""
        settled = self._settled
        if settled is None or settled.step != self._step:
            settled = dataclasses.replace(_Settled(*self._taken()), step=self._step)
        args = self._trainer.args
        return {
            "step": settled.step,
            "fields": json.dumps(settled.fields, default=_plain),
            "callbacks": json.dumps(settled.callbacks, default=_plain),
            "logged": settled.logged,
            "log": self._log_text(settled.logged),
            "rng": settled.rng,
            "max_steps": self._trainer.state.max_steps or self._max_steps,
            "length": {name: getattr(args, name) for name in _LENGTH},
            "data": _data(args),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what an earlier run has saved: the Trainer has no TrainerState yet that it could go to. While it trains
        it has one: that goes back to what it was. The batches go on.
        """
        self.restored = state
        if self.training:
            self._fill(self._trainer.state)
            self._trainer.current_flos = 0
        self._step, self._max_steps = state["step"], state["max_steps"]
        self._log, self._logged = state["log"], state["logged"]
        fields, callbacks = json.loads(state["fields"]), json.loads(state["callbacks"])
        self._settled = _Settled(state["step"], fields, callbacks, state["logged"], state["rng"])

    def hold(self, rng: dict[str, Any]) -> None:
        """Random numbers that the restored step is followed by."""
        if self._settled is not None and self._trainer.args.world_size == 1:
            self._settled = dataclasses.replace(self._settled, rng=rng)

    def forget(self) -> None:
        """What was restored does not count."""
        self.restored, self._settled, self._step, self._log, self._logged = None, None, 0, "", 0

    @property
    def rng(self) -> dict[str, Any] | None:
        """Random numbers that the restored run has to go on with, if it has said so."""
        return self.restored["rng"] if self.restored is not None else None

    def _taken(self) -> tuple[int, dict[str, Any], dict[str, Any], int]:
        state = self._trainer.state
        fields = {name: getattr(state, name, None) for name in _FIELDS}
        # What was computed since the last log is not in the state yet.
        fields["total_flos"] = (fields["total_flos"] or 0) + self._trainer.current_flos
        return state.global_step, fields, _states(self._trainer), len(state.log_history)

    def _log_text(self, number: int) -> str:
        """The first `number` entries of the log as the inside of a JSON list. Only what is new is put into text."""
        history = self._trainer.state.log_history
        if number < self._logged:
            return ",".join(json.dumps(entry, default=_plain) for entry in history[:number])
        if number > self._logged:
            new = [json.dumps(entry, default=_plain) for entry in history[self._logged : number]]
            self._log = ",".join([self._log, *new] if self._log else new)
            self._logged = number
        return self._log

    def trainer_state(self) -> TrainerState:
        """A TrainerState for this process that goes on where the restored one was; a new one if there is none."""
        trainer = self._trainer
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        state = TrainerState(stateful_callbacks=[cb for cb in callbacks if isinstance(cb, ExportableState)])
        state.train_batch_size = trainer._train_batch_size
        for name in ("logging_steps", "eval_steps", "save_steps"):
            setattr(state, name, getattr(trainer.args, name))
        if self.restored is not None:
            self._fill(state)
        return state

    def _fill(self, state: TrainerState) -> None:
        """With what was restored."""
        saved = self.restored
        assert saved is not None
        known = {field.name for field in dataclasses.fields(TrainerState)}
        for name, value in json.loads(saved["fields"]).items():
            if name in known:
                setattr(state, name, value)
        state.global_step = saved["step"]
        state.log_history = json.loads(f"[{saved['log']}]")

    def restore_callbacks(self) -> None:
        """Give callbacks that have a state theirs, several of one class in their order."""
        if self.restored is None:
            return
        saved = json.loads(self.restored["callbacks"])
        for callback in self._trainer.callback_handler.callbacks:
            states = saved.get(type(callback).__name__)
            if isinstance(callback, ExportableState) and states:
                for name, value in states.pop(0).items():
                    setattr(callback, name, value)

    def finished(self) -> bool:
        """Whether the restored run had taken all its steps, and this one is not to be any longer."""
        args, saved = self._trainer.args, self.restored
        if saved is None:
            return False
        of = (
            saved["max_steps"]
            if saved["length"] == {n: getattr(args, n) for n in _LENGTH}
            else args.max_steps
        )
        return bool(0 < of <= saved["step"])

    def other_data(self) -> list[str]:
        """Arguments, other than in the restored run, for which the batches that come next are others."""
        if self.restored is None:
            return []
        saved, now = self.restored["data"], _data(self._trainer.args)
        return sorted(name for name in saved.keys() & now.keys() if saved[name] != now[name])


class Generators:
    """A rank's own random numbers, where `scarctl.attach` reads others than those that are needed."""

    def __init__(self) -> None:
        self.epoch: dict[str, Any] | None = None
        """At the beginning of the epoch: an order of the data may be drawn from these."""
        self.held: dict[str, Any] | None = None
        """Of the step that a resumed run goes on after, until it does."""

    def state_dict(self) -> dict[str, Any]:
        """Both, or None."""
        return {"epoch": self.epoch, "held": self.held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put `state_dict` back."""
        self.epoch, self.held = state["epoch"], state["held"]


class Scheduler:
    """The Trainer's learning-rate schedule, which it makes only after a state was restored."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._held: dict[str, Any] | None = None
        self._made = False

    def made(self, *, keep: bool = False) -> None:
        """The Trainer has its scheduler now: it gets what was restored, if there is something; `keep`: it does not."""
        self._made = True
        if self._held is not None and not keep:
            self._trainer.lr_scheduler.load_state_dict(self._held)
            self._held = None

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's; before there is one, what was restored."""
        if self._made:
            return dict(self._trainer.lr_scheduler.state_dict())
        return self._held or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the scheduler, or kept for `made`."""
        self._held = state
        if self._made:
            self.made()


def _states(trainer: Any) -> dict[str, list[dict[str, Any]]]:
    """Attributes of the callbacks that have a state, by class."""
    found: dict[str, list[dict[str, Any]]] = {}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            found.setdefault(type(callback).__name__, []).append(callback.state().get("attributes", {}))
    return found


def _data(args: Any) -> dict[str, Any]:
    found = {name: getattr(args, name, None) for name in _DATA}
    return {name: v if v is None or isinstance(v, int | float) else str(v) for name, v in found.items()}


def _plain(value: Any) -> Any:
    """What JSON has for a value that it does not know: a number for what is one, else text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return int(number) if math.isfinite(number) and number.is_integer() else number
