"""Label a state: consistent or mixed, of which steps, and whether the position in the data was declared."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from scarctl.state.version import step_of
from scarctl.util.arrays import Ids
from scarctl.util.document import INTERNAL, Document
from scarctl.util.text import joined

SEVERAL = "partitions are of several steps"
PART = "the store does not have the whole state of this step"
_SHOWN = (SEVERAL, PART)
"""Reasons that two different steps show."""


@dataclass(frozen=True, slots=True)
class Label(Document):
    """What is known of a saved or restored state.

    It is *of one commit* if all of it is as one commit of the whole state saved it. It is *consistent* if, in addition,
    its ranks had the same values of what they have in common. Otherwise it is *mixed*.
    """

    oldest_step: int | None = None
    """Step of the oldest partition; None without any."""
    newest_step: int | None = None
    """Step of the newest partition; None without any."""
    mixed: tuple[str, ...] = field(default=(), metadata=INTERNAL)
    """Why it is not of one commit, one sentence each; () if it is."""
    caveats: tuple[str, ...] = field(default=(), metadata=INTERNAL)
    """Why it may not be consistent even if it is of one commit."""
    declared: bool | None = field(default=None, metadata=INTERNAL)
    """Whether the loop had declared the end of the step, so that its position in the data was saved. None: the state
    has no such position, as the tensors of a file."""

    COMPUTED: ClassVar = ("consistent", "reasons", "position")

    @classmethod
    def of(cls, versions: Ids, *mixed: str) -> Label:
        """Return the label of partitions of these versions. mixed: why they are not of one commit."""
        steps = step_of(versions[versions >= 0])
        return cls(int(steps.min()), int(steps.max()), mixed) if steps.size else cls(mixed=mixed)

    @classmethod
    def over(cls, parts: Sequence[Label]) -> Label:
        """Return the label of a state with these parts. Those of one commit have to be of the same one."""
        steps = [step for one in parts for step in (one.oldest_step, one.newest_step) if step is not None]
        known = [one.declared for one in parts if one.declared is not None]
        return cls(
            min(steps, default=None),
            max(steps, default=None),
            tuple(dict.fromkeys(reason for one in parts for reason in one.mixed)),
            tuple(dict.fromkeys(reason for one in parts for reason in one.caveats)),
            all(known) if known else None,
        )

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Label:
        """Return the label that says what these fields of a document say."""
        declared = None if fields["position"] is None else fields["position"] == "declared"
        return cls(fields["oldest_step"], fields["newest_step"], tuple(fields["reasons"]), (), declared)

    @property
    def step(self) -> int | None:
        """The step of all partitions; None if they are of several, and without any."""
        return self.oldest_step if self.oldest_step == self.newest_step else None

    @property
    def of_one(self) -> bool:
        """Whether all of it is as one commit of the whole state saved it. Its ranks may still have differed."""
        return not self.mixed

    @property
    def consistent(self) -> bool:
        """Everything that was given to `attach` is of one step, as one commit saved it. `reasons` says why not."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why the state is mixed, one sentence each. Empty if it is consistent."""
        return self.mixed + self.caveats

    @property
    def position(self) -> Literal["declared", "unknown"] | None:
        """Whether the position in the data was saved, because the loop had declared it. None: it has none."""
        return None if self.declared is None else "declared" if self.declared else "unknown"

    def because(self, reason: str) -> Label:
        """Return the label of a state of these partitions that is not of one commit, for a reason if none is known."""
        return replace(self, mixed=self.mixed or (reason,))

    @property
    def text(self) -> str:
        """ "consistent", or "mixed, partitions of steps 12 to 20" and why, and whether the position is unknown."""
        apart = self.oldest_step != self.newest_step
        why = joined(reason for reason in self.reasons if not (apart and reason in _SHOWN))
        steps = f", partitions of steps {self.oldest_step} to {self.newest_step}" if apart else ""
        label = "consistent" if self.consistent else f"mixed{steps}{f': {why}' if why else ''}"
        return f"{label}; the position in the data is unknown" if self.declared is False else label

    def __str__(self) -> str:
        """Return the text, after the step if it is one: "step 20, consistent"."""
        return self.text if self.step is None else f"step {self.step}, {self.text}"


class Labelled:
    """Something that has a label, whose most important fields are its own."""

    __slots__ = ()
    if TYPE_CHECKING:  # a field or a property

        @property
        @abstractmethod
        def label(self) -> Label: ...

    @property
    def consistent(self) -> bool:
        """See `Label.consistent`."""
        return self.label.consistent

    @property
    def reasons(self) -> tuple[str, ...]:
        """See `Label.reasons`."""
        return self.label.reasons
