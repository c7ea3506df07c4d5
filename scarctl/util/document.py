"""Return results as JSON values, field by field, so that one class is the result and its JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any, ClassVar

INTERNAL: Mapping[str, bool] = {"internal": True}
"""The metadata of a field that is not a part of the document."""
INLINE: Mapping[str, bool] = {"inline": True}
"""The metadata of a field that is a document itself, whose fields become fields of this one."""


class Document:
    """A dataclass whose fields are those of its JSON object, under the same names, unless they are `INTERNAL`."""

    __slots__ = ()
    COMPUTED: ClassVar[tuple[str, ...]] = ()
    """Names of properties that are fields of the object, too."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        found: dict[str, Any] = {}
        for one in fields(self):  # type: ignore[arg-type]
            if one.metadata.get("internal"):
                continue
            value = json_of(getattr(self, one.name))
            found |= value if one.metadata.get("inline") else {one.name: value}
        return found | {name: json_of(getattr(self, name)) for name in self.COMPUTED}


def json_of(value: Any) -> Any:
    """Return a field as JSON values: sequences as lists, fractions as numbers, keys as texts."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): json_of(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [json_of(item) for item in value]
    return float(value) if isinstance(value, Fraction) else value
