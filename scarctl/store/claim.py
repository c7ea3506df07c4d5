"""Claim a term, and close the logs of earlier ones (docs/FORMAT.md, section 6)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scarctl.errors import Contention, Corruption, Fenced, NoStore, ScarError, Unavailable
from scarctl.store.backends.base import InDoubt
from scarctl.store.format import MAX_RECORD, MAX_TERM, SETTINGS, shard_folder, term_path, terms_folder
from scarctl.store.log import ShardLog
from scarctl.store.record import END, Record
from scarctl.store.shard_state import ShardState
from scarctl.store.term import Term

if TYPE_CHECKING:
    from scarctl.store.backends.base import Blobs
    from scarctl.store.store import Store

_ATTEMPTS = 16
"""Most claims of one opening: another writer that opens the lane at the same moment takes over."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A term that this process has claimed, and the state with which it begins."""

    term: Term
    base: Record | None
    """The newest record that counts; None: none does."""
    state: ShardState
    """The state after it."""


def put(blobs: Blobs, path: str, data: bytes, limit: int) -> bool:
    """Create a file exclusively; False if it exists with other bytes. Repeat it after InDoubt, with the same bytes.

    Raises InDoubt if the outcome is unknown; any other error if the file was certainly not created.
    """
    try:
        blobs.create_exclusive(path, [data])
        return True
    except FileExistsError:
        pass
    with contextlib.suppress(FileNotFoundError):
        mine = blobs.read(path, limit) == data
        return mine and blobs.settle(path, data)  # of an earlier attempt: perhaps it is not durable yet
    raise InDoubt(f"{blobs.where(path)}: the file appears and disappears", hint="is the store mounted?")


def claim(store: Store, shard: int, mine: set[str], *, above: int = 0) -> Claim:
    """Claim the next term of a lane, and close all logs before it, so that no other writer saves there.

    mine: gets the ids that this writer has claimed. above: the term in which it has saved, if it opens again: it must
        not take over from another writer.

    Raises Fenced if another one has come; Contention if writers keep opening the lane; Corruption, AccessDenied,
    Unavailable.
    """
    log = store.log(shard)
    for _ in range(_ATTEMPTS):
        _require_same(store, log, mine, above)
        term = Term(shard, max(log.terms(), default=0) + 1)
        if above and any(log.term(number).id not in mine for number in range(above + 1, term.number)):
            raise overtaken(store, shard, above)
        mine.add(term.id)
        if put(store.blobs, term.path, term.data, MAX_TERM):
            # If a newer writer has collected what was about to be read, begin again.
            with contextlib.suppress(FileNotFoundError):
                found = _close_below(log, term)
                if found is not None:
                    return found
        if above:
            raise overtaken(store, shard, above)
    raise Contention(
        f"{store.where}: other writers keep opening this store", hint="let only one process write to it"
    )


def _close_below(log: ShardLog, term: Term) -> Claim | None:
    """Close the logs of all terms below one's own, down to the newest with a record; None: begin again."""
    for number in range(term.number - 1, 0, -1):
        earlier = _term(log, number)
        while True:
            top = log.top(earlier)
            if top.closed is not None:
                if top.collected and max(log.terms()) > term.number:
                    return None
                break
            if top.gap is not None:
                raise top.gap
            end = Record(log.shard, earlier.place(top.count + 1), END, closer=(term.number, term.id))
            path = end.place.path(log.shard)
            log.blobs.prepare(earlier.folder, known=top.count > 0)
            if put(log.blobs, path, end.data, MAX_RECORD):
                break
            # A record or another closing came first: list again.
        if top.count:
            assert isinstance(top.record, Record), "damage was raised"
            try:
                return Claim(term, top.record, log.state_of(top))
            except Corruption:
                if max(log.terms()) > term.number:
                    return None
                raise
    return Claim(term, None, ShardState(log.shard))


def _term(log: ShardLog, number: int) -> Term:
    """Return the claim of a term below one's own. One that was never claimed is claimed now: none is skipped."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return log.term(number)
        filler = Term(log.shard, number)
        if put(log.blobs, filler.path, filler.data, MAX_TERM):
            return filler


def look(store: Store, term: Term, records: tuple[Record, ...], segments: tuple[str, ...]) -> None:
    """Look whether a term is still its writer's, no newer one is there, and these records and files are there.

    Raises Fenced if not; Unavailable while the whole store is away.
    """
    blobs = store.blobs
    try:
        own = blobs.read(term.path, MAX_TERM) == term.data
    except FileNotFoundError:
        own = False
    names = [record.place.path(term.shard) for record in records] + list(segments)
    if own and not blobs.has(term_path(term.shard, term.number + 1)) and all(blobs.each(blobs.has, names)):
        return
    require_store(store)
    raise overtaken(store, term.shard, term.number)


def require_store(store: Store) -> None:
    """Raise Unavailable while the whole store is away, like an unmounted folder: then missing files prove nothing.

    Raises Fenced (`kind` "store-replaced") if another store is in its place.
    """
    there = store.blobs.has(SETTINGS)
    if there:
        _refuse_other(store)
    if not there or not store.log(store.lane).terms():
        raise Unavailable(
            f"{store.where}: the store is missing",
            hint="is it mounted? Acknowledged commits are in it, and saving continues when it is back",
        )
    _refuse_other(store)


def _refuse_other(store: Store) -> None:
    """Raise Fenced if another store is in the place of this one."""
    with contextlib.suppress(NoStore, Corruption):  # which prove nothing
        if store.is_replaced():
            raise Fenced(
                f"{store.where}: another store was made in the place of the one that this process saves to",
                hint="stop this process: nothing more can be saved",
                kind="store-replaced",
            )


def _require_same(store: Store, log: ShardLog, mine: set[str], above: int) -> None:
    """Raise Fenced unless the store is the one that was opened; Unavailable while it is away.

    A claim in another store, made in its place, would end the writer of that one. Only the moment until the claim's
    file is made is left: no store can be removed and made again in it, unless this process stands still.
    """
    if not above:
        _refuse_other(store)
        return
    with contextlib.suppress(FileNotFoundError):
        if log.term(above).id in mine:
            return
    require_store(store)
    raise overtaken(store, log.shard, above)


def overtaken(store: Store, shard: int, number: int) -> Fenced:
    """Return the error of a writer whose term is over."""
    by, log = "", store.log(shard)
    with contextlib.suppress(ScarError, FileNotFoundError):
        newest = max(log.terms(), default=0)
        by = f": term {newest} of {log.term(newest).writer}" if newest > number else ""
    return Fenced(
        f"{store.where}: a newer writer has taken over{by}, this one has term {number}, or the store was replaced",
        hint="stop this process; its earlier commits are safe",
    )


def prepare(store: Store, shard: int) -> None:
    """Make the folders of a lane durable, before a term is claimed there."""
    log = store.log(shard)
    known = bool(store.blobs.has(terms_folder(shard))) and bool(log.terms())
    for folder in (terms_folder(shard), f"{shard_folder(shard)}/seg", f"{shard_folder(shard)}/log"):
        store.blobs.prepare(folder, known=known)
