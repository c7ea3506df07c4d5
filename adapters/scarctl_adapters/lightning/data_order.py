"""Save the random states that determine an epoch's data order, and advance a new process to the same batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from scarctl.checkpoint.randomness import capture_rng, generators_of, restore_rng
from scarctl.errors import UsageError
from scarctl.state.torch_dtypes import plain
from scarctl_adapters.lightning.position import FitPosition


class DataOrder:
    """The order of an epoch's data, as extras of each rank.

    A loader draws its order from random numbers when its iterator is made, or when the first batch is requested. Both
    states are saved. A new process draws again and skips the used batches. If all loaders have a state_dict, it
    restores their states instead, and skips nothing.
    """

    def __init__(self, trainer: Any, position: FitPosition) -> None:
        self._trainer = trainer
        self._position = position
        self._made: Any = None
        self._begun: Any = None
        self.loaded: dict[str, Any] | None = None

    def iterator_made(self, random: Any = None) -> None:
        """Note the random states before the iterator over the training data is made (default: current ones)."""
        self._made = random or self.random_now()

    def epoch_begun(self) -> None:
        """Note the random states before an epoch's first batch is requested."""
        self._begun = self.random_now()

    def state_dict(self) -> dict[str, Any]:
        """Return both random states, the loaders' own states if any, and the batch of those states."""
        return {
            "made": self._made,
            "begun": self._begun,
            "loaders": self._loader_states(),
            "batches": self._trainer.fit_loop.epoch_loop.batch_progress.current.ready,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep `state` for `advance`. In a running fit the data order stays as it is."""
        if self._position.running:
            return
        self.loaded = dict(state)
        self._made, self._begun = plain(state["made"]), plain(state["begun"])

    def advance(self, fetcher: Any) -> None:
        """Advance `fetcher` to the next batch of the restored position. Raises UsageError if the data end earlier."""
        loaded, batches = self.loaded, self._position.batches
        if loaded is None or loaded["made"] is None:
            # A new rank has no saved state.
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
                # Starting persistent workers draws one more number.
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
        """Return the loaders' states; [] unless every loader has one for training's current batch."""
        loaders = self._loaders()
        stateful = all(hasattr(x, "state_dict") and hasattr(x, "load_state_dict") for x in loaders)
        fetcher = self._trainer.fit_loop._data_fetcher
        # Lightning reads one batch ahead if the length of the data is unknown.
        if not stateful or fetcher is None or fetcher.length is None:
            return []
        return [loader.state_dict() for loader in loaders]

    def random_now(self) -> Any:
        """Return the random states that loaders on this host draw from, as plain values."""
        own = [generator.get_state() for generator in self._generators()]
        new = all(getattr(loader, "_iterator", None) is None for loader in self._loaders())
        return plain({"rng": capture_rng(), "own": own, "new": new})

    def _restore(self, state: Mapping[str, Any]) -> None:
        restore_rng(state["rng"])
        for generator, own in zip(self._generators(), state["own"], strict=False):
            generator.set_state(own)

    def _generators(self) -> list[torch.Generator]:
        """Return the loaders' and samplers' generators other than the global one, each once."""
        found = {id(g): g for loader in self._loaders() for g in generators_of(loader)}
        return list(found.values())
