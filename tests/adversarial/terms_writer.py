"""Take the steps of a writer in the model of terms: it opens a store, rolls back, and commits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.adversarial.search import Broken
from tests.adversarial.terms_rules import Rules
from tests.adversarial.terms_world import (
    NO_LINE,
    ROWS,
    Content,
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
    names,
    onward,
    over,
    values,
    version,
    versions,
)

Step = tuple[str, Store, Memory, Process]
FORGOTTEN = (Word(), Word())
OVERWRITING = (
    "records are not exclusive",
    "records are not exclusive, and the process is cloned",
    "records are named by the number alone",
)


class Writer(Rules):
    # -- opening ----------------------------------------------------------------------------------------------------

    def _open(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        if not p.tries:
            yield "gives up", store, memory, over(p)
            return
        top = max(store.terms, default=(0, ""))
        q = p._replace(
            at="claim",
            back=p.back or p.at == "back",
            age=store.age,
            term=top[0] + 1,
            id=f"{top[0] + 1}{p.name}{p.count}",
            count=p.count + 1,
            tries=p.tries - 1,
            k=0,
            tail=None,
            full=0,
            since=frozenset(),
            sealed=frozenset(),
        )
        if self.mutant == "records are listed before the claim" and top[0]:
            q = q._replace(s=self.number(store, top, self.closed(store, top)))
        if self.mutant == "snapshots are listed before the first record":
            q = q._replace(known=frozenset(place for place, _ in store.snapshots))
        yield f"lists terms up to {top[0]}", store, memory, q

    _back = _open

    def _claim(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        mine, after = (p.term, p.id), p._replace(at="down", x=(p.term, ""), age=store.age)
        there = {one for number, one in store.terms if number == p.term}
        if there:
            own = p.id in there
            what = f"finds its own claim of {p.term}" if own else f"finds {p.term} claimed by another"
            yield what, store, memory, after if own else p._replace(at="open")
            return
        yield f"claims term {p.term}", store._replace(terms=store.terms | {mine}), memory, after
        if p.lossy:
            q = p._replace(lossy=p.lossy - 1)
            made = store._replace(terms=store.terms | {mine})
            yield f"claims term {p.term}, without an answer", made, memory, q
            yield f"its claim of {p.term} is on its way", _fly(store, ("term", mine)), memory, q

    def _down(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """Read the claim before, by its number, and choose how far its log counts."""
        number = p.x[0] - 1
        if not number or self.mutant == "an opening closes nothing":
            found = self.newest(store._replace(terms=store.terms - {(p.term, p.id)}))
            x, s = (found[0], found[1]) if found and number else ((0, ""), 0)
            yield f"closes nothing before {p.x[0]}", store, memory, p._replace(at="load", x=x, s=s)
            return
        term = next((one for one in store.terms if one[0] == number), None)
        passes = self.mutant == "a claim that is not seen is passed over"
        unseen = p._replace(at="down" if passes else "fill", x=(number, "") if passes else p.x)
        if term is None:
            yield f"finds no claim of {number}", store, memory, unseen
            return
        if p.stale:
            yield f"does not see the claim of {number}", store, memory, unseen._replace(stale=p.stale - 1)
        cap = self.closed(store, term)
        s = self.number(store, term, cap)
        if cap is not None and s < cap and any(one[0] > p.term for one in store.terms):
            yield f"finds {s} of {cap} records of term {number}", store, memory, p._replace(at="open")
            return
        if cap is not None:
            q = p._replace(at="load" if s else "down", x=term, s=s)
            yield f"term {number} is closed: {s} counts", store, memory, q
            return
        if self.mutant == "records are listed before the claim" and number == p.term - 1:
            s = p.s
        if not s and self.mutant == "a term without records is not closed":
            yield f"term {number} has no records", store, memory, p._replace(x=term)
            return
        shuts = p._replace(at="shut", s=s, work=(term,))
        yield f"lists term {number}: {s} counts", store, memory, shuts
        if p.stale and s:
            old = shuts._replace(s=s - 1, stale=p.stale - 1)
            yield f"lists term {number}: {s - 1} counts, and does not see {s}", store, memory, old

    def _fill(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """Claim a number below its own that it does not see: the creation decides whether it was free."""
        number = p.x[0] - 1
        made = self.arrive(store, ("term", (number, f"{number}{p.name}{p.count}")))
        what = "claims" if made != store else "finds"
        yield f"{what} term {number}, below its own", made, memory, p._replace(at="down")

    def _shut(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """Close the log of a term after record s, exclusively: with a record s + 1, or with a file."""
        term: Term = p.work[0]
        q, what = p._replace(at="down", work=()), f"closes term {term[0]} after {p.s}"
        request = ("end", self.end_key(term), p.s) if self.plain else ("rec", *self._closing(term, p))
        made = self.arrive(store, request)
        yield what if made != store else f"finds another record {p.s + 1}", made, memory, q
        if p.lossy and made != store:
            yield f"{what}, on its way", _fly(store, request), memory, q._replace(lossy=p.lossy - 1)

    def _closing(self, term: Term, p: Process) -> tuple[Place, Rec]:
        return (*self.key(term), p.s + 1), Rec((p.id, 0), "end")

    def _load(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """Read what counts, decide about memory, and prepare the first record, which is full."""
        if p.second and not memory.ready:
            return
        base: Rec | None = None
        if p.back and not p.x[0]:
            yield "has nothing to go back to", store, memory, over(p)
            return
        if p.x[0]:
            base = self.log(store, p.x).get(p.s)
            missing = base is None or self.meaning(store, p.x, p.s) is None
            missing = missing or bool(base and names(base.table) - store.segments - store.lost)
            old = dict(store.recs).get(base.seal) if base and base.seal else None
            if missing or (base and base.seal and old is None):
                if store.age == p.age and not any(number > p.term for number, _ in store.terms):
                    raise Broken(f"an opening calls record {p.s} of term {p.x} damaged")
                yield "misses a file, begins again", store, memory, p._replace(at="open")
                return
            if p.back and old is None:
                yield "has nothing to go back to", store, memory, over(p)
                return
            if old:
                p = p._replace(sealed=names(old.table))
        memory, known = self._take(store, memory, p, base)
        damaged = names(base.table) - store.segments if base else p.damaged
        p = p._replace(tail=base, base=(*self.key(p.x), p.s) if base else None, damaged=damaged)
        want = self._first(store, memory, p, base)
        known = versions(want.content) if p.back else known
        p = p._replace(at="put", k=1, durable=known, x=(0, ""), s=0, count=p.count + 1)
        if base and self.mutant == "a collector does not wait for its first record":
            p = p._replace(at="collect", full=1, since=names(want.table), todo=("put", *p.todo))
        yield "has read the store", store, memory, p._replace(want=want)

    def _take(
        self, store: Store, memory: Memory, p: Process, base: Rec | None
    ) -> tuple[Memory, tuple[int, int]]:
        """Return memory after an opening, and what is durable in this target."""
        content = base.content if base else (f"new {p.id}",)
        believed = self.judge(store, memory, p, base, p.term - 1)
        if p.second:
            durable = (
                versions(content)
                if believed or self.mutant == "versions are compared across lines"
                else (-1, -1)
            )
        elif not believed and not p.back:
            words = FORGOTTEN
            if self.mutant == "memory that is set aside keeps its words of other targets":
                words = memory.words
            made = max((memory.made, *versions(content)))
            memory = memory._replace(content=content, words=words, made=made)
            durable = versions(content)
        else:
            durable = versions(memory.content if self.mutant == "what is durable is not asked" else content)
        memory = memory._replace(ready=True)
        if not p.back:
            told = base.content if base else ()
            word = Word((p.id, 0), base.line if base else NO_LINE, told, p.age)
            memory = _note(memory, p, word)
        elif self.mutant == "a roll-back notes its term before its memory":
            memory = _note(memory, p, memory.words[p.path]._replace(own=(p.id, 1), base=NO_LINE))
        return memory, durable

    def _first(self, store: Store, memory: Memory, p: Process, base: Rec | None) -> Rec:
        uid, own = (p.name, p.count), (p.id, 1)
        if base is None:
            return Rec(uid, "full", _all((None, None)), own, content=memory.content[:1])
        table, content, line = base.table, base.content, base.line
        if p.back and base.seal:
            old = dict(store.recs)[base.seal]
            table, content, line = old.table, (*old.content, f"back {p.id}"), own
        return Rec(uid, "full", _all(table), line, base.seal, table, content, base.past | {base.uid})

    # -- commits ----------------------------------------------------------------------------------------------------

    def _step(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        yield "trains", store, trained(memory, p.host, p.life), onward(p)

    def _commit(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """Put a segment with the rows that are not durable; the record that names it comes next."""
        seal = p.at == "seal"
        pending = _pending(memory.content, self._durable(memory, p))
        if not pending and p.second and not seal:
            yield "has nothing to save", store, memory, onward(p)
            return
        if not pending:
            memory = trained(memory, p.host, p.life)
            pending = _pending(memory.content, self._durable(memory, p))
        yield from self._put_segments(store, memory, p, memory.content, pending, seal)

    _seal = _commit

    def _durable(self, memory: Memory, p: Process) -> tuple[int, int]:
        return memory.durable if self.mutant == "one word says what is durable in both targets" else p.durable

    def _put_segments(
        self, store: Store, memory: Memory, p: Process, content: Content, rows: tuple[int, ...], seal: bool
    ) -> Iterator[Step]:
        if p.tail is None:
            raise AssertionError(f"{p.name} has not opened the store")
        told, made = values(content), dict[int, Segment | None]()
        for row in rows:
            made[row] = (p.term, p.name, p.count, told[row]) if told[row] else None
        table: Table = (made.get(0, p.tail.table[0]), made.get(1, p.tail.table[1]))
        place = (*self.key((p.term, p.id)), p.k + 1)
        want = Rec(
            (p.name, p.count),
            "full" if seal else "delta",
            _all(table) if seal else tuple(sorted(made.items())),
            (p.id, p.k + 1),
            place if seal else p.tail.seal,
            table,
            content,
            p.tail.past | {p.tail.uid},
        )
        q = p._replace(at="put", k=p.k + 1, count=p.count + 1, want=want)
        files = store._replace(segments=store.segments | names(made.values()))
        if self.mutant == "the record is put before its segment":
            files = _fly(store, *(("segment", one) for one in names(made.values())))
        if self.mutant == "memory notes a record before it is acknowledged":
            memory = _note(memory, p, memory.words[p.path]._replace(own=(p.id, q.k), base=NO_LINE))
        yield f"puts segments of rows {rows}", files, memory, q

    def _full(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """Make a full record, which changes nothing."""
        if p.tail is None:
            raise AssertionError(f"{p.name} has not opened the store")
        old = p.tail
        past = old.past | {old.uid}
        want = Rec(
            (p.name, p.count), "full", _all(old.table), old.line, old.seal, old.table, old.content, past
        )
        q = p._replace(at="put", k=p.k + 1, count=p.count + 1, want=want)
        if self.mutant == "a full record begins a line":
            q = q._replace(want=replace(want, line=(p.id, q.k)))
        yield "makes a full record", store, memory, q

    def _put(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """Create the record exclusively, or put it where it is; with the same bytes as often as needed."""
        if p.want is None:
            raise AssertionError(f"{p.name} has no record to put")
        place: Place = (*self.key((p.term, p.id)), p.k)
        request = ("rec", place, p.want)
        there = dict(store.recs).get(place)
        looks = p._replace(at="look")
        if there is not None and there != p.want and not self.overwrites:
            believed = self.mutant == "a record that exists is taken for its own"
            yield f"finds another record {p.k}", store, memory, looks if believed else over(p)
            return
        made = self.arrive(store, request)
        yield f"record {p.k}, {p.want.kind}", made, memory, looks
        if p.lossy and made != store:
            q = p._replace(lossy=p.lossy - 1)
            if self.mutant == "another record under a number in doubt" and p.want.kind == "delta":
                q = q._replace(at="commit", k=p.k - 1)
            yield f"record {p.k}, without an answer", made, memory, q
            yield f"record {p.k} is on its way", _fly(store, request), memory, q

    @property
    def overwrites(self) -> bool:
        return self.plain or self.mutant in OVERWRITING

    def arrive(self, store: Store, request: tuple[Any, ...]) -> Store:
        """Return the store after a request has arrived; nothing changes if an exclusive creation fails."""
        kind, what = request[0], request[1]
        if kind == "segment":
            return store._replace(segments=store.segments | {what})
        if kind == "term":
            if any(number == what[0] for number, _ in store.terms):
                return store
            return store._replace(terms=store.terms | {what})
        if kind == "end":
            if self.mutant == "a log may be closed twice":
                old = frozenset(one for one in store.ends if one[0] != what)
                return store._replace(ends=old | {(what, request[2])})
            if any(term == what for term, _ in store.ends):
                return store
            return store._replace(ends=store.ends | {(what, request[2])})
        there = dict(store.recs).get(what)
        if there is not None and (there == request[2] or not self.overwrites):
            return store
        if there is not None and "end" in (there.kind, request[2].kind):
            others = frozenset(one for one in store.recs if one[0] != what)
            return store._replace(recs=others | {(what, request[2])})
        if there is not None:
            raise Broken(f"record {what} of {there.uid} is written over")
        return store._replace(recs=store.recs | {(what, request[2])})

    def _look(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """Look for its own claim, newer ones, its record and the one before; then acknowledge."""
        for terms, q in self.sees(store, p):
            if not self.holds_term(terms, p) or not self.has_records(store, p):
                yield "looks: fenced", store, memory, over(q)
            else:
                yield from self._acknowledge(store, memory, q)

    def _acknowledge(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        want = p.want
        if want is None:
            raise AssertionError(f"{p.name} has put nothing")
        replaced = any(number > p.term for number, _ in store.terms)  # and may have collected this state
        if names(want.table) - store.segments - p.damaged and not replaced:
            raise Broken(f"record {p.k} is acknowledged without its segments")
        changed = p.k > 1 and want.line == (p.id, p.k)
        durable = versions(want.content) if changed else p.durable
        if self.mutant == "what memory has now is called durable":
            durable = versions(memory.content)
        full = want.kind == "full"
        q = p._replace(
            at="note",
            tail=want,
            durable=durable,
            full=p.k if full else p.full,
            since=names(want.table) | (frozenset() if full else p.since),
            sealed=names(want.table) if want.seal == (*self.key((p.term, p.id)), p.k) else p.sealed,
        )
        files = store._replace(acknowledged=store.acknowledged | {want.uid})
        if p.life and self.mutant == "the caller is told before memory notes it":
            memory = _note(memory, p, memory.words[p.path]._replace(told=want.content))
        if not p.life:  # nobody else reads this memory
            yield (
                f"looks: record {p.k} is acknowledged",
                files,
                self._noted(files, memory, q, want),
                onward(q),
            )
            return
        yield f"looks: record {p.k} is acknowledged", files, memory, q

    def _note(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        word = memory.words[p.path]
        mine = word.own[0] == p.id or self.mutant == "a saver notes what is no longer its own"
        if p.want is None or (p.zombie and not mine):
            yield "notes nothing", store, memory, onward(p)
        else:
            yield f"notes {p.k}", store, self._noted(store, memory, p, p.want), onward(p)

    def _noted(self, store: Store, memory: Memory, p: Process, want: Rec) -> Memory:
        """Return memory once it knows of a record: in one flip, and before the caller is told."""
        memory = memory._replace(durable=versions(want.content))
        if p.back and p.k == 1 and not p.second:
            words = (
                memory.words if self.mutant == "a roll-back keeps the words of other targets" else FORGOTTEN
            )
            made = max((memory.made, *versions(want.content)))
            memory = memory._replace(content=want.content, words=words, made=made)
        own: Line = (p.id, p.k)
        if want.line != own:
            return memory
        return _note(memory, p, Word(own, NO_LINE, want.content, p.age))


def trained(memory: Memory, host: int, life: int) -> Memory:
    """Return memory after a step, which changes the rows in turns."""
    made = memory.made + 1
    token = f"{made % 2}{'abcdef'[host]}{life}.{made}"
    return memory._replace(made=made, content=(*memory.content, token))


def _note(memory: Memory, p: Process, word: Word) -> Memory:
    first, second = memory.words
    return memory._replace(words=(word, second) if p.path == 0 else (first, word))


def _pending(content: Content, durable: tuple[int, int]) -> tuple[int, ...]:
    told = values(content)
    return tuple(row for row in ROWS if version(told[row]) != durable[row])


def _all(table: Table) -> tuple[tuple[int, Segment | None], ...]:
    return tuple(zip(ROWS, table, strict=True))


def _fly(store: Store, *requests: tuple[Any, ...]) -> Store:
    return store._replace(flying=store.flying | set(requests))
