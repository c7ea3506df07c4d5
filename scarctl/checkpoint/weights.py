"""Notice that parameters were replaced between two steps, also by writes that torch does not count.

Loops swap in an average of the weights for an evaluation, often through `.data`. If a signal arrives then, saving the
average as the step's state needs a caveat.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from scarctl.adapter import Adapter, loop_known
from scarctl.checkpoint.live_state import LiveState


class Weights:
    """Compares one value of each of three parameters: the first, the last and the largest."""

    def __init__(self, adapter: Adapter) -> None:
        self._known = loop_known(adapter)
        self._of: LiveState | None = None
        self._values: list[_Value] = []
        self._noted: list[bytes | torch.Tensor] | None = None

    def follow(self, live: LiveState) -> None:
        """Sample the parameters of `live` from the next `note` on."""
        if self._of is live:
            return
        self._of = live
        # The module's own parameters, if possible: `parameter.data = average` leaves views of them as they are.
        modules = () if self._known is None else self._known.modules()
        parameters: list[torch.Tensor] = [
            p for m in modules for p in m.parameters() if p.requires_grad and p.numel() and type(p) in _PLAIN
        ]
        # A sharded tensor's values are read by all ranks together. The state has this rank's part, a plain tensor.
        parameters = parameters or [
            tensors[0]
            for group, tensors in zip(live.layout.groups, live.tensors, strict=True)
            if group.kind == "parameter" and tensors[0].numel() and type(tensors[0]) in _PLAIN
        ]
        chosen = []
        if parameters:
            chosen = [parameters[0], parameters[-1], max(parameters, key=torch.Tensor.numel)]
        values = [_Value(tensor) for tensor in {id(tensor): tensor for tensor in chosen}.values()]
        # A rank makes new views of its rows for each checkpoint. Notes about the same memory stay valid.
        if [value.place for value in values] != [value.place for value in self._values]:
            self._noted = None
        self._values = values

    def note(self) -> None:
        """Keep the current values as those of the newest step."""
        self._noted = noted = []
        for value in self._values:
            # As `value.read()`, without its call: this is done twice in every step.
            memory = value.memory
            if memory is not None and value.tensor.data_ptr() == value.address:
                noted.append(memory.raw)
            else:
                noted.append(value.read())

    def replaced(self) -> bool:
        """Return whether a value differs from the one that was noted."""
        if self._noted is None:
            return False
        return not all(map(_equal, self._noted, [value.read() for value in self._values]))


class _Value:
    """The middle value of a tensor, whose memory may be replaced. Read through its address, because twice per step."""

    __slots__ = ("address", "memory", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.memory: Any = None
        self._find()

    @property
    def place(self) -> tuple[Any, ...]:
        """Address, kind and order of the tensor's memory."""
        tensor = self.tensor
        return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()

    def read(self) -> bytes | torch.Tensor:
        """Return a private copy; b"" if the adapter has released the memory, as that of JAX does between two steps."""
        if not self.tensor.numel():
            return b""
        if self.tensor.data_ptr() != self.address:
            self._find()
        if self.memory is not None:
            found: bytes = self.memory.raw
            return found
        return self._middle().clone()

    def _middle(self) -> torch.Tensor:
        return self.tensor.data[tuple(size // 2 for size in self.tensor.shape)]

    def _find(self) -> None:
        self.address, self.memory = self.tensor.data_ptr(), None
        if self.address and self.tensor.device.type == "cpu":
            middle = self._middle()
            self.memory = (ctypes.c_char * middle.element_size()).from_address(middle.data_ptr())


def _equal(first: bytes | torch.Tensor, last: bytes | torch.Tensor) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(last, torch.Tensor):
        return torch.equal(first, last)
    if isinstance(first, bytes) and isinstance(last, bytes):
        return first == last or not (first and last)  # released memory cannot be compared
    return False


_PLAIN = (torch.Tensor, torch.nn.Parameter)
