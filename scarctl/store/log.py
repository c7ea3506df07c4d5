"""Read a lane's log: its terms, their records, and the state that they describe (docs/FORMAT.md, section 7)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from itertools import chain

from scarctl.errors import Corruption
from scarctl.state.layout import Layout
from scarctl.store.backends.base import Blobs
from scarctl.store.format import (
    MAX_RECORD,
    MAX_TERM,
    corrupt,
    log_folder,
    number_of_record,
    number_of_term,
    segment_path,
    shard_folder,
    term_of_log,
    term_path,
    terms_folder,
)
from scarctl.store.record import FULL, Record
from scarctl.store.segment_reader import read_tail
from scarctl.store.shard_state import Damage, ShardState
from scarctl.store.table import Tail
from scarctl.store.term import Place, Term, shown, split_seq
from scarctl.util.arrays import Ids

_ATTEMPTS = 8
"""Most attempts to read while a writer collects."""
_ABOVE = 4
"""Most files above a hole that are read to find what closes a log."""


@dataclass(frozen=True, slots=True)
class Top:
    """How far the log of a term counts."""

    term: Term
    count: int
    """The newest record that counts; 0: none does."""
    closed: int | None
    """Number of the record that closes the log; None: it is open."""
    record: Record | Damage | None
    """The newest record that counts."""
    gap: Corruption | None = None
    """Why later records do not count: one is missing. A single one above a hole may have arrived late."""

    @property
    def collected(self) -> bool:
        """Whether the log has fewer records than its closing says: a newer term has collected it."""
        return self.closed is not None and self.count < self.closed - 1


class ShardLog:
    """The log of one lane. `layouts` gives a layout by its digest."""

    def __init__(self, blobs: Blobs, shard: int, layouts: Callable[[str], Layout]) -> None:
        self.blobs = blobs
        self.shard = shard
        self._layouts = layouts

    # -- terms ---------------------------------------------------------------------------------------------------

    def terms(self) -> list[int]:
        """Return the numbers of all terms, ascending."""
        names = self.blobs.names(terms_folder(self.shard))
        return sorted(number for name in names if (number := number_of_term(name)) is not None)

    def term(self, number: int) -> Term:
        """Return the claim of a term. Raises FileNotFoundError, Corruption."""
        path = term_path(self.shard, number)
        return Term.parse(
            self.blobs.read(path, MAX_TERM), self.blobs.where(path), shard=self.shard, number=number
        )

    def listed(self, number: int, term: str) -> Set[int]:
        """Return the numbers of all files in the log of a term, closings included."""
        return self._listed(lambda folder: dict.fromkeys(self.blobs.names(folder), 0), number, term).keys()

    def files(self, number: int, term: str) -> dict[int, int]:
        """Return the sizes of all files in the log of a term, by ascending number, closings included."""
        return self._listed(lambda folder: dict(self.blobs.files(folder)), number, term)

    def _listed(self, look: Callable[[str], dict[str, int]], number: int, term: str) -> dict[int, int]:
        folder, found = log_folder(self.shard, number, term), dict[int, int]()
        for _ in range(2):
            found |= {
                k: size for name, size in look(folder).items() if (k := number_of_record(name)) is not None
            }
            if len(found) == max(found, default=0):
                break
            # A listing during commits may lack a record but have the one after it. The next one has both.
        return dict(sorted(found.items()))

    def logs(self) -> list[tuple[int, str]]:
        """Return number and id of every term that has a log, ascending."""
        found = (term_of_log(name) for name in self.blobs.folders(f"{shard_folder(self.shard)}/log"))
        return sorted(one for one in found if one is not None)

    def top(self, term: Term, *, around: bool = False) -> Top:
        """Return how far the log of a term counts. around: a damaged record counts.

        Raises FileNotFoundError if a writer collects it meanwhile, Corruption.
        """
        there = self.listed(term.number, term.id)
        count = 0
        while count + 1 in there:
            count += 1
        read = self._there_or_why if around else self.at
        closed: int | None = None
        above: Record | Damage | None = None
        # What closes a log is its lowest end: a record may have arrived late above it, but not two of them.
        k = count
        while k:
            try:
                record = read(term.place(k))
            except Corruption as error:
                if not isinstance(above, Record) or above.kind != FULL or error.kind != Corruption.kind:
                    raise
                break  # what is above has the whole state
            if isinstance(record, Record) and record.ends:
                closed, above = k, None
            elif above is not None:
                self._check_parent(above, record)
                break
            else:
                above = record
                if isinstance(record, Record) and record.parent == "":
                    break
            k -= 1
        if closed is None:
            for k in sorted((k for k in there if k > count), reverse=True)[:_ABOVE]:
                record = read(term.place(k))
                if isinstance(record, Record) and record.ends:
                    closed = k
        gap = None
        if closed is None and len(there) > count + 1:
            what = self.blobs.where(term.place(count + 1).path(self.shard))
            gap = corrupt(what, f"this record is missing, and there are later ones, up to {max(there)}")
        if above is None:
            return Top(term, 0, closed, None, gap)
        return Top(term, above.k, closed, above, gap)

    def newest_top(self, *, around: bool = False) -> Top | None:
        """Return the log with the newest record that counts; None without any. Raises Corruption."""
        missed: tuple[int, int] | None = None
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                for number in reversed(self.terms()):
                    top = self.top(self.term(number), around=around)
                    if top.collected and missed != (number, top.count) and not last:
                        missed = number, top.count
                        break  # a newer term has collected it: begin again
                    if top.count:
                        return top
                    if top.gap is not None:
                        raise top.gap
                else:
                    return None
            except FileNotFoundError as error:
                if last:
                    raise corrupt(error.filename, "it is missing") from None
        raise AssertionError("unreachable")

    # -- records -------------------------------------------------------------------------------------------------

    def at(self, place: Place) -> Record:
        """Return the record at a place. Raises FileNotFoundError, or Corruption."""
        path = place.path(self.shard)
        data = self.blobs.read(path, MAX_RECORD)
        return Record.parse(data, self.blobs.where(path), shard=self.shard, place=place)

    def place(self, seq: int) -> Place:
        """Return the place of a record by its number among all. Raises Corruption if its term is missing."""
        number, k = split_seq(seq)
        try:
            return Place(number, self.term(number).id, k)
        except FileNotFoundError:
            what = self.blobs.where(term_path(self.shard, number))
            raise corrupt(what, f"the term of record {shown(seq)} is missing") from None

    def newest(self, *, around: bool = False) -> Record | None:
        """Return the newest record that counts, None without one. Raises Corruption.

        around: the newest of them that is not damaged. Raises Corruption if all are.
        """
        top = self.newest_top(around=around)
        if top is None:
            return None
        found = top.record
        for k in range(top.count - 1, 0, -1):
            if isinstance(found, Record):
                break
            found = self._there_or_why(top.term.place(k))
        if isinstance(found, Damage) and found.error is not None:
            raise found.error
        assert isinstance(found, Record), "a log that counts has a record"
        return found

    def records(self, most: int | None = None) -> Iterator[Record]:
        """Yield the records that count and are there, oldest first; at most the newest `most`. Raises Corruption.

        Records that are collected meanwhile are skipped.
        """
        top = self.newest_top()
        if top is None:
            return
        if top.gap is not None:
            raise top.gap
        left, places = most, list[Place]()
        for number, term in reversed(self.logs()):
            if number > top.term.number or (left is not None and left <= 0):
                continue
            own = (number, term) == (top.term.number, top.term.id)
            there = range(1, top.count + 1) if own else sorted(self.listed(number, term))
            newest = list(there) if left is None else list(there)[-left:]
            left = None if left is None else left - len(newest)
            places += [Place(number, term, k) for k in reversed(newest)]
        closed: tuple[int, str] | None = None
        for place in reversed(places):
            if closed == place[:2]:
                continue  # it has arrived after its log was closed
            with contextlib.suppress(FileNotFoundError):
                record = self.at(place)
                if record.ends:
                    closed = place.number, place.id
                else:
                    yield record

    def back(self, place: Place | None) -> Iterator[Record]:
        """Yield the records from `place` back, as far as they are there: what each builds on follows it."""
        child: Record | None = None
        while place is not None:
            try:
                record = self.at(place)
            except (FileNotFoundError, Corruption):
                return
            if child is not None and child.parent and child.parent != record.digest:
                return
            yield record
            child = record
            place = record.base if record.first else place._replace(k=place.k - 1)

    # -- states --------------------------------------------------------------------------------------------------

    def state(self, at: int | None = None, *, around: bool = False) -> ShardState:
        """Return the state after record `at` (default: the newest). It is empty if there is no record.

        around: read around damaged records. After one, as after a damaged segment, every partition is in doubt.

        Raises Corruption, naming the file.
        """
        if at is not None:
            return self.state_at(self.place(at), around=around)
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            top = self.newest_top(around=around)
            if top is None:
                return ShardState(self.shard)
            place = top.term.place(top.count)
            try:
                found = self._state(place, around)
                if top.gap is not None:
                    if not around:
                        raise top.gap
                    found.lose(self._damage(place._replace(k=place.k + 1), top.gap))
                if not found.damaged or last or self._is_newest(place):
                    return found
            except FileNotFoundError as error:
                if last:
                    what = f"a file of record {shown(place.seq)} is missing"
                    raise corrupt(error.filename, what) from None
            except Corruption:
                if last or self._is_newest(place):
                    raise
            # The writer has continued, and may have collected files that were about to be read.
        raise AssertionError("unreachable")

    def state_of(self, top: Top) -> ShardState:
        """Return the state after the newest record of a log. Raises FileNotFoundError, Corruption."""
        return self._state(top.term.place(top.count), around=False)

    def state_at(self, place: Place, *, around: bool = False) -> ShardState:
        """Return the state after the record at a place: see `state`. Raises Corruption."""
        try:
            found = self._state(place, around)
        except FileNotFoundError as error:
            raise corrupt(error.filename, f"a file of record {shown(place.seq)} is missing") from None
        found.past = True
        return found

    def _is_newest(self, place: Place) -> bool:
        with contextlib.suppress(Corruption):
            top = self.newest_top(around=True)
            return top is not None and top.term.place(top.count) == place
        return True

    def _state(self, place: Place, around: bool) -> ShardState:
        """Return the state after a record, from the newest full one before it on. Raises FileNotFoundError."""
        state = ShardState(self.shard)
        records: list[Record | Damage] = []
        for record in self._way(place, around):
            records.append(record)
            if isinstance(record, Damage) or record.kind != FULL:
                continue
            layout, tail, damage = self._content(record)
            if damage is None:
                state.apply(record, layout, tail, self.blobs.where(record.place.path(self.shard)))
                break
        else:
            # Without a full record nothing is known: the records below it were of another term. The newest is to
            # blame, because a writer may have collected the segments of those before it.
            newest = next(
                (one for one in records if isinstance(one, Damage) or one.kind == FULL), records[-1]
            )
            if isinstance(newest, Damage) and newest.error is not None:
                raise newest.error
            assert isinstance(newest, Record), "a record that cannot be read has an error"
            _, _, damage = self._content(newest)
            raise corrupt(*(("?", "it has no table") if damage is None else (damage.file, damage.why)))
        later = records[-2::-1]
        contents = self.blobs.each(self._content, [one for one in later if isinstance(one, Record)])
        for record in later:
            if isinstance(record, Damage):
                state.lose(record)
                continue
            layout, tail, damage = next(contents)
            state.apply(record, layout, tail, self.blobs.where(record.place.path(self.shard)), damage)
        return state

    def _way(self, place: Place, around: bool) -> Iterator[Record | Damage]:
        """Yield the records from `place` back to the first of its term."""
        read = self._there_or_why if around else self.at
        child: Record | Damage | None = None
        k = place.k
        while k:
            newest = read(place._replace(k=k))
            last = k if isinstance(newest, Damage) else newest.full
            # A record names the newest full one, so that those between are read in parallel.
            rest = self.blobs.each(read, [place._replace(k=n) for n in range(k - 1, last - 1, -1)])
            for record in chain([newest], rest):
                self._check_parent(child, record)
                yield record
                child, k = record, k - 1

    def _there_or_why(self, place: Place) -> Record | Damage:
        """Return a record, or why it cannot be read. Raises Corruption if a later version of scarctl wrote it."""
        try:
            return self.at(place)
        except Corruption as error:
            if error.kind != Corruption.kind:
                raise
            return self._damage(place, error)

    def _damage(self, place: Place, error: Corruption) -> Damage:
        return Damage(place.seq, self.blobs.where(place.path(self.shard)), error.message, True, error)

    def _content(self, record: Record) -> tuple[Layout, Tail | None, Damage | None]:
        """Read a record's changes to the state."""
        layout = self._layouts(record.layout)
        try:
            return layout, self.tail(record, layout), None
        except (Corruption, FileNotFoundError) as error:
            assert record.segment is not None, "an end has no content"
            path = self.blobs.where(segment_path(self.shard, record.segment.name))
            reason = error.message if isinstance(error, Corruption) else f"{path}: the segment is missing"
            return layout, None, Damage(record.seq, path, reason, record.sealed)

    def tail(self, record: Record, layout: Layout) -> Tail:
        """Return the tail of a record's segment. Raises Corruption or FileNotFoundError."""
        assert record.segment is not None, "an end has no segment"
        return read_tail(self.blobs, segment_path(self.shard, record.segment.name), record, layout)

    def replay(self, most: int) -> Iterator[tuple[Record, Layout, Ids | None, ShardState | None]]:
        """Yield the newest records, oldest first: each with its layout, its partitions' ids, and the state after it.

        The same state object changes with the next record. most: limit on records. A writer collects segments that
        nothing needs. Without that of a record there are no ids, and no state until the next full record.
        Raises Corruption, also if the writer collects these records meanwhile.
        """
        state: ShardState | None = None
        records = list(self.records(most))
        before = self._before(records[0]) if records else []
        for number, record in enumerate([*before, *records]):
            layout, tail, _ = self._content(record)
            follows = state is not None and state.place == record.place._replace(k=record.place.k - 1)
            if tail is None or not (follows or record.kind == FULL):
                state = None
            else:
                state = state or ShardState(self.shard)
                state.apply(record, layout, tail, self.blobs.where(record.place.path(self.shard)))
            if number >= len(before):
                yield record, layout, None if tail is None else tail.ids, state

    def _before(self, record: Record) -> list[Record]:
        """Return the records on which a record builds, from its newest full one on; none if one was collected."""
        if record.kind == FULL:
            return []
        places = [record.place._replace(k=k) for k in range(record.full, record.place.k)]
        with contextlib.suppress(FileNotFoundError):
            return list(self.blobs.each(self.at, places))
        return []

    def _check_parent(self, child: Record | Damage | None, record: Record | Damage) -> None:
        if isinstance(child, Record) and isinstance(record, Record) and child.parent != record.digest:
            what = self.blobs.where(child.place.path(self.shard))
            raise corrupt(
                what, f"it does not follow record {shown(record.seq)}: the chain of digests is broken"
            )
