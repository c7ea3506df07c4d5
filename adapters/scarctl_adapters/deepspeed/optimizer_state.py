"""Save what an engine and its optimizer keep outside of slots: settings, counts, loss scale, schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from scarctl.errors import UsageError
from scarctl.state.layout import Layout
from scarctl.state.torch_dtypes import name_of, torch_of
from scarctl.stateful import check_stateful, restore_state, state_of
from scarctl_adapters.deepspeed.partitions import Fragment, Partitions
from scarctl_adapters.torch.optimizer_state import is_savable, update_group
from scarctl_adapters.torch.packing import LEAVES
from scarctl_adapters.torch.settings import savable
from scarctl_adapters.torch.slots import is_slot

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALES = ("custom_loss_scaler", "external_loss_scale")


class FlatState:
    """The state that the inner optimizer keeps for the flat master weights.

    Slots have their shape. Everything else is one value for a param_group, such as a count of steps: so it fits any
    number of ranks and sub-groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, partitions: Partitions) -> None:
        """Raises UsageError for a setting that extras cannot hold."""
        self.optimizer = optimizer
        self._partitions = partitions
        for group in optimizer.param_groups:
            for key, value in group.items():
                if key != "params" and not is_savable(value):
                    raise UsageError(
                        f"param_groups of {self._name} have {key!r}, a {type(value).__qualname__}, which cannot be "
                        "saved"
                    )

    @property
    def _name(self) -> str:
        return type(self.optimizer).__name__

    def slots(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the optimizer's slots of one flat tensor, each of its shape; {} before the first step."""
        return {key: value for key, value in self._held(flat).items() if is_slot(key, value, flat)}

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of all param_groups."""
        return [savable(group) for group in self.optimizer.param_groups]

    def capture(self) -> dict[str, Any]:
        """Return settings, other state and kinds of slots by param_group. Raises UsageError for other state."""
        groups = self.optimizer.param_groups
        other: list[dict[str, Any] | None] = [None] * len(groups)
        slots: list[dict[str, str]] = [{} for _ in groups]
        for number, flat in enumerate(self._partitions.flats):
            at = self._partitions.param_group_of(number)
            kinds = self.slots(flat)
            slots[at] = {key: name_of(slot.dtype, key) for key, slot in kinds.items()}
            found = {
                key: self._plain(key, value) for key, value in self._held(flat).items() if key not in kinds
            }
            if other[at] is None:
                other[at] = found
            elif other[at] != found:
                raise UsageError(
                    f"{self._name} keeps other values for one part of param_group {at} than for another",
                    hint="use an optimizer that keeps one count of steps, such as AdamW",
                )
        return {"param_groups": self.settings(), "other": [found or {} for found in other], "slots": slots}

    def _held(self, flat: torch.Tensor) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.optimizer.state.get(flat, {})
        return found

    def _plain(self, key: str, value: Any) -> Any:
        if type(value) in LEAVES or (isinstance(value, torch.Tensor) and not value.dim()):
            return value.detach().clone().cpu() if isinstance(value, torch.Tensor) else value
        raise UsageError(
            f"{self._name} keeps {key!r}, which is neither a number for each element nor one for all",
            hint="use an optimizer that treats elements alike, such as AdamW: ZeRO gives each rank a run of elements",
        )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of `capture`. Raises UsageError when it does not fit."""
        groups = self.optimizer.param_groups
        if len(saved["param_groups"]) != len(groups):
            raise UsageError(
                f"{self._name} has {len(groups)} param_groups, the store has {len(saved['param_groups'])}"
            )
        for group, values in zip(groups, saved["param_groups"], strict=True):
            update_group(group, values)
        for number, flat in enumerate(self._partitions.flats):
            at = self._partitions.param_group_of(number)
            for key, kind in saved["slots"][at].items():
                # A run that is all padding has no group, and no saved values: they are zero, and stay so.
                if key not in self._held(flat):
                    self.optimizer.state[flat][key] = torch.zeros_like(flat, dtype=torch_of(kind))
            moves = groups[at].get("capturable") or groups[at].get("fused")
            for key, value in saved["other"][at].items():
                if isinstance(value, torch.Tensor):
                    value = value.clone().to(flat.device) if moves or key != "step" else value.clone()
                self.optimizer.state[flat][key] = value

    def create_slots(self, layout: Layout, names: Mapping[str, Fragment]) -> Callable[[], None]:
        """Make every missing slot of `layout`, and return the function that removes them. names: by group."""
        flats, state = self._partitions.flats, self.optimizer.state
        created: list[tuple[torch.Tensor, str]] = []
        for group in layout.groups:
            run = names.get(group.name)
            for spec in group.tensors[1:] if run is not None else ():
                assert run is not None
                flat = flats[run.flat]
                if spec.slot not in self._held(flat):
                    state[flat][spec.slot] = torch.zeros_like(flat, dtype=torch_of(spec.dtype))
                    created.append((flat, spec.slot))

        def remove() -> None:
            for flat, slot in created:
                state[flat].pop(slot, None)
                if not state[flat]:
                    del state[flat]

        return remove


class EngineState:
    """An engine's counters, loss scale and schedule, which change at the end of its own steps."""

    def __init__(self, engine: Any) -> None:
        """Raises UsageError for a schedule without state."""
        self._engine = engine
        if engine.lr_scheduler is not None:
            check_stateful("the engine's lr_scheduler", engine.lr_scheduler)

    def capture(self) -> dict[str, Any]:
        """Return the state as plain values."""
        engine, zero = self._engine, self._engine.optimizer
        schedule = None if engine.lr_scheduler is None else state_of(engine.lr_scheduler)
        return {
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            "accumulation": engine.gradient_accumulation_steps(),
            "scales": {name: getattr(zero, name) for name in _SCALES},
            "scaler": _numbers(vars(zero.loss_scaler)),
            "schedule": schedule,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of `capture`. Raises UsageError when one of the two runs has no schedule."""
        engine, zero = self._engine, self._engine.optimizer
        if (saved["schedule"] is None) != (engine.lr_scheduler is None):
            which = "no" if saved["schedule"] is None else "an"
            raise UsageError(
                f"the engine of the run to resume had {which} lr_scheduler",
                hint="give deepspeed.initialize the same configuration as before",
            )
        for owner, values in ((engine, saved["counters"]), (zero, saved["scales"])):
            for name, value in values.items():
                setattr(owner, name, value)
        # A window of micro-batches begins where this is a multiple of their number, which may be another one.
        windows = saved["counters"]["micro_steps"] // saved["accumulation"]
        if engine.gradient_accumulation_steps() != saved["accumulation"]:
            engine.micro_steps = windows * engine.gradient_accumulation_steps()
        known = vars(zero.loss_scaler)
        known.update({name: value for name, value in saved["scaler"].items() if name in known})
        if engine.lr_scheduler is not None:
            restore_state(engine.lr_scheduler, saved["schedule"])


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if type(value) in LEAVES}
