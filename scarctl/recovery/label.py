"""Label a state in a store: say why it is mixed, from its copies and from what was saved with it.

Who resumes from it reads the same (`scarctl.session.resume`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from scarctl.arena.arena import Arena
from scarctl.arena.notes import UNKNOWN, memory_notes, stored_notes
from scarctl.errors import Corruption
from scarctl.state.common import in_common, reasons
from scarctl.state.extras import Notes
from scarctl.state.label import SEVERAL, Label
from scarctl.store import ShardState, Store
from scarctl.util.arrays import Ids
from scarctl.util.text import counted

NO_COMMIT = (
    "all copies are of this step, but no commit has the whole state: the step was saved several times, and "
    "changed meanwhile, or in parts"
)
DOUBTFUL = (
    "newer copies may be lost, because files of the store that may have had them are damaged or missing"
)
OTHERS = "it is not known whether the parts that were not restored are of the same state"
MEMBERS = "members have no common step"


class Writer(NamedTuple):
    """The places in which one writer's extras may be: a process, a rank or a member."""

    states: Sequence[ShardState]
    """States of its lane: the newest one, and the one that is to be restored."""
    arena: Arena | None = None
    """Its memory, if copies there may be restored."""


def noted(label: Label, store: Store, writers: Iterable[Writer], whole: str) -> Label:
    """Return the label of the whole state `whole` (`Record.whole`) with what was saved with it.

    Caveats: its ranks had different values, or what they saved cannot be read. Raises Unavailable, AccessDenied.
    """
    found, unknown = list[Notes](), dict[str, None]()
    for writer in writers:
        try:
            notes = None if writer.arena is None else memory_notes(writer.arena, whole)
            found.append(notes or stored_notes(store, writer.states, whole))
        except Corruption as error:
            unknown[UNKNOWN.format(error.message)] = None
    caveats = (*dict.fromkeys(reasons(in_common(found))), *unknown)
    known = [notes.declared for notes in found if notes.at is not None]  # those of sessions
    return replace(label, caveats=caveats, declared=all(known) if known else None)


class Copies(Protocol):
    """The copies that a plan restores: see `scarctl.recovery.plan.Plan`."""

    @property
    def label(self) -> Label: ...
    @property
    def version(self) -> Ids: ...
    @property
    def whole(self) -> str: ...
    @property
    def encoded(self) -> int: ...
    @property
    def degraded(self) -> bool: ...


def label_of(copies: Copies, *, of_one: bool) -> Label:
    """Return the label of a state with these copies, and the caveats that they have.

    of_one: it is of one commit if they are of one step.
    """
    steps = Label.of(copies.version)
    label = replace(copies.label, oldest_step=steps.oldest_step, newest_step=steps.newest_step, mixed=())
    several = label.oldest_step != label.newest_step
    if of_one and not several:
        return label
    mixed = [SEVERAL] if several else []
    if encoded := copies.encoded:
        verb = "comes" if encoded == 1 else "come"
        mixed.append(f"{counted(encoded, 'partition')} {verb} from encoded copies, which have fewer bits")
    elif copies.degraded:
        mixed.append(DOUBTFUL)
    mixed = mixed or [NO_COMMIT if label.step is not None and not copies.whole else OTHERS]
    return replace(label, mixed=tuple(mixed))
