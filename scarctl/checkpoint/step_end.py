"""Keep what the next batch overwrites, at the end of a step: extras, random numbers, data position and buffers.

A checkpoint that starts later, because a signal has arrived, needs these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scarctl.adapter import Adapter
from scarctl.checkpoint.randomness import Raw
from scarctl.checkpoint.streams import Marks, Streams
from scarctl.errors import UsageError
from scarctl.state.extras import Extras
from scarctl.state.identity import Identities, Lockstep
from scarctl.state.torch_dtypes import plain
from scarctl.state.version import MAX_STEP

# Batch norm's kernels write to running statistics without counting the write in `_version`. Those are small; larger
# buffers (masks, tables) are seldom written, and always counted.
_UNCOUNTED_BYTES = 1 << 20


@dataclass(slots=True)
class Moment:
    """The end of a step."""

    step: int
    state: Any
    """The adapter's extras. None: they are read at the beginning of the next step."""
    rng: Raw | None
    """Random numbers of this moment, if `state` is read later."""
    buffers: Mapping[str, torch.Tensor]
    """Private copies of buffers, by name. They are valid until the next moment is taken."""
    marks: Marks
    """Events that mark this moment on each GPU."""
    streams: Streams
    """Streams for work alongside training."""
    identities: Identities
    """Source of the state's name."""
    position: Mapping[str, Any] | None = None
    """Position of the loop at this moment, if it reports one. See `scarctl.session.loop`."""
    declared: bool = False
    """The loop has declared the end of the step: the position in the data is known."""

    def read(self, adapter: Adapter) -> Any:
        """Return the extras of this moment, which can be stored. Call it before the next step changes anything."""
        if self.state is None:
            found = dict(adapter.capture())
            self.state = found if self.rng is None else {**found, "rng": self.rng}
        return plain(self.state)


def captured(adapter: Adapter) -> Extras:
    """Return the adapter's current extras: a private copy, which can be stored."""
    return Extras(plain(adapter.capture()))


class Moments:
    """Takes moments, and keeps the memory for the copies."""

    def __init__(self, adapter: Adapter, streams: Streams, lockstep: Lockstep) -> None:
        self.identities = Identities(lockstep)
        """Names for the states of these moments."""
        self._adapter = adapter
        self._streams = streams
        self._copies: dict[str, torch.Tensor] = {}
        self._copied: dict[str, tuple[torch.Tensor, int]] = {}

    def take(self, step: int, *, read: bool) -> Moment:
        """Keep the current state, after `step`. read: with the extras; otherwise only random numbers and buffers."""
        state = self._adapter.capture() if read else None
        self.identities.stepped(step)
        buffers = self._adapter.buffers()
        if buffers or self._copies:
            self._copy(buffers)
        rng, marks = None if read else Raw(), self._streams.mark() if self._streams.known else {}
        return Moment(step, state, rng, dict(self._copies), marks, self._streams, self.identities)

    @torch.no_grad()
    def _copy(self, buffers: Mapping[str, torch.Tensor]) -> None:
        targets, sources = [], []
        for name, buffer in buffers.items():
            copy = self._copies.get(name)
            if copy is None or not _alike(copy, buffer):
                self._copies[name] = buffer.detach().clone()
            elif buffer.nbytes <= _UNCOUNTED_BYTES or self._changed(name, buffer):
                targets.append(copy)
                sources.append(buffer.detach())
            self._copied[name] = buffer, buffer._version
        if targets:
            torch._foreach_copy_(targets, sources)

    def _changed(self, name: str, buffer: torch.Tensor) -> bool:
        source, version = self._copied.get(name, (None, 0))
        return source is not buffer or version != buffer._version


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def check_step(step: int, head: int) -> None:
    """Raise UsageError unless `step` can be the number of an iteration that comes after iteration `head`."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise UsageError(f"step is {step!r}, not a whole number from 0 to {MAX_STEP}")
    if step <= head:
        raise UsageError(
            f"step {step} does not come after step {head}",
            hint='steps only increase; to restore an earlier state, use session.recover("all", mode="rollback")',
        )
