"""Save the position of a torchtitan loader in its data as plain values."""

from __future__ import annotations

import logging
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from scarctl.errors import UsageError
from scarctl.util.ranks import world_size
from scarctl.util.text import counted

log = logging.getLogger("scarctl")


class DataPosition:
    """The position of one rank's loader: an extra with `per_rank`.

    `ParallelAwareDataloader.state_dict` pickles the state of the loader below it, which is plain. That one is saved.
    """

    def __init__(self, loader: Any) -> None:
        """loader: torchtitan's, of any class."""
        self._loader = loader
        # If both are as before, each rank has its part again: parts go to ranks by their numbers.
        self._parts, self._ranks = getattr(loader, "dp_world_size", 1), world_size()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader that is read, or else the state with which reading will begin."""
        loader: Any = self._loader
        if not isinstance(loader, StatefulDataLoader):
            state = loader.state_dict()
        elif loader._iterator is None:
            state = loader.next_iter_state or {}
        else:
            state = StatefulDataLoader.state_dict(loader)
        return {"parts": self._parts, "ranks": self._ranks, "data": self._data(), "state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration over the loader begin at this position, if the data is divided as it was.

        Raises UsageError while the loader is read: the trainer keeps its iterator, which would not follow.
        """
        data = self._data()
        other = sorted(
            name for name in state["data"].keys() | data if state["data"].get(name) != data.get(name)
        )
        misfit = "; ".join(f"{name} differs from the run's: the next batches differ" for name in other)
        if (state["parts"], state["ranks"]) != (self._parts, self._ranks):
            misfit = (
                f"the data had {counted(state['parts'], 'part')} on {counted(state['ranks'], 'rank')}, and now has "
                f"{counted(self._parts, 'part')} on {counted(self._ranks, 'rank')}: every rank reads its part from the "
                "beginning, because torchtitan's loaders cannot divide positions"
            )
        elif not isinstance(self._loader, StatefulDataLoader):
            self._loader.load_state_dict(state["state"])
        elif self._loader._iterator is not None:
            raise UsageError(
                "the position of a loader cannot change while torchtitan reads from it",
                hint="start the training again: it continues from the store",
            )
        elif not state["state"]:
            misfit = "a rank's position in the data was not saved: it reads its part from the beginning"
        else:
            StatefulDataLoader.load_state_dict(self._loader, state["state"])
        if misfit:
            log.warning("%s", misfit)

    def _data(self) -> dict[str, Any]:
        """Return the settings of a loader and its dataset that determine the batches."""
        dataset = getattr(self._loader, "dataset", None)
        found = {
            "batch_size": getattr(self._loader, "batch_size", None),
            **{name: getattr(dataset, name, None) for name in ("dataset_name", "seq_len", "infinite")},
        }
        return {name: value for name, value in found.items() if isinstance(value, int | str)}
