"""Save the progress of Hugging Face's Trainer as plain values: counters, log, callbacks, random numbers, schedule.

The Trainer changes these after the optimizer's step:

    optimizer.step()            parameters are those of step k
    global_step += 1            counters are those of step k
    log, evaluate, save         evaluation draws random numbers, and decides on the best metric
    next on_step_begin or       the Trainer is done with step k: its values are settled
      on_epoch_begin

Continuing after step k needs the settled values. `Progress` keeps them at these two events. A session reads them right
before the next optimizer step. A flush before that gets the counters as they are, and the random numbers of the step's
end.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from scarctl.checkpoint.randomness import capture_rng
from scarctl.state.torch_dtypes import Deferred
from scarctl_adapters.settled import Settled
from scarctl_adapters.torch.settings import Later

log = logging.getLogger("scarctl")

_FIELDS = (
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Fields of a TrainerState that belong to the run. The others (intervals, ranks) belong to the process."""
_DATA = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "seed", "data_seed",
         "group_by_length", "train_sampling_strategy")  # fmt: skip
"""Arguments that determine the batches and their order."""
_LENGTH = ("max_steps", "num_train_epochs")


@dataclasses.dataclass(frozen=True, slots=True)
class _Values:
    """The Trainer's state at one moment."""

    step: int
    fields: dict[str, Any]
    callbacks: dict[str, Any]
    logged: int
    """Number of entries in the log."""
    rng: dict[str, Any] | None = None


class Progress:
    """The Trainer's own state, equal on all ranks. `state_dict` may be called from any thread."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._step = 0
        """Steps that the parameters have taken; `global_step` follows a little later."""
        self._max_steps = 0
        self._settled = Settled(lambda: self._values(drawn=True))
        self._log = ""
        self._logged = 0
        self.training = False
        """Whether the Trainer has its TrainerState."""
        self.restored: dict[str, Any] | None = None
        """The state given to `load_state_dict`."""

    def stepped(self) -> None:
        """Count a step right after the optimizer's, while `global_step` is still that of the step before."""
        self._advance(self._trainer.state.global_step + 1)

    def counted(self) -> None:
        """Take the Trainer's count: a gradient scaler may have skipped the optimizer's step."""
        self._advance(self._trainer.state.global_step)

    def _advance(self, step: int) -> None:
        if step != self._step:
            self._settled.drop()
        self._step = step

    def settle(self) -> None:
        """Keep the values: the Trainer is done with the newest step. Later calls for this step change nothing."""
        self.counted()
        self._settled.settle()

    def state_dict(self) -> Deferred:
        """Return the values once they are needed: the Trainer changes them after the step."""
        return Later(self._state)

    def _state(self) -> dict[str, Any]:
        """Return plain values: counters, the log and callbacks' states as JSON, random numbers or None."""
        settled = self._settled.value or dataclasses.replace(self._values(), step=self._step)
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
        """Keep `state` for `trainer_state`. While the Trainer trains, set its TrainerState back; batches continue."""
        self.restored = state
        saved, now = state["data"], _data(self._trainer.args)
        for name in sorted(name for name in saved.keys() & now.keys() if saved[name] != now[name]):
            log.warning("%s differs from the run's: the next batches differ", name)
        if self.training:
            self._fill(self._trainer.state)
            self._trainer.current_flos = 0
        self._step, self._max_steps = state["step"], state["max_steps"]
        self._log, self._logged = state["log"], state["logged"]
        fields, callbacks = json.loads(state["fields"]), json.loads(state["callbacks"])
        self._settled.value = _Values(state["step"], fields, callbacks, state["logged"], state["rng"])

    def hold(self, rng: dict[str, Any]) -> None:
        """Set the random numbers that the restored step continues with."""
        if self._settled.value is not None and self._trainer.args.world_size == 1:
            self._settled.value = dataclasses.replace(self._settled.value, rng=rng)

    def forget(self) -> None:
        """Drop the restored values."""
        self._settled.drop()
        self.restored, self._step, self._log, self._logged = None, 0, "", 0

    @property
    def rng(self) -> dict[str, Any] | None:
        """Random numbers that the restored run continues with; None if they were not saved."""
        return self.restored["rng"] if self.restored is not None else None

    def _values(self, *, drawn: bool = False) -> _Values:
        """Return the current values. drawn: include the random generators, except with several ranks: theirs differ."""
        state = self._trainer.state
        fields = {name: getattr(state, name, None) for name in _FIELDS}
        # The TrainerState lacks the operations since the last log.
        fields["total_flos"] = (fields["total_flos"] or 0) + self._trainer.current_flos
        rng = capture_rng() if drawn and self._trainer.args.world_size == 1 else None
        return _Values(state.global_step, fields, _states(self._trainer), len(state.log_history), rng)

    def _log_text(self, number: int) -> str:
        """Return the first `number` entries of the log as the inside of a JSON list. Encodes only new entries."""
        history = self._trainer.state.log_history
        if number < self._logged:
            return ",".join(json.dumps(entry, default=_plain) for entry in history[:number])
        if number > self._logged:
            new = [json.dumps(entry, default=_plain) for entry in history[self._logged : number]]
            self._log = ",".join([self._log, *new] if self._log else new)
            self._logged = number
        return self._log

    def trainer_state(self) -> TrainerState:
        """Return a TrainerState for this process that continues the restored one, if there is one."""
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
        """Set the restored values."""
        saved = self.restored
        assert saved is not None
        known = {field.name for field in dataclasses.fields(TrainerState)}
        for name, value in json.loads(saved["fields"]).items():
            if name in known:
                setattr(state, name, value)
        state.global_step = saved["step"]
        state.log_history = json.loads(f"[{saved['log']}]")

    def restore_callbacks(self) -> None:
        """Restore the callbacks' states, several of one class in their order."""
        if self.restored is None:
            return
        saved = json.loads(self.restored["callbacks"])
        for callback in self._trainer.callback_handler.callbacks:
            states = saved.get(type(callback).__name__)
            if isinstance(callback, ExportableState) and states:
                for name, value in states.pop(0).items():
                    setattr(callback, name, value)

    def finished(self) -> bool:
        """Return whether the restored run had taken all steps, and this one has no more."""
        args, saved = self._trainer.args, self.restored
        if saved is None:
            return False
        of = (
            saved["max_steps"]
            if saved["length"] == {n: getattr(args, n) for n in _LENGTH}
            else args.max_steps
        )
        return bool(0 < of <= saved["step"])


class Generators:
    """A rank's own random numbers, if the session's saved ones are not those to continue with."""

    def __init__(self) -> None:
        self.epoch: dict[str, Any] | None = None
        """States at the epoch's beginning, which may determine the data order."""
        self.held: dict[str, Any] | None = None
        """States at the restored step, until the resumed run continues with them."""

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        return {"epoch": self.epoch, "held": self.held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.epoch, self.held = state["epoch"], state["held"]


class Scheduler:
    """The Trainer's learning-rate scheduler, which the Trainer makes after the session has resumed."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._held: dict[str, Any] | None = None
        self._made = False

    def made(self, *, keep: bool = False) -> None:
        """Load the restored state, if any, into the scheduler that the Trainer has made. keep: do not load it."""
        self._made = True
        if self._held is not None and not keep:
            self._trainer.lr_scheduler.load_state_dict(self._held)
            self._held = None

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state; before the scheduler exists, the restored one."""
        if self._made:
            return dict(self._trainer.lr_scheduler.state_dict())
        return self._held or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load into the scheduler, or keep for `made`."""
        self._held = state
        if self._made:
            self.made()


def _states(trainer: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the attributes of the callbacks that have a state, by class."""
    found: dict[str, list[dict[str, Any]]] = {}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            found.setdefault(type(callback).__name__, []).append(callback.state().get("attributes", {}))
    return found


def _data(args: Any) -> dict[str, Any]:
    found = {name: getattr(args, name, None) for name in _DATA}
    return {name: v if v is None or isinstance(v, int | float) else str(v) for name, v in found.items()}


def _plain(value: Any) -> Any:
    """Return a JSON value for one that json does not know: a number if it converts to one, otherwise text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return int(number) if math.isfinite(number) and number.is_integer() else number
