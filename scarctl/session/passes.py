"""Read a loader once, from its beginning or from where a stopped run left it, and describe that position."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from scarctl.checkpoint.randomness import Raw, generators_of, raw, restore_rng
from scarctl.errors import UsageError
from scarctl.session.generators import Hidden
from scarctl.state.caveats import Caveats

Rng = Raw | Mapping[str, Any]
"""States of the random generators, as read here or as saved."""

_LOOKAHEAD = 2
"""Used batches that are loaded again, because loaders may read ahead."""
END: Any = object()
_NOTHING_LEFT: dict[str, Any] = {"iteration_now": None, "own_now": [], "hidden_now": []}
"""What `Pass.left` returns for a loader without attributes, such as a list."""


class Pass:
    """One pass over a loader within an epoch."""

    def __init__(self, loader: Any, rank: int, workers: dict[int, Rng]) -> None:
        self._loader = loader
        self._rank = rank
        self._workers = workers
        self.count = 0
        """Batches handed out."""
        self.done = False
        self.abandoned = False
        """Whether the loop has left it before its end."""
        self.others = False
        """Whether the loader's hidden generators differed in number from the saved ones, so that none was restored."""
        self._own = generators_of(loader)
        self._hidden = Hidden(loader)
        self._hidden_begun: list[Any] = []
        self._hidden_before: list[Any] = []
        """States before the newest batch was requested."""
        self._begun: Rng = {}
        """Random numbers before the iterator was made."""
        self._before: Rng | None = None
        """Random numbers before the newest batch was requested."""
        self._own_begun: list[torch.Tensor] = []
        self._iteration = getattr(loader, "iteration", None)
        """Accelerate's loaders count their passes, and shuffle by that number."""
        self._stays = bool(getattr(loader, "persistent_workers", False) and loader.num_workers)
        self._first = self._stays and id(loader) not in workers

    def begin(self, caveats: Caveats) -> Iterator[Any]:
        """Begin the pass. caveats: receive why its data cannot be repeated."""
        self._begun = raw()
        self._own_begun = [generator.get_state() for generator in self._own]
        self._hidden_begun = self._hidden.states()
        if self._first:
            self._workers[id(self._loader)] = self._begun
        elif self._stays:
            caveats.say(
                "persistent-workers",
                "a DataLoader's workers stay over epochs (persistent_workers=True), and their random numbers are not "
                "saved, so that they differ after a resume. Omit persistent_workers",
            )
        if not getattr(self._loader, "in_order", True) and self._loader.num_workers:
            caveats.say(
                "order-of-workers",
                "a DataLoader yields batches as its workers finish them (in_order=False), so that a resume may skip "
                "batches that were not used. Omit in_order",
            )
        return iter(self._loader)

    def begin_again(self, saved: Mapping[str, Any], *, same_rank: bool) -> Iterator[Any]:
        """Repeat the pass that a stopped run had begun, without its used batches.

        Raises UsageError if the data end before the saved position.
        """
        if saved["done"]:
            self.others = not leave(self._loader, saved)
            self.done, self.count = True, saved["count"]
            return iter(())
        _set_iteration(self._loader, saved["iteration"])
        self._iteration = saved["iteration"]
        if not same_rank:
            saved = {**saved, "begun": raw(), "before": None, "workers": None, "own_begun": []}
        self._begun, self._before = saved["begun"], saved["before"]
        self._own_begun = list(saved["own_begun"])
        self._hidden_begun, self._hidden_before = saved["hidden_begun"], saved["hidden_before"]
        count = saved["count"]
        skip = max(0, count - _LOOKAHEAD) if _is_indexed(self._loader) else 0
        if self._stays and saved["workers"] is not None:
            self._workers[id(self._loader)] = saved["workers"]
            self._first = torch.equal(saved["workers"]["torch"], saved["begun"]["torch"])
            if not self._first:
                # Persistent workers start with the first pass, which draws one more number.
                restore_rng(saved["workers"])
                iter(self._loader)
        restore_rng(self._begun)
        _set(self._own, self._own_begun)
        if same_rank:
            self._restore_hidden(self._hidden_begun)
        with _without_first(self._loader, skip):
            iterator: Iterator[Any] = iter(self._loader)
            for number in range(skip, count):
                if number == count - 1 and self._before is not None:
                    restore_rng(self._before)
                    # A dataset may have made its generator for the batch before.
                    self._restore_hidden(self._hidden_before)
                if next(iterator, END) is END:
                    raise UsageError(
                        f"the data ends before batch {count} of the epoch, up to which the run had trained",
                        hint="use the data and batch size of the run to resume, or a new store",
                    )
        self.count = count
        if same_rank:
            _set(self._own, saved["own_now"])
            self._restore_hidden(saved["hidden_now"])
        return iterator

    def _restore_hidden(self, states: list[Any]) -> None:
        if not self._hidden.restore(states):
            self.others = True

    def fetch(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch, or `END`, and keep the random numbers from before."""
        self._before = raw()
        if self._hidden.owners:
            self._hidden_before = self._hidden.states()
        batch = next(iterator, END)
        if batch is END:
            self.done = True
        else:
            self.count += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Return the position in this pass."""
        found = {
            "count": self.count,
            "done": self.done,
            "rank": self._rank,
            "iteration": self._iteration,
            **(self.left() if self._hidden.owners or self._own else _NOTHING_LEFT),
        }
        if not self.done:
            found |= {
                "begun": self._begun,
                "before": self._before,
                "own_begun": self._own_begun,
                "workers": self._workers.get(id(self._loader)) if self._stays else None,
                "hidden_begun": self._hidden_begun,
                "hidden_before": self._hidden_before,
            }
        return found

    def left(self) -> dict[str, Any]:
        """Return the loader's current state; see `leave`."""
        return {
            "iteration_now": getattr(self._loader, "iteration", None),
            "own_now": [generator.get_state() for generator in self._own] if self._own else [],
            "hidden_now": self._hidden.states(),
        }


def leave(loader: Any, state: Mapping[str, Any]) -> bool:
    """Set a loader to the state that `Pass.left` returned. Return whether it has as many hidden generators as then."""
    _set_iteration(loader, state["iteration_now"])
    _set(generators_of(loader), state["own_now"])
    return Hidden(loader).restore(state["hidden_now"])


def _set_iteration(loader: Any, iteration: int | None) -> None:
    if iteration is not None and hasattr(loader, "iteration"):
        loader.set_epoch(iteration)


def _set(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    if len(generators) == len(states):
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _is_indexed(loader: Any) -> bool:
    """Return whether batches can be skipped without loading them, and without changing later ones."""
    inner = getattr(loader, "base_dataloader", loader)
    return (
        type(inner) is DataLoader
        and not isinstance(inner.dataset, IterableDataset)
        and inner.num_workers == 0
        and not hasattr(inner, "state_dict")
    )


@contextlib.contextmanager
def _without_first(loader: Any, skip: int) -> Iterator[None]:
    """Have an iterator over `loader`, made and first read inside, begin after `skip` batches."""
    if not skip:
        yield
        return
    inner = getattr(loader, "base_dataloader", loader)
    name = "batch_sampler" if inner.batch_sampler is not None else "sampler"
    sampler = getattr(inner, name)
    # A loader refuses other samplers than its first, but reads it for each iterator.
    object.__setattr__(inner, name, _Rest(sampler, skip))
    try:
        yield
    finally:
        object.__setattr__(inner, name, sampler)


class _Rest:
    """Iterates over a sampler without its first draws."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler = sampler
        self._skip = skip

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        rest = iter(self._sampler)
        for _ in range(self._skip):
            next(rest, None)
        yield from rest
