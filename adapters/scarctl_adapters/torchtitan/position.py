"""Save the position of a torchtitan loader in its data as plain values."""

from __future__ import annotations

from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from scarctl.errors import UsageError


class DataPosition:
    """The position of one rank's loader: an extra with `per_rank`.

    `ParallelAwareDataloader.state_dict` pickles the state of the loader below it, which is plain. That one is saved.

    skipped: number of ranks of another division of the data, whose position was not restored; otherwise None.
    """

    def __init__(self, loader: Any) -> None:
        """loader: torchtitan's, of any class."""
        self._loader = loader
        self.ranks = getattr(loader, "dp_world_size", 1)
        self.skipped: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader that is read, or else the state with which reading will begin."""
        loader: Any = self._loader
        if not isinstance(loader, StatefulDataLoader):
            state = loader.state_dict()
        elif loader._iterator is None:
            state = loader.next_iter_state or {}
        else:
            state = StatefulDataLoader.state_dict(loader)
        return {"ranks": self.ranks, "state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration over the loader begin at this position, if the data is divided as it was.

        Raises UsageError while the loader is read: the trainer keeps its iterator, which would not follow.
        """
        if state["ranks"] != self.ranks:
            self.skipped = state["ranks"]
        elif not isinstance(self._loader, StatefulDataLoader):
            self._loader.load_state_dict(state["state"])
        elif self._loader._iterator is not None:
            raise UsageError(
                "the position of a loader cannot change while torchtitan reads from it",
                hint="start the training again: it continues from the store",
            )
        else:
            StatefulDataLoader.load_state_dict(self._loader, state["state"])
