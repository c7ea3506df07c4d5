"""Compare digests of the tensors that ranks have in common, as each rank saves them with a seal.

A flush cannot ask other ranks whether they have the same values. So each rank saves digests of its own, and who reads
the seals of all ranks compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def differ(found: Iterable[Mapping[str, str]]) -> bool:
    """Return whether two ranks have another digest of the same tensors. found: digests of each rank's seal.

    Ranks whose seal has none are left out: an earlier version saved it, or a survivor for a dead rank.
    """
    known: dict[str, str] = {}
    return any(known.setdefault(ranks, digest) != digest for each in found for ranks, digest in each.items())


def read_digests(stored: object) -> dict[str, str]:
    """Read digests in the extras of any writer. The input may be hostile: what is not a digest is skipped."""
    if not isinstance(stored, dict) or len(stored) > _MOST:
        return {}
    return {
        ranks: digest
        for ranks, digest in stored.items()
        if isinstance(digest, str) and max(len(ranks), len(digest)) <= _MOST
    }
