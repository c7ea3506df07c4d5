"""Compare digests of the tensors that ranks have in common, as each rank saves them with a seal.

A flush cannot ask other ranks whether they have the same values. So each rank saves digests of its own, and who reads
the seals of all ranks compares them.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from scarctl.state.caveats import Caveat

_MOST = 1000
"""Limit on digests read back, and on characters of one. Extras may be hostile."""

DIFFERED = Caveat(
    "ranks-differ",
    "ranks had different values of parameters, or of optimizer state, that they should have in common, as between "
    "two averages of ranks that train apart: one rank's were saved for each row, and all resume with them. Save right "
    "after an average, of optimizer state, too, or name only equal tensors in scarctl.Ranks(replicated=...)",
)
"""What to say if `differ`."""
MIXED = "mixed"
"""Kind of the caveat that a state was saved again without a step since it was restored, and was mixed then."""
RESCUED = "rescued"
"""Kind of the caveat that a survivor has saved a dead rank's rows, and the rank's own state is of an earlier step."""
UNREAD = "unread"
"""Kind of the caveat that what was saved with a state cannot be read."""

_NAME = re.compile(r"[0-9]+\+([0-9]{1,9})-[0-9a-f]{16}", re.ASCII)


def name_of(ranks: Sequence[int]) -> str:
    """Return a short name for a set of ranks, the same on all of them: of the first one, their number, and a digest."""
    text = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    return f"{ranks[0]}+{len(ranks)}-{text}"


def all_there(found: Iterable[Mapping[str, str]]) -> bool:
    """Return whether there are digests of all ranks that have tensors in common. found: digests of each rank's seal."""
    counts = Counter(ranks for each in found for ranks in each)
    known = {ranks: _NAME.fullmatch(ranks) for ranks in counts}
    return all(name is not None and int(name[1]) == counts[ranks] for ranks, name in known.items())


def differ(found: Iterable[Mapping[str, str]]) -> bool:
    """Return whether two ranks have another digest of the same tensors. found: digests of each rank's seal.

    Ranks whose seal has none are left out: an earlier version saved it, or a survivor for a dead rank.
    """
    known: dict[str, str] = {}
    return any(known.setdefault(ranks, digest) != digest for each in found for ranks, digest in each.items())


class _Saved(Protocol):
    """What one rank has saved with a state: see `scarctl.state.extras.Notes`."""

    @property
    def caveats(self) -> Sequence[Caveat]: ...

    @property
    def common(self) -> Mapping[str, str]: ...


def in_common(found: Sequence[_Saved]) -> tuple[Caveat, ...]:
    """Return the caveats of one whole state, as its ranks have saved them, with `DIFFERED` if their values differ."""
    caveats = dict.fromkeys(caveat for each in found for caveat in each.caveats)
    if differ(each.common for each in found) and all(one.kind != DIFFERED.kind for one in caveats):
        caveats[DIFFERED] = None
    return tuple(caveats)


def reasons(found: Iterable[Caveat]) -> tuple[str, ...]:
    """Return why a state of one commit, saved with these caveats, may not be consistent.

    Its ranks had different values, or one of them had died before this step. It was mixed when it was restored, or what
    was saved with it cannot be read.
    """
    return tuple(caveat.message for caveat in found if caveat.kind in (DIFFERED.kind, MIXED, RESCUED, UNREAD))


def read_digests(stored: object) -> dict[str, str]:
    """Read digests in the extras of any writer. The input may be hostile: what is not a digest is skipped."""
    if not isinstance(stored, dict) or len(stored) > _MOST:
        return {}
    return {
        ranks: digest
        for ranks, digest in stored.items()
        if isinstance(digest, str) and max(len(ranks), len(digest)) <= _MOST
    }
