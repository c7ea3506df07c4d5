"""Keep the state that the next batch overwrites, at the end of a step: random numbers, data position and buffers.

A checkpoint that starts later, because a signal has arrived, needs these values.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scarctl.adapter import Adapter
from scarctl.checkpoint.streams import Marks, Streams
from scarctl.checkpoint.weights import Weights
from scarctl.errors import UsageError
from scarctl.state.extras import Extras
from scarctl.state.identity import Identities, Lockstep
from scarctl.state.torch_dtypes import plain, private
from scarctl.state.version import MAX_STEP

log = logging.getLogger("scarctl")

# Batch norm's kernels write to running statistics without counting the write in `_version`. Those are small; larger
# buffers (masks, tables) are seldom written, and always counted.
_UNCOUNTED_BYTES = 1 << 20


@dataclass(slots=True)
class Moment:
    """The end of a step."""

    step: int
    early: Any
    """Extras that the next batch changes, `private`. None: they will be read when the loop has settled."""
    buffers: Mapping[str, torch.Tensor]
    """Private copies of buffers, by name. They are valid until the next moment is taken."""
    marks: Marks
    """Events that mark this moment on each GPU."""
    streams: Streams
    """Streams for work alongside training."""
    identities: Identities
    """Source of the state's name."""
    weights: Weights
    """Notices that parameters are no longer those of the step."""
    settled: bool = True
    """The loop had settled at this moment."""
    position: Mapping[str, Any] | None = None
    """Position of the loop at this moment, if it reports one. See `scarctl.session.loop`."""
    light: Any = None
    """The part of the late extras that the loop changes after a step, read at this moment. See `KnowsLoop`."""
    late: Any = None
    """All late extras, read at this moment."""
    begun: Marks | None = None
    """Events that mark the beginning of the next forward pass on each GPU; None before it begins with gradients."""

    def alongside(self) -> contextlib.AbstractContextManager[None]:
        """Read on a GPU what does not change from the beginning of the next forward pass to the next step.

        It waits for what training had queued before that pass, and not for the pass itself.
        """
        return self.streams.alongside(self.begun or {})


def captured(adapter: Adapter) -> Extras:
    """Return the adapter's current extras: a private copy, which can be stored."""
    return Extras(plain(adapter.capture_early()), plain(adapter.capture_late()))


class Moments:
    """Takes moments, and keeps the memory for the copies."""

    def __init__(self, adapter: Adapter, streams: Streams, lockstep: Lockstep) -> None:
        self.identities = Identities(lockstep)
        """Names for the states of these moments."""
        self.weights = Weights(adapter)
        self._adapter = adapter
        self._streams = streams
        self._copies: dict[str, torch.Tensor] = {}
        self._copied: dict[str, tuple[torch.Tensor, int]] = {}

    def take(self, step: int, *, early: bool = True) -> Moment:
        """Keep the current state, right after `step`. early: with the extras that the next batch changes."""
        self.identities.stepped(step)
        buffers = self._adapter.buffers()
        if buffers or self._copies:
            self._copy(buffers)
        kept, marks = private(self._adapter.capture_early()) if early else None, self._streams.mark()
        self.weights.note(ended=True)
        return Moment(step, kept, dict(self._copies), marks, self._streams, self.identities, self.weights)

    def renew(self, moment: Moment, *, closely: bool = False) -> bool:
        """Copy the buffers again if the loop has changed one since. Return whether it has.

        moment: the newest one. closely: compare values, because not every write is counted by torch.
        """
        differs = self._differs if closely else self._changed
        buffers = self._adapter.buffers()
        changed = any(differs(name, buffer) for name, buffer in buffers.items())
        if changed:
            self._copy(buffers)
            moment.buffers, moment.marks = dict(self._copies), self._streams.mark()
        return changed

    def report(self, moment: Moment) -> None:
        """Log a warning if forward passes have changed buffers since `moment`, which is saved without these changes."""
        if any(self._differs(name, buffer) for name, buffer in self._adapter.buffers().items()):
            log.warning(
                "step %d is saved as it ended: what a forward pass with gradients has changed in buffers since is left "
                "out. To save statistics that were measured anew, measure them within torch.no_grad()",
                moment.step,
            )

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

    def _differs(self, name: str, buffer: torch.Tensor) -> bool:
        copy = self._copies.get(name)
        return copy is None or not (_alike(copy, buffer) and torch.equal(copy, buffer))

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
