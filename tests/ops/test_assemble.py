"""Test which tensors a file has of the partitions of shares."""

from __future__ import annotations

import numpy as np
import pytest

from scarctl.errors import NoIntactCopy
from scarctl.ops.assemble import check_complete, content
from scarctl.state.group import Place
from scarctl.state.layout import Layout, TensorSpec, build_layout


def of_one() -> Layout:
    def specs(shape: tuple[int, ...], slot: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        return TensorSpec("", "F32", shape), TensorSpec("m", "F32", slot)

    groups = [
        ("w", "parameter", specs((10, 2), (10, 3))),
        ("none", "parameter", specs((0, 2), (0, 2))),
        ("slot alone", "parameter", specs((10, 0), (10, 2))),
        ("scalar", "parameter", specs((), ())),
    ]
    return build_layout(groups, rows={"*": 2})


@pytest.mark.parametrize(
    ("lost", "shapes"),
    [
        ("w", {"w": (10, 2), "w/m": (10, 3)}),
        ("w[4:8]", {"w[4:8]": (4, 2), "w/m[4:8]": (4, 3)}),
        ("w[0:1],w[9:10]", {"w[0:2]": (2, 2), "w/m[0:2]": (2, 3), "w[8:10]": (2, 2), "w/m[8:10]": (2, 3)}),
        ("slot alone[2:4]", {"slot alone[2:4]": (2, 0), "slot alone/m[2:4]": (2, 2)}),
        ("scalar", {"scalar": (), "scalar/m": ()}),
    ],
)
def test_pieces_of_one_process(lost: str, shapes: dict[str, tuple[int, ...]]) -> None:
    of = of_one()
    ids = np.unique(np.concatenate([of.match(name) for name in lost.split(",")]))
    specs, _ = content([of], [ids])
    assert {name: spec.shape for name, spec in specs.items()} == shapes


def test_everything_has_empty_tensors_too_in_the_order_of_the_layout() -> None:
    of = of_one()
    specs, _ = content([of], [np.arange(of.partitions)])
    assert list(specs) == [group.key(t) for group in of.groups for t in range(2)]
    check_complete([of])


def test_rows_that_no_rank_has() -> None:
    def of_rank(start: int) -> Layout:
        specs = (TensorSpec("", "F32", (2, 0)), TensorSpec("m", "F32", (2, 3)))
        return build_layout([("w", "parameter", specs, Place((6, 0), (start, 0)))])

    check_complete([of_rank(0), of_rank(2), of_rank(4)])
    with pytest.raises(NoIntactCopy, match="'w' is not complete"):
        check_complete([of_rank(0), of_rank(4)])
