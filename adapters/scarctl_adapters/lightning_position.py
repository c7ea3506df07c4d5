"""Where a Lightning fit is: what is saved of its loops and its data, and how a new process gets there again.

The position that counts is the end of the training batch in which an optimizer stepped: after the learning-rate
schedulers of that batch, before a validation that is due there, before the end of the epoch. A run that is resumed
runs these again, if the dead one did not survive them.

Lightning counts in many small objects, its own restart logic reads them, and it has no hook at the two moments when an
epoch's data is ordered. So this module, and no other, knows names inside Lightning's loops.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from scarctl.dtypes import plain
from scarctl.errors import UsageError
from scarctl.randomness import capture_rng, restore_rng
from scarctl.stateful import capture_host_rng, restore_host_rng
from scarctl_adapters.optimizer_state import update_group

log = logging.getLogger("scarctl")

_BATCHES = "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"
_STEPPED = "_batches_that_stepped"
_TRACKERS = ("ready", "started", "processed", "completed")


class FitPosition:
    """The loops' counters, as extras that are the same on all ranks: has state_dict() and load_state_dict()."""

    def __init__(self, trainer: Any, datamodule: Any = None) -> None:
        """datamodule: one whose state is kept."""
        self._trainer = trainer
        self._datamodule = datamodule
        loop = trainer.fit_loop
        names = [name for name in loop.state_dict() if name.rpartition(".")[2] != "state_dict"]
        self._counters = {name: _reach(loop, name) for name in names}
        self._now = self._capture()
        self._end: dict[str, Any] | None = None
        self.loaded: dict[str, Any] | None = None
        """What a resumed run has to get to."""
        self.running = False
        """Training has begun: a state that is loaded now is that of a rollback within the run."""

    def batch_ended(self) -> None:
        """Take the position: to be called at the end of a training batch in which an optimizer stepped."""
        self._now = self._capture()

    def fit_ended(self) -> None:
        """All of the fit is over, with its epochs' ends and validations."""
        self._end = self._capture()

    @property
    def batches(self) -> int:
        """Batches of the epoch that the position has behind it."""
        return int(self._now["counters"][_BATCHES]["current"]["ready"])

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; "end" is None unless the fit has ended."""
        data = self._datamodule.state_dict() if self._datamodule is not None else {}
        return {**self._now, "end": self._end, "datamodule": data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember where to go; `restore_counters` goes there. In a running fit the loops go on."""
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
        """Set the loops to `loaded`. Returns whether the fit goes on within an epoch, and not between two."""
        assert self.loaded is not None
        self._now = {key: self.loaded[key] for key in ("counters", "stepped")}
        end = self.loaded["end"]
        if end is not None and (self._now["counters"][_BATCHES]["is_last_batch"] or self._is_over(end)):
            self._load(end)
            # Nothing to restart: the next epoch begins as it would have in the process that ended.
            for loop in _loops(self._trainer.fit_loop):
                loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
            # ... but for the sanity check, which is for new runs. Training puts this back by itself.
            self._trainer.fit_loop.epoch_loop.val_loop._restarting = True
            return False
        counters = {**self._now["counters"]}
        # As at the end of the batch; and as if a validation had begun, so that one that is due is run.
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
        """What Lightning's restart has changed in the counters, and what only a restart with a validation needs."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        # Before 2.5.1 an epoch that is restarted is counted as one more.
        self._trainer.fit_loop.epoch_progress.load_state_dict(self._now["counters"]["epoch_progress"])
        # Counted after the validation.
        epoch_loop._batches_that_stepped = self._now["stepped"] + (0 if validation_due else 1)
        if not validation_due:
            epoch_loop.val_loop.batch_progress.load_state_dict(self._now["counters"][_VALIDATION])

    def correct_validation(self) -> None:
        """The validation that was due has begun: from here its counters are what they are without a restart."""
        total = self._now["counters"][_VALIDATION]["total"]
        self._trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.load_state_dict(total)


class DataOrder:
    """In what order an epoch's data comes, as each rank's own extras: has state_dict() and load_state_dict().

    A loader draws its order from random numbers when its iterator is made, or when the first batch is asked for. Both
    states are kept. A new process draws again and skips what has been used; or, if all loaders have a state_dict, puts
    their states back and skips nothing.
    """

    def __init__(self, trainer: Any, position: FitPosition) -> None:
        self._trainer = trainer
        self._position = position
        self._made: Any = None
        self._begun: Any = None
        self.loaded: dict[str, Any] | None = None

    def iterator_made(self, random: Any = None) -> None:
        """An iterator over the training data is about to be made; or was made, when all was as in `random`."""
        self._made = random or self.random_now()

    def epoch_begun(self) -> None:
        """An epoch's first batch is about to be asked for."""
        self._begun = self.random_now()

    def state_dict(self) -> dict[str, Any]:
        """Random states, and the loaders' own if they have some: of after how many batches is said with them."""
        return {
            "made": self._made,
            "begun": self._begun,
            "loaders": self._loader_states(),
            "batches": self._trainer.fit_loop.epoch_loop.batch_progress.current.ready,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what to draw from; `advance` does it. In a running fit the data goes on."""
        if self._position.running:
            return
        self.loaded = dict(state)
        self._made, self._begun = plain(state["made"]), plain(state["begun"])

    def advance(self, fetcher: Any) -> None:
        """Make `fetcher` go on with the next batch of the position that was restored."""
        loaded, batches = self.loaded, self._position.batches
        if loaded is None or loaded["made"] is None:
            # Nothing of this rank is known: it is a new one.
            self.iterator_made()
            self.epoch_begun()
        elif loaded["loaders"] and loaded["batches"] == batches:
            for loader, state in zip(self._loaders(), loaded["loaders"], strict=True):
                loader.load_state_dict(state)
            self._restore(loaded["made"])
            iter(fetcher)
            fetcher.fetched = batches
            fetcher.done = fetcher.length is not None and fetcher.fetched >= fetcher.length
            return
        else:
            if loaded["made"]["new"]:
                # Workers that stay for later epochs draw a number more when they are started.
                fetcher.combined_loader.reset()
            self._restore(loaded["made"])
        iter(fetcher)
        if loaded is not None and loaded["begun"] is not None:
            self._restore(loaded["begun"])
        for _ in range(batches):
            try:
                next(fetcher)
            except StopIteration:
                raise UsageError(
                    f"the training data ends before batch {batches} of the epoch, up to which the run had trained",
                    hint="use the data and batch size of the run to resume, or a new store; nothing was saved",
                ) from None
        if batches:
            fetcher.fetched = batches

    def _loaders(self) -> list[Any]:
        combined = self._trainer.fit_loop._combined_loader
        return list(combined.flattened) if combined is not None else []

    def _loader_states(self) -> list[Any]:
        """[] unless every loader has a state that is of the batch that training is at."""
        loaders = self._loaders()
        stateful = all(hasattr(x, "state_dict") and hasattr(x, "load_state_dict") for x in loaders)
        fetcher = self._trainer.fit_loop._data_fetcher
        # Of data of unknown length one batch is read ahead.
        if not stateful or fetcher is None or fetcher.length is None:
            return []
        return [loader.state_dict() for loader in loaders]

    def random_now(self) -> Any:
        """The random states that loaders on this host draw from."""
        generators = [generator.get_state() for generator in self._generators()]
        new = all(getattr(loader, "_iterator", None) is None for loader in self._loaders())
        return plain(
            {"host": capture_host_rng(), "torch": torch.get_rng_state(), "own": generators, "new": new}
        )

    def _restore(self, state: Mapping[str, Any]) -> None:
        restore_host_rng(state["host"])
        torch.set_rng_state(state["torch"])
        for generator, own in zip(self._generators(), state["own"], strict=False):
            generator.set_state(own)

    def _generators(self) -> list[torch.Generator]:
        """Of loaders and samplers that do not use the global one."""
        found: list[torch.Generator] = []
        for loader in self._loaders():
            sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
            for owner in (loader, sampler, batches, getattr(batches, "sampler", None)):
                generator = getattr(owner, "generator", None)
                if isinstance(generator, torch.Generator) and all(generator is not g for g in found):
                    found.append(generator)
        return found


class Settled:
    """What changes between two steps outside of the batch, as late extras: has state_dict() and load_state_dict().

    Schedulers that wait for a validation's metric and the other callbacks (best checkpoints, patience) change in a
    validation and at an epoch's end. A resumed run repeats those, so what counts is how they were before. So it is with
    a batch in which a gradient scaler skips the step: it changes the scale, and schedules go on.
    """

    def __init__(self, trainer: Any, callbacks: Mapping[str, Any]) -> None:
        """callbacks: those whose state is kept, by state key."""
        self._trainer = trainer
        self._callbacks = callbacks
        self._before: dict[str, Any] | None = None

    def batch_ended(self) -> None:
        """A batch has changed all of it."""
        self._before = None

    def batch_starts(self) -> None:
        """To be called before a batch: with a gradient scaler nobody knows yet whether there will be a step."""
        if self._trainer.precision_plugin.state_dict():
            self.settle()

    def settle(self) -> None:
        """To be called before a validation and before an epoch's end."""
        if self._before is None:
            self._before = self._capture()

    def state_dict(self) -> dict[str, Any]:
        """Of the schedulers, with what they set, the precision plugin (a gradient scaler) and the callbacks."""
        return self._before or self._capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put all of it back. Raises UsageError when there are other schedulers."""
        self._before = None
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
        return plain(  # type: ignore[return-value]
            {
                "schedulers": [
                    config.scheduler.state_dict() for config in self._trainer.lr_scheduler_configs
                ],
                "groups": [
                    {key: value for key, value in group.items() if key != "params"}
                    for optimizer in self._trainer.optimizers
                    for group in optimizer.param_groups
                ],
                "precision": self._trainer.precision_plugin.state_dict(),
                "callbacks": {key: callback.state_dict() for key, callback in self._callbacks.items()},
            }
        )


class Watch:
    """Stands where Lightning makes iterators and begins epochs, from the start of a fit to its end."""

    def __init__(self, trainer: Any, position: FitPosition, order: DataOrder) -> None:
        self._trainer = trainer
        self._position = position
        self._order = order
        self._random: Any = None
        self._inside = False
        self._validates = False
        self._max_steps: int | None = None
        self._quiet = contextlib.ExitStack()
        loop = trainer.fit_loop
        self._undo = [
            _wrap(loop, "_load_combined_loader_states", self._before_iterator),
            _wrap(loop.epoch_loop, "on_run_start", self._epoch_starts),
        ]

    def resume(self) -> None:
        """The state was restored, and with it the random numbers of the position: go there with the next epoch."""
        self._random = capture_rng()
        self._inside = self._position.restore_counters()
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if self._inside and 0 <= epoch_loop.max_steps <= epoch_loop.global_step:
            # The last step was taken, but what comes after it (a validation, the epoch's end) may not have been.
            self._max_steps, epoch_loop.max_steps = epoch_loop.max_steps, epoch_loop.global_step + 1

    def train_starts(self) -> None:
        """The first epoch is about to begin."""
        self._position.running = True
        if self._random is None:
            return
        if self._inside:
            # It warns of data that cannot be resumed, and here it is.
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings(
                "ignore", message=".*resuming from a checkpoint that ended before the epoch"
            )
        else:
            restore_rng(self._random)
            self._random = None

    def validation_starts(self) -> None:
        """A validation is about to read its first batch."""
        if self._validates:
            self._validates = False
            self._position.correct_validation()

    def close(self) -> None:
        """Leave Lightning's loops as they were."""
        self._quiet.close()
        if self._max_steps is not None:
            self._trainer.fit_loop.epoch_loop.max_steps = self._max_steps
        while self._undo:
            self._undo.pop()()

    def _before_iterator(self, original: Callable[..., Any]) -> Any:
        result = original()
        self._order.iterator_made()
        return result

    def _epoch_starts(self, original: Callable[..., Any], fetcher: Any) -> None:
        self._quiet.close()
        fit_loop = self._trainer.fit_loop
        if self._random is not None and self._inside:
            original(fetcher)
            self._go_there(fetcher)
            return
        before, made = _iterator(fit_loop), self._order.random_now()
        original(fetcher)
        if _iterator(fit_loop) is not before:
            self._order.iterator_made(made)
        self._order.epoch_begun()

    def _go_there(self, fetcher: Any) -> None:
        fit_loop = self._trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        self._order.advance(fetcher)
        epoch_loop.batch_progress.is_last_batch = fetcher.done
        self._validates = epoch_loop._should_check_val_fx(fetcher)
        self._position.correct_counters(validation_due=self._validates)
        # The epoch's own end is not a restart: schedulers that wait for it step.
        fit_loop._restarting = False
        if self._max_steps is not None:
            epoch_loop.max_steps, self._max_steps = self._max_steps, None
            if not self._validates:
                # Lightning would train one batch more before it looks.
                fetcher.batches.clear()
                fetcher.done = True
        restore_rng(self._random)
        self._random = None


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Have `around(original, ...)` called in place of a method of this one object. Returns the removal."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: around(original, *args))
    return lambda: delattr(owner, name)


def _iterator(fit_loop: Any) -> Any:
    return getattr(fit_loop._combined_loader, "_iterator", None)


def _reach(loop: Any, name: str) -> Any:
    for part in name.split("."):
        loop = getattr(loop, part)
    return loop


def _loops(loop: Any) -> list[Any]:
    """`loop` and those in it."""
    found = [loop]
    for inner in vars(loop).values():
        if hasattr(inner, "_restarting"):
            found += _loops(inner)
    return found


def _numbers(counter: Any) -> dict[str, Any]:
    """A counter's fields, as its own state_dict() gives them, which takes much longer."""
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
