"""Test parts of a store's data: all parts together are everything, once; samples have their size and always differ."""

from __future__ import annotations

import random
import uuid

import pytest

from scarctl.errors import UsageError
from scarctl.store.subset import Subset

PIECES = [
    (f"lanes/{shard}/seg/{number:08d}-{uuid.UUID(int=random.Random(number).getrandbits(128)).hex}", piece)
    for shard in range(4)
    for number in range(25)
    for piece in range(20)
]


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_every_piece_is_in_exactly_one_part(parts: int) -> None:
    subsets = [Subset.parse(f"{part}/{parts}") for part in range(1, parts + 1)]
    assert {sum(subset.takes(*piece) for subset in subsets) for piece in PIECES} == {1}
    sizes = [sum(subset.takes(*piece) for piece in PIECES) for subset in subsets]
    assert min(sizes) > 0.8 * len(PIECES) / parts, "of about the same size"


def test_a_part_is_always_the_same_and_a_sample_never() -> None:
    assert Subset.parse("2/7") == Subset.parse("2/7")
    one, other = (
        [piece for piece in PIECES if subset.takes(*piece)] for subset in map(Subset.parse, ("5%", "5%"))
    )
    assert one != other
    assert 50 < len(one) < 170
    assert all(Subset.parse("100%").takes(*piece) for piece in PIECES)


@pytest.mark.parametrize(
    "text", ["", "0/7", "8/7", "1/0", "-1/7", "0%", "0.0%", "101%", "5", "5 %", "\u0661/2", "1/2/3"]
)
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(UsageError, match="not a part of the data"):
        Subset.parse(text)
