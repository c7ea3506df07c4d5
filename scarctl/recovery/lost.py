"""Parse the names of lost parts, and find their partitions: one syntax for `scarctl recover --lost`, `Session.recover`.

- "all": everything.
- Numbers ("2,5"): shards if one process saves the state, ranks or members if several do.
- "shard:2,5", "rank:1,3" and "member:2": shards, ranks or members. The prefix applies to all numbers that follow it in
  the same text.
- Names of groups, or patterns of names, with or without rows: 'layers.3.*', 'emb.weight[0:512]' (`Layout.match`).

Give several as a list, or as one text with commas. A comma within a group's name does not separate items.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import UsageError
from scarctl.state.layout import BEYOND, Layout, close_to

Lost: TypeAlias = str | int | Iterable[str | int]
Item: TypeAlias = tuple[str, int | str]
"""("all", ""), ("shard", 2), ("rank", 1) or ("name", 'layers.3.*')."""
Unmatched: TypeAlias = dict[str, list[str]]
"""Names without a match in one share, or with rows beyond the last, each with the error's message and hint."""

_NUMBER = re.compile(r"(?:(shard|rank|member):)?(-?[0-9]{1,18})")
_NO_GROUP = "matches no group"


def parse_lost(
    lost: Lost, names: Collection[str], shards: Sequence[int], world: int | None = None, noun: str = "rank"
) -> list[Item]:
    """Return the items of `lost`, in order.

    names: names of all groups. shards: numbers of all shards. world: number of ranks; None for a single process. noun:
    the word for them, "rank" or "member".

    Raises UsageError without any item, and for a shard, rank or member that does not exist.
    """
    texts = lost if isinstance(lost, Iterable) and not isinstance(lost, str) else [lost]
    known, items = frozenset(names), list[Item]()
    for text in texts:
        kind = "shard" if world is None else "rank"
        for piece in _pieces(str(text), known):
            number = _NUMBER.fullmatch(piece)
            if number:
                kind = number[1] or kind
                if kind == "member" and noun != "member":
                    raise UsageError(
                        f"{piece!r}: no members saved this state", hint=f"give {noun}s or shards"
                    )
                kind = "rank" if kind == "member" else kind
                there = shards if kind == "shard" else range(world or 1)
                items.append((kind, _existing(noun if kind == "rank" else kind, int(number[2]), there)))
            else:
                items.append(("all", "") if piece == "all" else ("name", piece))
    if not items:
        raise UsageError(
            "no lost partition is named",
            hint="give shards (2,5), ranks (rank:1,3) or members (member:2), patterns of names, or 'all'",
        )
    return items


def find_lost(
    items: Iterable[Item], layout: Layout, shard_of: NDArray[np.int32], rank: int
) -> tuple[NDArray[np.int64], Unmatched]:
    """Return the ids (int64, ascending) of one share's partitions that `items` name, and the names without a match.

    Rows beyond the last count as unmatched, too: another share may have a longer tensor that the pattern matches.

    shard_of: int32 of shape (layout.partitions,). rank: rank of the process that saves the share; 0 for one process.
    """
    lost, unmatched = np.zeros(layout.partitions, dtype=bool), Unmatched()
    for kind, value in items:
        if kind == "name":
            try:
                lost[layout.match(str(value))] = True
                layout.check_rows(str(value))
            except UsageError as error:
                unmatched[str(value)] = [error.message, error.hint]
        else:
            lost |= kind == "all" or (shard_of == value if kind == "shard" else rank == value)
    return np.flatnonzero(lost), unmatched


def without_match_anywhere(unmatched: Unmatched, layout: Layout, names: Collection[str]) -> Unmatched:
    """Return those of one share's unmatched names that match in no share, as far as this one can tell.

    These are unknown names, and rows beyond the last of a tensor in this layout. names: names of all groups.
    """
    here, found = {group.name for group in layout.groups}, Unmatched()
    for name, why in unmatched.items():
        groups = name.rpartition("[")[0]
        known = fnmatch.filter(names, name) or fnmatch.filter(names, groups)
        if not known or (groups in here and BEYOND in why[0]):
            found[name] = why
    return found


def refuse_unmatched(everywhere: Sequence[Mapping[str, Sequence[str]]], names: Iterable[str]) -> None:
    """Raise UsageError for the first name without a match in any share, or with rows beyond the last in all.

    everywhere: the unmatched names that `find_lost` returned for each share. names: names of all groups, for the hint.
    """
    for name in everywhere[0] if everywhere else ():
        errors = [unmatched[name] for unmatched in everywhere if name in unmatched]
        if len(errors) < len(everywhere):
            continue
        # The message of a share that has the group is better: it gives the existing rows.
        message, hint = next((error for error in errors if _NO_GROUP not in error[0]), errors[0])
        raise UsageError(
            message, hint=close_to(name.partition("[")[0], names) if _NO_GROUP in message else hint
        )


def _existing(kind: str, number: int, known: Sequence[int]) -> int:
    if number in known:
        return number
    if len(known) == 1:
        hint = f"the only {kind} is {known[0]}"
    else:
        hint = f"{kind}s are {known[0]}..{known[-1]}" if known else f"the store has no {kind}s"
    raise UsageError(f"{kind} {number} does not exist", hint=hint)


def _pieces(text: str, names: Collection[str]) -> Iterator[str]:
    """Yield the items between commas. A name that contains commas stays whole, with or without rows."""
    parts = text.split(",")
    most = max((name.count(",") for name in names), default=0) if len(parts) > 1 else 0
    while parts:
        for count in range(min(len(parts), most + 1), 0, -1):
            piece = ",".join(parts[:count]).strip()
            if count == 1 or piece in names or (piece.endswith("]") and piece.rpartition("[")[0] in names):
                break
        del parts[:count]
        if piece:
            yield piece
