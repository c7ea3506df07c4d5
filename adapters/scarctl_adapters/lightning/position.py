"""Save the counters of Lightning's loops as of a step's end, and set the loops of a new process to them.

The position of a step is the end of the training batch in which an optimizer stepped: after that batch's learning-rate
schedulers, before a validation that is due there, before the end of the epoch. A resumed run repeats the latter two,
unless the run that ended had finished them.

Lightning counts in many small objects, its restart logic reads them, and it has no hooks where an epoch's data order is
drawn. So this package uses private names of Lightning's loops: here, in `data_order` and in `loops`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BATCHES = "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"
_STEPPED = "_batches_that_stepped"
_TRACKERS = ("ready", "started", "processed", "completed")


class FitPosition:
    """The loops' counters and the data module's state, as extras that are the same on all ranks."""

    def __init__(self, trainer: Any, datamodule: Any = None) -> None:
        """datamodule: the data module whose state is saved; None without one."""
        self._trainer = trainer
        self._datamodule = datamodule
        loop = trainer.fit_loop
        names = [name for name in loop.state_dict() if name.rpartition(".")[2] != "state_dict"]
        self._counters = {name: _reach(loop, name) for name in names}
        self._now = self._capture()
        self._end: dict[str, Any] | None = None
        self.loaded: dict[str, Any] | None = None
        """The state that a resumed run continues from."""
        self.running = False
        """Whether training has begun: then a loaded state comes from a recovery within the fit."""

    def batch_ended(self) -> None:
        """Take the position, at the end of a training batch in which an optimizer stepped."""
        self._now = self._capture()

    def fit_ended(self) -> None:
        """Note the counters after the fit's last epoch and validation."""
        self._end = self._capture()

    @property
    def batches(self) -> int:
        """Batches of the epoch before the position."""
        return int(self._now["counters"][_BATCHES]["current"]["ready"])

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; "end" is None unless the fit has ended."""
        data = self._datamodule.state_dict() if self._datamodule is not None else {}
        return {**self._now, "end": self._end, "datamodule": data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep `state` for `restore_counters`. In a running fit the loops continue where they are."""
        if self.running:
            return
        self.loaded = dict(state)
        if state["datamodule"] and self._datamodule is not None:
            self._datamodule.load_state_dict(state["datamodule"])

    def _capture(self) -> dict[str, Any]:
        stepped = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        counters = {name: _numbers(counter) for name, counter in self._counters.items()}
        return {"counters": counters, "stepped": stepped}

    def restore_counters(self) -> bool:
        """Set the loops to `loaded`. Return whether the fit continues within an epoch, not between two."""
        assert self.loaded is not None
        self._now = {key: self.loaded[key] for key in ("counters", "stepped")}
        end = self.loaded["end"]
        if end is not None and (self._now["counters"][_BATCHES]["is_last_batch"] or self._is_over(end)):
            self._load(end)
            # The next epoch must begin as in the process that ended, not as after a restart.
            for loop in _loops(self._trainer.fit_loop):
                loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
            # One exception: a resumed run skips the sanity check. Training resets the flag.
            self._trainer.fit_loop.epoch_loop.val_loop._restarting = True
            return False
        counters = {**self._now["counters"]}
        # As at the end of the batch, with a validation begun: Lightning then runs one that is due.
        counters[_BATCHES] = _completed(counters[_BATCHES])
        counters[_VALIDATION] = _begun(counters[_VALIDATION])
        self._load({"counters": counters, "stepped": self._now["stepped"]})
        return True

    def _is_over(self, end: Mapping[str, Any]) -> bool:
        loop = self._trainer.fit_loop
        counters = end["counters"]
        if self._trainer.lightning_module.automatic_optimization:
            steps = counters["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
        else:
            steps = counters["epoch_loop.manual_optimization.optim_step_progress"]
        epochs = counters["epoch_progress"]["current"]["processed"]
        enough = loop.max_epochs is not None and 0 <= loop.max_epochs <= epochs
        return bool(enough or 0 <= loop.max_steps <= steps["total"]["completed"])

    def _load(self, state: Mapping[str, Any]) -> None:
        loop = self._trainer.fit_loop
        loop.load_state_dict(
            {**state["counters"], "state_dict": {}, "epoch_loop.state_dict": {_STEPPED: state["stepped"]}}
        )

    def correct_counters(self, *, validation_due: bool) -> None:
        """Undo the changes of Lightning's restart and `restore_counters` for a validation that may not be due."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        # Before 2.5.1 Lightning counts a restarted epoch once more.
        self._trainer.fit_loop.epoch_progress.load_state_dict(self._now["counters"]["epoch_progress"])
        # Lightning counts a batch after the batch's validation.
        epoch_loop._batches_that_stepped = self._now["stepped"] + (0 if validation_due else 1)
        if not validation_due:
            epoch_loop.val_loop.batch_progress.load_state_dict(self._now["counters"][_VALIDATION])

    def correct_validation(self) -> None:
        """Set the counters of a validation that has begun to those without a restart."""
        total = self._now["counters"][_VALIDATION]["total"]
        self._trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.load_state_dict(total)


def _reach(loop: Any, name: str) -> Any:
    for part in name.split("."):
        loop = getattr(loop, part)
    return loop


def _loops(loop: Any) -> list[Any]:
    """Return `loop` and all loops inside it."""
    found = [loop]
    for inner in vars(loop).values():
        if hasattr(inner, "_restarting"):
            found += _loops(inner)
    return found


def _numbers(counter: Any) -> dict[str, Any]:
    """Return a counter's fields: the same as its state_dict(), which takes much longer."""
    return {key: value if isinstance(value, int) else _numbers(value) for key, value in vars(counter).items()}


def _completed(batches: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: dict.fromkeys(_TRACKERS, value["processed"]) if isinstance(value, Mapping) else value
        for key, value in batches.items()
    }


def _begun(batches: Mapping[str, Any]) -> dict[str, Any]:
    total = batches["total"]["completed"]
    return {
        **batches,
        "total": {"ready": total + 1, "started": total + 1, "processed": total, "completed": total},
        "current": {"ready": 1, "started": 1, "processed": 0, "completed": 0},
    }
