"""Say what files in a store mean, in the model of terms, and check what must hold at every moment."""

from __future__ import annotations

from collections.abc import Iterable

from tests.adversarial.search import Broken
from tests.adversarial.terms_world import (
    NO_LINE,
    Line,
    Memory,
    Place,
    Process,
    Rec,
    Segment,
    Store,
    Table,
    Term,
    Word,
    begins,
    names,
    values,
)


class Rules:
    """`mutant`: the rule that is left out. `plain`: records are put without a condition, and a file closes a log.

    `gap`: what a reader of a plain store does with a log that nobody has closed yet: "wait", "help" or "label".
    """

    def __init__(self, mutant: str = "", plain: bool = False, gap: str = "wait") -> None:
        self.mutant = mutant
        self.plain = plain
        self.gap = gap
        self._fine: set[Store] = set()

    # -- what files mean --------------------------------------------------------------------------------------------

    def key(self, term: Term) -> Term:
        """Return what a record's name has of its term."""
        return (term[0], "") if self.mutant == "records are named by the number alone" else term

    def log(self, store: Store, term: Term) -> dict[int, Rec]:
        key = self.key(term)
        return {place[2]: rec for place, rec in store.recs if place[:2] == key}

    def closed(self, store: Store, term: Term) -> int | None:
        """Return the last number of a closed log that may count, or None: the log is open."""
        if self.plain:
            key = self.end_key(term)
            return next((s for one, s in store.ends if one == key), None)
        return min((k - 1 for k, rec in self.log(store, term).items() if rec.kind == "end"), default=None)

    def end_key(self, term: Term) -> Term:
        return (term[0], "") if self.mutant == "what closes a log has the number alone" else term

    def number(self, store: Store, term: Term, cap: int | None = None) -> int:
        """Return the highest number up to which all records from 1 on are there: 0 if there is none."""
        log = {k: rec for k, rec in self.log(store, term).items() if rec.kind != "end"}
        if cap is not None:
            log = {k: rec for k, rec in log.items() if k <= cap}
        if self.mutant == "the base is the highest number":
            return max(log, default=0)
        k = 0
        while k + 1 in log:
            k += 1
        return k

    def newest(self, store: Store) -> tuple[Term, int, Rec] | None:
        """Return what an opening would find now: the newest record that counts."""
        for term in sorted(store.terms, reverse=True):
            s = self.number(store, term, self.closed(store, term))
            if s:
                return term, s, self.log(store, term)[s]
        return None

    def meaning(self, store: Store, term: Term, k: int) -> tuple[Table, int] | None:
        """Return the table of a record and the number of the full one, from files; None if a record is missing."""
        log, table = self.log(store, term), dict[int, Segment | None]()
        while k in log and log[k].kind != "end":
            table = {**dict(log[k].change), **table}
            if log[k].kind == "full":
                return (table[0], table[1]), k
            k -= 1
        return None

    def sees(self, store: Store, p: Process) -> Iterable[tuple[frozenset[Term], Process]]:
        """Yield what a list of terms shows: the truth, or a stale list without newer ones."""
        yield store.terms, p
        old = frozenset(term for term in store.terms if term[0] <= p.term)
        if p.stale and old != store.terms:
            yield old, p._replace(stale=p.stale - 1)

    def holds_term(self, terms: frozenset[Term], p: Process) -> bool:
        """Return whether its own claim is there, with its own bytes, and the highest."""
        own = (p.term, p.id) in terms
        if self.mutant in ("the look does not read the own claim", "records are named by the number alone"):
            own = True
        if self.mutant == "the look does not see newer terms":
            return own
        if self.mutant == "the look asks for the next number alone, and terms are deleted":
            return own and not any(number == p.term + 1 for number, _ in terms)
        return own and not any(number > p.term for number, _ in terms)

    def has_records(self, store: Store, p: Process) -> bool:
        """Return whether its record and the one before are there."""
        log = self.log(store, (p.term, p.id))
        if log.get(p.k) != p.want and self.mutant not in (
            "the look does not see the record",
            "a record that exists is taken for its own",
        ):
            return False
        if (
            p.want
            and self.own_segments(p) - store.segments
            and self.mutant != "the look does not see the segment"
        ):
            return False
        if p.k == 1:
            unseen = self.mutant == "the first look does not see the base"
            return p.base is None or unseen or dict(store.recs).get(p.base) == p.tail
        return self.mutant == "the look does not see the record before" or log.get(p.k - 1) == p.tail

    def own_segments(self, p: Process) -> frozenset[Segment]:
        """Return the segments that were put for a record."""
        made = names(one for _, one in p.want.change) if p.want else frozenset()
        return made - (names(p.tail.table) if p.tail else frozenset())

    # -- memory -----------------------------------------------------------------------------------------------------

    def belongs(self, store: Store, word: Word, line: Line, number: int) -> bool:
        """Return whether a memory belongs to the line of a store. `number`: of the term before this opening."""
        if not word.own[0]:
            return False
        if self.mutant == "memory is believed whatever the store says":
            return True
        if line == NO_LINE:
            known = any(one == word.own[0] for _, one in store.terms)
            if self.mutant == "memory of a store without records is believed":
                known = True
            return known and word.own[1] == 0 and word.base == NO_LINE
        if line == word.base:
            return self.mutant != "the line before is not kept"
        if self.mutant == "memory notes the number of the term":
            numbers = {one: n for n, one in store.terms}
            return numbers.get(line[0], 0) == int(word.own[0][0]) and line[1] >= word.own[1]
        if self.mutant == "the newest term counts, changed or not":
            return (number, word.own[0]) in store.terms
        if self.mutant == "memory notes no number of a record":
            return line[0] == word.own[0]
        return line[0] == word.own[0] and line[1] >= word.own[1]

    def judge(self, store: Store, memory: Memory, p: Process, base: Rec | None, number: int) -> bool:
        """Return whether memory is believed, and raise Broken if that is wrong.

        It is right if what the caller was told is a beginning of what the store has, and that of what memory has.
        """
        word = memory.words[p.path]
        content, line = (base.content, base.line) if base else ((), NO_LINE)
        found = self.belongs(store, word, line, number)
        right = bool(word.own[0]) and begins(content, word.told) and begins(memory.content, content)
        if base is None:  # what was begun in a store that was removed does not belong to the new one
            right = bool(word.own[0]) and not word.told and word.age[0] == store.age[0]
        if found and not right:
            raise Broken(
                f"memory {memory.content} is believed, {word.told} was told, the store has {content}"
            )
        # Living processes may have gone on with a backup that was put back under them: then either answer is right.
        sure = word.age == store.age or (base is not None and base.uid in store.restored)
        if right and not found and sure:
            raise Broken(f"memory {memory.content} is set aside, and continues the store's line {content}")
        return found

    # -- what must hold ---------------------------------------------------------------------------------------------

    def check(self, store: Store) -> None:
        """Raise Broken unless all conditions hold for the files of one store."""
        must = store.acknowledged | store.settled
        found = self.newest(store)
        if found is None:
            if must:
                raise Broken("everything that was acknowledged or read as settled is gone")
        else:
            self._check_newest(store, *found)
        for place, promised in store.snapshots:
            if promised:
                self._check_kept(store, place, "a snapshot")
        self._fine.add(store)

    def _check_newest(self, store: Store, term: Term, s: int, rec: Rec) -> None:
        known = rec.past | {rec.uid}
        if store.acknowledged - known:
            raise Broken(
                f"{sorted(store.acknowledged - known)} was acknowledged; the newest is {s} of term {term}"
            )
        if store.settled - known:
            raise Broken(f"{sorted(store.settled - known)} was read as settled; the newest is {s} of {term}")
        meant = self.meaning(store, term, s)
        if meant is None:
            raise Broken(f"a record on the way back from {s} of term {term} is gone")
        table = meant[0]
        told = values(rec.content)
        found = tuple(one[3] if one else "" for one in table)
        if table != rec.table or found != told:
            raise Broken(f"{s} of term {term} means {table}, not {told}")
        gone = names(table) - store.segments - store.lost
        if gone:
            raise Broken(f"segments of {s} of term {term} are gone: {gone}")
        if rec.seal:
            self._check_kept(store, rec.seal, "the newest consistent state")

    def _check_kept(self, store: Store, place: Place, what: str) -> None:
        rec = dict(store.recs).get(place)
        if rec is None or rec.kind != "full":
            raise Broken(f"{what}: its record {place} is gone")
        if names(rec.table) - store.segments - store.lost:
            raise Broken(f"{what}: segments of {place} are gone")
