"""Notice that parameters were replaced between two steps, also by writes that torch does not count.

Loops swap in an average of the weights for an evaluation, often through `.data`. If a signal arrives then, saving the
average as the step's state needs a caveat.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import torch

from scarctl.adapter import Adapter, loop_known
from scarctl.checkpoint.live_state import LiveState

_Values: TypeAlias = list[bytes | torch.Tensor]


class Weights:
    """Compares one value of each of three parameters: the first, the last and the largest."""

    def __init__(self, adapter: Adapter) -> None:
        self._known = loop_known(adapter)
        self._of: LiveState | None = None
        self._values: list[_Value] = []
        self._noted: _Values | None = None
        self._ended: _Values | None = None
        """The values at the newest step's end."""

    @property
    def followed(self) -> bool:
        """Whether parameters are sampled."""
        return self._of is not None

    def follow(self, live: LiveState) -> None:
        """Sample the parameters of `live` from the next `note` on."""
        if self._of is live:
            return
        self._of = live
        values = self._sampled(live)
        # A rank makes new views of its rows for each checkpoint. Notes about the same memory stay valid.
        if len(values) != len(self._values) or not all(map(_Value.same, values, self._values)):
            self._noted = self._ended = None
        self._values = values

    def _sampled(self, live: LiveState) -> list[_Value]:
        # The module's own parameters, if possible: `parameter.data = average` leaves views of them as they are.
        modules = () if self._known is None else self._known.modules()
        trained: list[Any] = [p for m in modules for p in m.parameters() if p.requires_grad and p.numel()]
        # Of a sharded tensor this rank's part is read, which may be replaced behind it. FSDP2 keeps the sharded ones.
        parameters: list[torch.Tensor] = [p for p in trained if _has_part(p) and p._local_tensor.numel()]
        parameters = parameters or [p for p in trained if type(p) in _PLAIN]
        parameters = parameters or [
            tensors[0]
            for group, tensors in zip(live.layout.groups, live.tensors, strict=True)
            if group.kind == "parameter" and tensors[0].numel() and type(tensors[0]) in _PLAIN
        ]
        chosen = []
        if parameters:
            chosen = [parameters[0], parameters[-1], max(parameters, key=torch.Tensor.numel)]
        return [_Value(tensor) for tensor in {id(tensor): tensor for tensor in chosen}.values()]

    def note(self, *, ended: bool = False) -> None:
        """Keep the current values as those of the newest step.

        ended: the step has just ended. Otherwise the loop is done with it.
        """
        noted: _Values = []
        for value in self._values:
            # As `value.read()`, without calls: this is done twice in every step.
            memory, tensor = value.memory, value.tensor
            if (
                memory is not None
                and (tensor._local_tensor if value.sharded else tensor).data_ptr() == value.address
            ):
                noted.append(memory.raw)
            else:
                noted.append(value.read())
        self._noted = noted
        if ended:
            self._ended = noted

    def replaced(self, live: LiveState | None = None) -> bool:
        """Return whether a value differs from the one that was noted.

        live: the present state, if the loop may have put other tensors in place of those that are followed.
        """
        values = self._values if live is None or live is self._of else self._sampled(live)
        return _differ(self._noted, [value.read() for value in values])

    def moved(self) -> bool:
        """Return whether a value differs from that at the newest step's end."""
        return _differ(self._ended, [value.read() for value in self._values])

    def moves(self) -> bool:
        """Return whether the loop had changed them between the step's end and the note, as those that clip weights."""
        return _differ(self._ended, self._noted)


class _Value:
    """The middle value of a tensor, whose memory may be replaced. Read through its address, because twice per step."""

    __slots__ = ("address", "memory", "sharded", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: Any = tensor
        self.sharded = _has_part(tensor)
        self.memory: Any = None
        self._find()

    def part(self) -> torch.Tensor:
        """Return the tensor, or this process's part of a sharded one."""
        found: torch.Tensor = self.tensor._local_tensor if self.sharded else self.tensor
        return found

    def same(self, other: _Value) -> bool:
        """Return whether this is the value of the same tensor, or of the same memory."""
        return self.tensor is other.tensor or self._place() == other._place()

    def _place(self) -> tuple[Any, ...]:
        part = self.part()
        return part.data_ptr(), part.device, part.dtype, part.shape, part.stride()

    def read(self) -> bytes | torch.Tensor:
        """Return a private copy; b"" if the adapter has released the memory, as that of JAX does between two steps."""
        part = self.part()
        if not part.numel():
            return b""
        if part.data_ptr() != self.address:
            self._find()
        if self.memory is not None:
            found: bytes = self.memory.raw
            return found
        return self._middle().clone()

    def _middle(self) -> torch.Tensor:
        part = self.part()
        return part.data[tuple(size // 2 for size in part.shape)]

    def _find(self) -> None:
        part = self.part()
        self.address, self.memory = part.data_ptr(), None
        if self.address and part.device.type == "cpu":
            middle = self._middle()
            self.memory = (ctypes.c_char * middle.element_size()).from_address(middle.data_ptr())


def _differ(before: _Values | None, after: _Values | None) -> bool:
    return before is not None and after is not None and not all(map(_equal, before, after))


def _equal(first: bytes | torch.Tensor, last: bytes | torch.Tensor) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(last, torch.Tensor):
        return torch.equal(first, last)
    if isinstance(first, bytes) and isinstance(last, bytes):
        return first == last or not (first and last)  # released memory cannot be compared
    return False


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _has_part(tensor: Any) -> bool:
    """Return whether this is a DTensor, whose part in this process is a plain tensor."""
    return type(tensor) not in _PLAIN and type(getattr(tensor, "_local_tensor", None)) in _PLAIN
