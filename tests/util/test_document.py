"""Test that results and their JSON documents have the same fields."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar

from scarctl.util.document import INLINE, INTERNAL, Document, json_of


@dataclass(frozen=True, slots=True)
class _Part(Document):
    share: Fraction
    names: tuple[str, ...] = ("a", "b")


class _Counted:
    """A result with a form of its own."""

    def to_json(self) -> dict[str, int]:
        return {"count": 3}


@dataclass(frozen=True, slots=True)
class _Whole(Document):
    parts: tuple[_Part, ...]
    by_shard: dict[int, _Counted] = field(default_factory=dict)
    reason: str | None = None
    secret: str = field(default="", metadata=INTERNAL)


def test_every_field_becomes_a_value_of_json() -> None:
    found = _Whole((_Part(Fraction(1, 4)),), {2: _Counted()}).to_json()
    assert found == {
        "parts": [{"share": 0.25, "names": ["a", "b"]}],
        "by_shard": {"2": {"count": 3}},
        "reason": None,
    }
    assert json.loads(json.dumps(found)) == found


@dataclass(frozen=True, slots=True)
class _Sum(Document):
    COMPUTED: ClassVar = ("total",)
    part: _Part = field(metadata=INLINE)
    rest: Fraction

    @property
    def total(self) -> Fraction:
        return self.part.share + self.rest


def test_fields_of_a_part_and_computed_ones_are_the_documents_own() -> None:
    found = _Sum(_Part(Fraction(1, 4)), Fraction(1, 4)).to_json()
    assert found == {"share": 0.25, "names": ["a", "b"], "rest": 0.25, "total": 0.5}


def test_values_of_json_stay_as_they_are() -> None:
    for value in (None, True, 0, 1.5, "text", [], {}, [1, [2.0]], {"a": {"b": [None]}}):
        assert json_of(value) == value
