"""Test attributes that are computed once, also of frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from scarctl.util.lazy import kept

calls: list[int] = []


@dataclass(frozen=True)
class Number:
    value: int
    note: str = field(default="", compare=False)

    @kept
    def square(self) -> int:
        """Return the square."""
        calls.append(self.value)
        return self.value**2


def test_a_value_is_computed_once_for_each_object() -> None:
    calls.clear()
    three, four = Number(3), Number(4)
    assert [three.square, three.square, four.square, four.square] == [9, 9, 16, 16]
    assert calls == [3, 4]


def test_it_is_no_field() -> None:
    three = Number(3)
    assert three.square == 9
    assert (three, hash(three)) == (Number(3), hash(Number(3)))
    assert replace(three, value=5).square == 25
    assert Number.square.__doc__ == "Return the square."
