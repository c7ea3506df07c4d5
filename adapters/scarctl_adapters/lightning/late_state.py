"""Save and restore the state that Lightning changes after a step: schedules, gradient scaler, other callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scarctl.errors import UsageError
from scarctl.state.torch_dtypes import Deferred, plain
from scarctl_adapters.settled import Settled
from scarctl_adapters.torch.optimizer_state import update_group
from scarctl_adapters.torch.settings import Later


class LateState:
    """State that changes between two steps, independently of the batch: late extras.

    Schedulers that wait for a validation's metric, and other callbacks (best checkpoints, patience), change in a
    validation and at an epoch's end. A resumed run repeats these, so their state from before is saved. The same holds
    for a batch in which a gradient scaler skips the step: it changes the scale and the schedules.
    """

    def __init__(self, trainer: Any, callbacks: Mapping[str, Any]) -> None:
        """callbacks: callbacks to save, by state key."""
        self._trainer = trainer
        self._callbacks = callbacks
        self._settled = Settled(self._capture)

    def batch_ended(self) -> None:
        """Note that a batch has changed all of this state."""
        self._settled.drop()

    def batch_starts(self) -> None:
        """Keep the state before a batch: with a gradient scaler the batch may have no step."""
        if self._trainer.precision_plugin.state_dict():
            self.settle()

    def settle(self) -> None:
        """Keep the state before a validation or an epoch's end."""
        self._settled.settle()

    def state_dict(self) -> Deferred:
        """Return the values once they are needed: schedulers, param_groups, precision plugin and callbacks."""
        return Later(lambda: self._settled.value or self._capture())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. Raises UsageError for another number of schedulers."""
        self._settled.drop()
        configs = self._trainer.lr_scheduler_configs
        if len(state["schedulers"]) != len(configs):
            raise UsageError(
                f"the store has {len(state['schedulers'])} learning-rate schedulers, not {len(configs)}",
                hint="configure the optimizers as in the run to resume, or use a new store",
            )
        for config, saved in zip(configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(saved)
        groups = [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        for group, values in zip(groups, state["groups"], strict=True):
            update_group(group, values)
        if state["precision"]:
            self._trainer.precision_plugin.load_state_dict(state["precision"])
        for key, callback in self._callbacks.items():
            if state["callbacks"].get(key):
                callback.load_state_dict(state["callbacks"][key])

    def _capture(self) -> dict[str, Any]:
        trainer = self._trainer
        return plain(  # type: ignore[return-value]
            {
                "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
                "groups": [
                    {key: value for key, value in group.items() if key != "params"}
                    for optimizer in trainer.optimizers
                    for group in optimizer.param_groups
                ],
                "precision": trainer.precision_plugin.state_dict(),
                "callbacks": {key: callback.state_dict() for key, callback in self._callbacks.items()},
            }
        )
