"""Test several layouts numbered as one."""

from __future__ import annotations

import numpy as np
import pytest

from scarctl.state.layouts import Layouts
from tests.support.ranks import layout_of


@pytest.mark.parametrize("world", [1, 3])
def test_partitions_are_those_of_every_rank_in_order(world: int) -> None:
    layouts = [layout_of(rank, world) for rank in range(world)]
    joined = Layouts(layouts)
    assert joined.partitions == sum(layout.partitions for layout in layouts)
    assert joined.nbytes == joined.partition_bytes.sum() == sum(layout.nbytes for layout in layouts)
    ids = np.arange(joined.partitions)
    starts, stops = joined.row_ranges(ids)
    names = [
        f"{joined.groups[g].name}[{start}:{stop}]"
        for g, start, stop in zip(joined.group_of(ids), starts, stops, strict=True)
    ]
    assert names == [layout.name(i) for layout in layouts for i in range(layout.partitions)]
    some = ids[::-3]
    assert joined.group_of(some).tolist() == joined.group_of(ids)[::-3].tolist()
    assert joined.row_ranges(some)[0].tolist() == starts[::-3].tolist()
