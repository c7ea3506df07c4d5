"""Hook into lookups of embedding tables: note the rows that a step reads, and the moment before they change.

FBGEMM's fused kernels have no optimizer hooks. The gradient of a lookup's output exists right before the kernel's own
backward pass, which changes the rows. A hook on that output is the last moment before the change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from scarctl_adapters.torchrec.tables import Kernel


class Lookups:
    """The forward and backward passes of fused kernels."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self._kernels = kernels
        self._read: list[dict[str, torch.Tensor]] | None = None
        """Rows of lookups since the last `touched`; None before the first call."""

    def touched(self) -> dict[str, torch.Tensor]:
        """Return the rows that were read since the last call, by the table's name: int64 of shape (n,)."""
        found: dict[str, torch.Tensor] = {}
        if self._read is None:
            for kernel in self._kernels:
                found |= _all_rows(kernel)
        for rows in self._read or ():
            for name, read in rows.items():
                found[name] = torch.cat([found[name], read]) if name in found else read
        self._read = []
        return found

    def install(self, forward: Callable[[Kernel], None], backward: Callable[[], None]) -> Callable[[], None]:
        """Call `forward` before a lookup with gradients, `backward` before its backward pass. Return the removal."""
        handles: list[Any] = []
        calls: list[Callable[[], None]] = [backward]  # the graphs of past iterations keep their hooks
        for kernel in self._kernels:

            def begins(*_: object, kernel: Kernel = kernel) -> None:
                if torch.is_grad_enabled():
                    forward(kernel)

            def ended(
                _: nn.Module, args: Any, named: Mapping[str, Any], output: Any, kernel: Kernel = kernel
            ) -> None:
                if not (isinstance(output, torch.Tensor) and output.requires_grad):
                    return
                if self._read is not None:
                    self._read.append(rows_of(kernel, args, named))

                def changes(_: torch.Tensor) -> None:
                    for call in calls:
                        call()

                output.register_hook(changes)  # type: ignore[no-untyped-call]

            handles.append(kernel.lookup.register_forward_pre_hook(begins))
            handles.append(kernel.lookup.register_forward_hook(ended, with_kwargs=True))

        def remove() -> None:
            calls.clear()
            while handles:
                handles.pop().remove()

        return remove


def rows_of(kernel: Kernel, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the rows of each table that a lookup with these arguments reads: int64; all rows if unknown."""
    given = {**dict(zip(("indices", "offsets"), args, strict=False)), **named}
    indices, offsets = given.get("indices"), given.get("offsets")
    features = kernel.lookup.feature_table_map
    if (
        not (isinstance(indices, torch.Tensor) and isinstance(offsets, torch.Tensor))
        or indices.device.type != "cpu"  # cutting there would wait for the device
        or given.get("batch_size_per_feature_per_rank") is not None
        or (offsets.numel() - 1) % len(features)
    ):
        return _all_rows(kernel)
    batch = (offsets.numel() - 1) // len(features)
    ends = offsets[:: batch or 1].tolist() if batch else [0] * (len(features) + 1)
    found: dict[str, torch.Tensor] = {}
    for feature, number in enumerate(features):
        table = kernel.tables[number]
        rows = indices[ends[feature] : ends[feature + 1]].to(torch.int64, copy=True)
        found[table.name] = torch.cat([found[table.name], rows]) if table.name in found else rows
    return found


def _all_rows(kernel: Kernel) -> dict[str, torch.Tensor]:
    return {t.name: torch.arange(t.weight.shape[0], device=t.weight.device) for t in kernel.tables}
