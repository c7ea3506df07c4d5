"""Find parameters that no optimizer trains and that forward passes change, such as a momentum encoder's (MoCo).

A checkpoint is copied alongside the next forward pass. Buffers are kept from before it, parameters are not: they may be
saved as that pass has left them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from scarctl.checkpoint.streams import is_capturing
from scarctl.state.caveats import Caveats
from scarctl_adapters.torch.packing import is_plain_tensor

_SAMPLES = 64
"""Number of parameters that are compared, one value of each."""


class Following:
    """Compares such parameters before the first forward pass of an iteration and before its step."""

    def __init__(self, model: nn.Module, trained: Iterable[torch.Tensor], caveats: Caveats) -> None:
        known = set(map(id, trained))
        found = [(n, p) for n, p in model.named_parameters() if not (p.requires_grad or id(p) in known)]
        found = [(n, p) for n, p in found if is_plain_tensor(p) and p.numel() and not p.is_complex()]
        step = max(1, len(found) // _SAMPLES)
        # By place: a loop may put another tensor there, as it does for `parameter.data = ...` under some settings.
        self._names = [name for name, _ in found[::step][:_SAMPLES]]
        self._model, self._caveats = model, caveats
        self._before: torch.Tensor | None = None

    @torch.no_grad()
    def _now(self) -> torch.Tensor | None:
        """Return one value of each: float64 of shape (parameters,); None if they are no longer there."""
        there = dict(self._model.named_parameters())
        if not self._names or is_capturing() or not there.keys() >= set(self._names):
            return None
        found = [there[name].detach() for name in self._names]
        return torch.stack([t.reshape(-1)[t.numel() // 2].to("cpu", torch.float64) for t in found])

    def forward_begins(self) -> None:
        """Note the values, unless an earlier forward pass of this iteration did."""
        if self._names and self._before is None:
            self._before = self._now()

    def step_begins(self) -> None:
        """Report parameters that have changed since the forward pass began."""
        before, self._before = self._before, None
        now = None if before is None else self._now()
        if before is None or now is None or before.equal(now):
            return
        name = self._names[int((before != now).nonzero()[0])]
        self._caveats.say(
            "changed-in-forward",
            f"{name!r} and perhaps other parameters that no optimizer trains change within forward passes. A "
            "checkpoint is copied alongside the next forward pass, and may have them as it left them. Change them "
            "right after the optimizer's step, or make them buffers",
        )
