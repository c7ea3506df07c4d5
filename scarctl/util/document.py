"""Return results as JSON values, field by field, so that one class is the result and the type of its JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any


class Document:
    """A dataclass whose fields are those of its JSON object, under the same names.

    `scarctl.cli.schemas` publishes the types of the fields, with the text below each.
    """

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {one.name: json_of(getattr(self, one.name)) for one in fields(self)}  # type: ignore[arg-type]


def json_of(value: Any) -> Any:
    """Return a field as JSON values: sequences as lists, fractions as numbers, keys as texts."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): json_of(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [json_of(item) for item in value]
    return float(value) if isinstance(value, Fraction) else value
