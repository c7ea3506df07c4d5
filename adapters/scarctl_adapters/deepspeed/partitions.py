"""Find a rank's part of every parameter in the flat tensors of ZeRO, and rebuild the model's weights from it.

ZeRO concatenates the parameters of a param_group, and gives every rank a run of elements. The master weights are one
flat tensor in fp32 per param_group (stages 1 and 2) or per sub-group of one (stage 3). The optimizer's state has the
same form. So a rank's part of a parameter is a run of its elements in their order in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import distributed as dist
from torch import nn

from scarctl.state.layout import Place


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """This rank's run of elements of one parameter."""

    parameter: nn.Parameter
    """The model's parameter, of low precision, and without elements while stage 3 has not gathered it."""
    flat: int
    """Number of the flat tensor."""
    first: int
    """First element in the flat tensor."""
    count: int
    start: int
    """First element in the parameter."""
    whole: int
    """Elements of the parameter."""

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of the run, of shape (count,). flat: the master weights, or a slot of their shape."""
        return flat.detach().narrow(0, self.first, self.count)

    @property
    def place(self) -> Place | None:
        """Place of the run in the parameter as a vector; None if it is the whole parameter."""
        return place_of_run(self.start, self.count, self.whole)


def place_of_run(start: int, count: int, whole: int) -> Place | None:
    """Return the place of a run of elements in a vector; None if it is the whole vector."""
    return None if count == whole else Place((whole,), (start,))


class Partitions:
    """The flat tensors of one ZeRO optimizer. Made once the engine is built: which rank has what never changes."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self.shards_weights = isinstance(zero, DeepSpeedZeroOptimizer_Stage3)
        """Whether the model's weights are divided as well (stage 3)."""
        self.fragments = [
            run for run in (self._stage3() if self.shards_weights else self._stage12()) if run.count
        ]

    @property
    def flats(self) -> list[torch.Tensor]:
        """The master weights of this rank."""
        zero = self._zero
        found = (
            zero.fp32_partitioned_groups_flat if self.shards_weights else zero.single_partition_of_fp32_groups
        )
        return list(found)

    def param_group_of(self, flat: int) -> int:
        """Return the number of the param_group of a flat tensor."""
        return int(self._zero.sub_group_to_group_id[flat]) if self.shards_weights else flat

    def _stage12(self) -> Iterator[Fragment]:
        for number, parameters in enumerate(self._zero.bit16_groups):
            for parameter in parameters:
                linked = parameter._hp_mapping
                if linked is not None:  # None: all of it is other ranks'
                    here, there = linked.hp_fragment_address, linked.lp_fragment_address
                    whole = parameter.numel()
                    yield Fragment(parameter, number, here.start, here.numel, there.start, whole)

    def _stage3(self) -> Iterator[Fragment]:
        for number, parameters in enumerate(self._zero.fp16_groups):
            first = 0
            for parameter in parameters:
                start, count = self.part_of(parameter)
                yield Fragment(parameter, number, first, count, start, parameter.ds_numel)
                first += parameter.partition_numel()

    def part_of(self, parameter: Any) -> tuple[int, int]:
        """Return first element and count of this rank's part of a parameter of stage 3, without padding."""
        size = parameter.partition_numel()
        start = min(parameter.ds_numel, size * dist.get_rank(self._zero.dp_process_group))
        return start, min(size, parameter.ds_numel - start)

    @torch.no_grad()
    def rebuild(self) -> None:
        """Write the model's weights anew from the master weights of all ranks. A collective."""
        zero = self._zero
        if not self.shards_weights:
            zero.update_lp_params()
            return
        # As at the end of a step: nothing is gathered, then the parts are written, then what stays gathered.
        zero.checkpoint_event_prologue()
        for number in range(len(self.flats)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        zero.checkpoint_event_epilogue()
