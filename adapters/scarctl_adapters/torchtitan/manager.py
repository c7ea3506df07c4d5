"""Save a run of torchtitan during training, and resume it: torchtitan's own checkpoint manager with a session.

    config.checkpoint = ScarCheckpointManager.Config(store="scarctl")

torchtitan builds the manager that its configuration names, and calls it:

    load                attach and resume; only an empty store is filled as torchtitan does it
    save                after every step: the step is over
    close               close the session

The session hooks into the beginnings of the optimizers' steps. torchtitan's own checkpoints stay as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

import scarctl
from scarctl.config import Mode
from scarctl.errors import UsageError
from scarctl.session.resumed import Resumed

try:
    import tyro
    from torchtitan.components.checkpointer import (
        DATALOADER,
        LR_SCHEDULER,
        MODEL,
        OPTIMIZER,
        TRAIN_STATE,
        CheckpointManager,
    )
    from torchtitan.tools.filesystem import is_remote
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"scarctl_adapters.torchtitan needs {error.name}: see docs/torchtitan.md", name=error.name
    ) from error

from scarctl_adapters.options import check_options, with_extras
from scarctl_adapters.torchtitan.position import DataPosition

log = logging.getLogger("scarctl")

_GIVEN = frozenset(("model", "optimizer", "store", "schedulers", "scaler", "hooks", "member"))
"""Arguments of `scarctl.attach` that come from torchtitan."""


class ScarCheckpointManager(CheckpointManager):  # type: ignore[misc]  # torchtitan is not installed for mypy
    """Saves a run of torchtitan during training. The same command again continues it.

    session: the `scarctl.Session` from `load` to `close`, otherwise None. resumed: the state from which it resumed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """Settings of torchtitan's manager, which are about its own checkpoints, and those of scarctl.

        Raises UsageError for unknown options, and for `load_only`.
        """

        enable: bool = True
        """Whether to save and to resume."""

        store: str = "scarctl"
        """Folder of scarctl's store, relative to the dump folder; or an address such as s3://bucket/folder."""

        mode: Mode = "auto"
        """State to resume from: see `Session.resume`."""

        snapshot: str | None = None
        """Snapshot to resume from, and no other state."""

        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Options of `scarctl.attach` (fraction, interval, settings, ...), except those that come from torchtitan.

        Those that are not given here come from the environment, scarctl.toml and their defaults, as everywhere.
        """

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.mode not in get_args(Mode):
                raise UsageError(f"mode is {self.mode!r}", hint=f"use one of {', '.join(get_args(Mode))}")
            if self.load_only:
                raise UsageError(
                    "a run with load_only saves nothing", hint="use torchtitan's CheckpointManager for it"
                )
            names = (TRAIN_STATE, DATALOADER)
            check_options(self.options, given=_GIVEN, owner="torchtitan", names=names)

    def __init__(self, config: Config, *, base_folder: str = "", **components: Any) -> None:
        """Take what torchtitan gives its manager. Raises UsageError for a run that cannot be saved (pipelines)."""
        self.session: scarctl.Session | None = None
        self.resumed: Resumed | None = None
        if config.enable:
            _check_whole(components["model_parts"], components["states"].get(TRAIN_STATE))
        super().__init__(config, base_folder=base_folder, **components)
        self._resume = config.mode, config.snapshot
        self._options = config.options
        self._store = config.store if is_remote(config.store) else os.path.join(base_folder, config.store)
        loader = components["dataloader"]
        self._position = None if loader is None else DataPosition(loader)

    def __del__(self) -> None:
        # A close is collective and takes time. A session that was not closed ends with its process.
        self.session = None
        super().__del__()

    def _attach(self) -> scarctl.Session:
        (model,) = self.states[MODEL].model
        own = {name: item for name, item in self.states.items() if name not in _ATTACHED}
        if self._position is not None:
            own[DATALOADER] = scarctl.Extra(self._position, per_rank=True)
        return scarctl.attach(
            model,
            [*self.states[OPTIMIZER], self.states[OPTIMIZER]],  # whose step contains theirs
            store=self._store,
            schedulers=list(self.states[LR_SCHEDULER]),
            hooks="begin",
            **with_extras(self._options, own),
        )

    def _load(self, step: int = -1) -> bool:
        """Resume from the store. An empty one leaves the beginning of the run to torchtitan's settings."""
        self.session = self._attach()
        self.resumed = self.session.resume(*self._resume)
        if self.resumed.new:
            loaded: bool = super()._load(step)
            return loaded
        if step != -1:
            raise UsageError(
                f"checkpoint.load_step is {step}, but {self._store} has a run to continue",
                hint="leave load_step out, or give checkpoint.store another folder",
            )
        self._compare()
        return True

    def _compare(self) -> None:
        """Warn if torchtitan has a newer checkpoint than the store."""
        if TRAIN_STATE not in self.states:
            return
        step, newest = self.states[TRAIN_STATE].state_dict()["step"], self._find_load_step()
        if newest > step:
            log.warning(
                "continuing after step %d from %s, although %s has step %d: give checkpoint.store another folder "
                "to begin with that one",
                step,
                self._store,
                self.folder,
                newest,
            )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """End the iteration, and write torchtitan's own checkpoint if it is due. Return whether that was written."""
        if self.session is not None:
            self.session.step()
        elif curr_step:
            raise UsageError(
                f"step {curr_step} would not be saved: nothing is attached",
                hint="call load() before the first step, as torchtitan's Trainer does",
            )
        written: bool = super()._save(curr_step, last_step)
        return written

    def _close(self) -> None:
        session, self.session = self.session, None
        try:
            if session is not None:
                session.close()  # during an exception it flushes instead
        finally:
            super()._close()


_ATTACHED = (MODEL, OPTIMIZER, LR_SCHEDULER, DATALOADER)
"""States that are not extras."""


def _check_whole(model_parts: list[Any], trainer: Any) -> None:
    """Raise UsageError for pipelines: each of their ranks has other parts of the model."""
    dims: Mapping[str, Any] | Any = getattr(trainer, "parallel_dims", None)
    if len(model_parts) != 1 or getattr(dims, "pp_enabled", False):
        raise UsageError(
            "a model that is divided into stages (pipeline_parallel_degree) cannot be saved",
            hint="use data, tensor and expert parallelism alone",
        )
