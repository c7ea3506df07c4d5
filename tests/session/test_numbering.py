"""Test finding `enumerate` around the batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scarctl.session.numbering import is_enumerated


class Bar:
    """A progress bar like tqdm: an object whose iterator is a generator."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        (iter, False),
        (enumerate, True),
        (lambda g: iter(Bar(g)), False),
        (lambda g: enumerate(Bar(g)), True),
        (lambda g: enumerate(Bar(Bar(g))), True),
        (lambda g: zip(g, range(9), strict=False), False),
        (lambda g: enumerate(zip(g, range(9), strict=False)), True),
    ],
    ids=["for", "enumerate", "bar", "enumerated bar", "two bars", "zip", "enumerated zip"],
)
def test_enumerate_is_found_through_other_iterators(reads: Any, expected: bool) -> None:
    found = []

    def batches() -> Iterator[int]:
        found.append(is_enumerated(itself[0]))
        yield 1

    itself = [batches()]
    next(iter(reads(itself[0])))
    assert found == [expected]
