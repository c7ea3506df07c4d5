"""Label a restored state: say why it is mixed, from what was saved with exactly that state.

A state is *of one commit* if all of it is as one commit of the whole state saved it. It is *consistent* if, in
addition, its ranks had the same values of what they have in common. Who resumes from it reads the same
(`scarctl.session.resume`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scarctl.arena.notes import UNKNOWN, stored_notes, waiting_notes
from scarctl.arena.queue import HandOverQueue
from scarctl.errors import Corruption
from scarctl.state.common import in_common, reasons
from scarctl.state.extras import Notes
from scarctl.store import ShardState, Store
from scarctl.util.text import counted

SEVERAL = "partitions are of several steps"
NO_COMMIT = (
    "all copies are of this step, but no commit has the whole state: the step was saved several times, and "
    "changed meanwhile, or in parts"
)
DOUBTFUL = (
    "newer copies may be lost, because files of the store that may have had them are damaged or missing"
)
OTHERS = "it is not known whether the parts that were not restored are of the same state"
PART = "the store does not have the whole state of this step"
MEMBERS = "members have no common step"


class Writer(NamedTuple):
    """The places in which one writer's extras may be: a process, a rank or a member."""

    states: Sequence[ShardState]
    """States of its shards: the newest, or those that are to be restored."""
    queue: HandOverQueue | None = None
    """Its hand-overs, if copies in its arena may be restored."""


def why_not_consistent(store: Store, writers: Iterable[Writer], whole: str) -> tuple[str, ...]:
    """Return why the whole state `whole` (`Record.whole`) is not consistent, one sentence each; () if it is.

    Its ranks had different values, or what they saved cannot be read. Raises Unavailable, AccessDenied.
    """
    found, unknown = list[Notes](), dict[str, None]()
    for writer in writers:
        try:
            notes = None if writer.queue is None else waiting_notes(writer.queue, whole)
            found.append(notes or stored_notes(store, writer.states, whole))
        except Corruption as error:
            unknown[UNKNOWN.format(error.message)] = None
    return (*dict.fromkeys(reasons(in_common(found))), *unknown)


def encoded_copies(count: int) -> str:
    """Return the reason that so many copies were encoded."""
    verb = "comes" if count == 1 else "come"
    return f"{counted(count, 'partition')} {verb} from encoded copies, which have fewer bits"


def why_mixed(whole: str, step: int | None, encoded: int, *, degraded: bool, some: bool) -> str:
    """Return why a plan's result is not of one commit. encoded: number of encoded copies. some: it restores any."""
    if encoded:
        return encoded_copies(encoded)
    if some and step is None:
        return SEVERAL
    if degraded:
        return DOUBTFUL
    return NO_COMMIT if some and not whole else OTHERS
