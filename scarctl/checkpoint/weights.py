"""Notice that parameters were replaced between two steps, also by writes that torch does not count.

Loops swap an average of the weights in for an evaluation, often through `.data`. A signal that comes then must not save
the average as the state of the step without saying so.
"""

from __future__ import annotations

import torch

from scarctl.checkpoint.live_state import LiveState


class Weights:
    """One value each of a few parameters: the first, the last and the largest."""

    def __init__(self) -> None:
        self._of: LiveState | None = None
        self._places: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        self._noted: list[torch.Tensor] | None = None

    def follow(self, live: LiveState) -> None:
        """Sample the parameters of `live` from the next `note` on."""
        if self._of is live:
            return
        self._of, self._noted = live, None
        # A sharded tensor's values are read by all ranks together.
        parameters = [
            tensors[0]
            for group, tensors in zip(live.layout.groups, live.tensors, strict=True)
            if group.kind == "parameter" and tensors[0].numel() and type(tensors[0]) in _PLAIN
        ]
        if not parameters:
            self._places = []
            return
        largest = max(parameters, key=torch.Tensor.numel)
        chosen = (parameters[0], parameters[-1], largest)
        unique = {id(tensor): tensor for tensor in chosen}.values()
        self._places = [(tensor, tuple(size // 2 for size in tensor.shape)) for tensor in unique]

    def note(self) -> None:
        """Keep the current values as those of the newest step."""
        self._noted = self._read()

    def replaced(self) -> bool:
        """Return whether a value differs from the one that was noted."""
        if self._noted is None:
            return False
        return not all(map(torch.equal, self._noted, self._read()))

    def _read(self) -> list[torch.Tensor]:
        return [tensor.data[place].clone() for tensor, place in self._places]


_PLAIN = (torch.Tensor, torch.nn.Parameter)
