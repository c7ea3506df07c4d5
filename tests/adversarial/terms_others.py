"""Take the steps of collectors, snapshots, readers and the user in the model of terms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.adversarial.search import Broken
from tests.adversarial.terms_world import (
    Memory,
    Place,
    Process,
    Rec,
    Segment,
    Store,
    Term,
    World,
    names,
    onward,
    over,
)
from tests.adversarial.terms_writer import Step, Writer


class Others(Writer):
    # -- collection -------------------------------------------------------------------------------------------------

    def _collect(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """List what is not needed: the writer itself knows what its records name, kept states are read."""
        if p.tail is None:
            raise AssertionError(f"{p.name} has not opened the store")
        kept = {place for place, _ in store.snapshots}
        if p.known is not None:
            kept = set(p.known)
        if p.tail.seal and self.mutant != "the newest consistent state is not kept":
            kept.add(p.tail.seal)
        work = self._garbage(store, p, kept)
        at = "delete" if self.mutant == "a collector does not look" and work else "again"
        yield f"lists {len(work)} files to delete", store, memory, p._replace(at=at, work=work, known=None)

    def _garbage(self, store: Store, p: Process, kept: set[Place]) -> tuple[tuple[str, Any], ...]:
        key = self.key((p.term, p.id))
        needed = set[Segment]()
        for place, rec in store.recs:
            later = place[:2] == key and place[2] >= p.full
            if place in kept or (later and self.mutant == "a collector takes what it needs from a list"):
                needed |= names(rec.table)
        if self.mutant != "a collector takes what it needs from a list":
            needed |= p.since
            if self.mutant != "the newest consistent state is not kept":
                needed |= p.sealed
        own = self.mutant == "a collector deletes records of its own term"
        late = self.mutant == "segments of later terms are deleted"
        segments = sorted(one for one in store.segments - needed if one[0] <= p.term or late)
        places = [
            place
            for place, rec in sorted(store.recs, key=lambda item: item[0])
            if place[0] < p.term or (place[:2] == key and place[2] < p.full and own)
            if place not in kept and (rec.kind != "end" or self.mutant == "what closes a log is deleted")
        ]
        work = [("segment", one) for one in segments] + [("record", one) for one in places]
        if self.mutant == "the look asks for the next number alone, and terms are deleted":
            work += [("term", one) for one in sorted(store.terms) if one[0] < p.term]
        return tuple(work)

    def _again(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """Look once more, after the list and before the first deletion."""
        for terms, q in self.sees(store, p):
            if self.holds_term(terms, p):
                may = q._replace(at="delete") if p.work else onward(q)
                yield "looks, and may delete", store, memory, may
            else:
                yield "looks: fenced, deletes nothing", store, memory, over(q)

    def _delete(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        (kind, what), rest = p.work[0], p.work[1:]
        if kind == "segment":
            store = store._replace(segments=store.segments - {what})
        elif kind == "record":
            store = store._replace(recs=frozenset(one for one in store.recs if one[0] != what))
        else:
            store = store._replace(terms=store.terms - {what})
        yield f"deletes {kind} {what}", store, memory, p._replace(work=rest) if rest else onward(p)

    # -- snapshots --------------------------------------------------------------------------------------------------

    def _snap(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """Choose the newest consistent state. In a plain store it has to be settled."""
        found = self.newest(store)
        if found is None or found[2].seal is None:
            yield "finds no consistent state", store, memory, over(p)
            return
        top = max(store.terms)
        if self.plain and top != found[0] and self.closed(store, found[0]) is None:
            yield "finds nothing settled", store, memory, over(p)
            return
        at = "look2" if self.plain and top == found[0] else "name"
        yield f"chooses {found[2].seal}", store, memory, p._replace(at=at, x=top, work=(found[2].seal,))

    def _look2(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        settled = max(store.terms) == p.x
        yield "looks whether it is settled", store, memory, p._replace(at="name") if settled else over(p)

    def _name(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        made = store._replace(snapshots=store.snapshots | {(p.work[0], False)})
        yield f"creates the snapshot of {p.work[0]}", made, memory, p._replace(at="late")

    def _late(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """Look for the newest full record: if its term's collector may not have seen the snapshot, it is late."""
        kept: Place = p.work[0]
        found = self.newest(store)
        meant = self.meaning(store, found[0], found[1]) if found else None
        rest = store.snapshots - {(kept, False)}
        counts = False
        if found and meant:
            key, number = self.key(found[0]), meant[1]
            full = self.log(store, found[0])[number]
            counts = (kept[:2] == key and kept[2] >= number) or full.seal == kept
        if counts or self.mutant == "a snapshot does not look":
            yield "promises the snapshot", store._replace(snapshots=rest | {(kept, True)}), memory, onward(p)
        else:
            yield "is late, and deletes the snapshot", store._replace(snapshots=rest), memory, onward(p)

    # -- readers ----------------------------------------------------------------------------------------------------

    def _read(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        if not p.tries:
            yield "is overtaken too often", store, memory, over(p)
            return
        top = max(store.terms, default=(0, ""))
        q = p._replace(at="walk", term=top[0], x=(top[0] + 1, ""), age=store.age, work=(), want=None)
        if not p.missed:
            q = q._replace(ghost=store.acknowledged)
        yield f"lists terms up to {top[0]}", store, memory, q

    def _walk(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """List the next older term, until one has a record that counts."""
        term = max((one for one in store.terms if one[0] < p.x[0]), default=None)
        if term is None:
            if p.ghost and store.age == p.age:
                raise Broken("a reader finds nothing, and something was acknowledged")
            yield "finds nothing", store, memory, over(p)
            return
        cap = None if self.mutant == "readers ignore what closes a log" else self.closed(store, term)
        s = self.number(store, term, cap)
        found = p._replace(at="file" if s else "walk", x=term, s=s, settled=True)
        takes = self.mutant == "readers take what is left of a closed log"
        if cap is not None and s < cap and p.missed != (term, s) and not takes:
            again = p._replace(at="read", tries=p.tries - 1, missed=(term, s))
            yield f"finds {s} of {cap} records of term {term[0]}, begins again", store, memory, again
            return
        what = f"lists term {term[0]}: {s}"
        if self.plain and cap is None and self.mutant != "readers ignore what closes a log":
            yield from self._gap(store, memory, p, term, found)
            return
        yield what, store, memory, found

    def _gap(self, store: Store, memory: Memory, p: Process, term: Term, found: Process) -> Iterator[Step]:
        """Go on in a plain store in which nobody has closed this log yet."""
        what = f"lists term {term[0]}: {found.s}, not closed"
        if term[0] == p.term:  # the newest term
            unseen = self.mutant == "a reader does not look"
            looks = found._replace(at="file" if unseen else "look3") if found.s else found
            yield what, store, memory, looks
        elif self.mutant == "a reader takes what is not settled":
            yield what, store, memory, found
        elif self.gap == "label":
            yield f"{what}, not settled", store, memory, found._replace(settled=False)
        elif self.gap == "help":
            yield what, store, memory, p._replace(at="help", s=found.s, work=(term,))
        else:
            yield f"{what}, waits", store, memory, p._replace(at="read")

    def _help(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        closed = self.arrive(store, ("end", self.end_key(p.work[0]), p.s))
        yield f"helps: closes term {p.work[0][0]} after {p.s}", closed, memory, p._replace(at="walk", work=())

    def _look3(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        newer = any(number > p.term for number, _ in store.terms)
        again = p._replace(at="read", tries=p.tries - 1)
        yield "looks for newer terms", store, memory, again if newer else p._replace(at="file")

    def _file(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        """Read the record, and those before it back to a full one, one at a time."""
        k = p.s - len(p.work)
        rec = self.log(store, p.x).get(k)
        if rec is None or rec.kind == "end":
            yield self._missed(store, memory, p, f"record {k}")
            return
        q = p._replace(work=(*p.work, rec), want=p.want or rec)
        if rec.kind == "delta":
            yield f"reads record {k}", store, memory, q
            return
        table: dict[int, Segment | None] = {}
        for one in q.work:
            table = {**dict(one.change), **table}
        needed = tuple(sorted(names(table.values())))
        if q.want is not None and (table[0], table[1]) != q.want.table:
            raise Broken(f"a reader puts together {table} instead of {q.want.table}")
        if needed:
            yield f"reads record {k}, which is full", store, memory, q._replace(at="bytes", work=needed)
        else:
            yield self._returns(store, memory, p, q.want)

    def _bytes(self, store: Store, memory: Memory, p: Process) -> Iterator[Step]:
        if p.work[0] not in store.segments:
            yield self._missed(store, memory, p, f"segment {p.work[0]}")
        elif p.work[1:]:
            yield f"reads segment {p.work[0]}", store, memory, p._replace(work=p.work[1:])
        else:
            yield self._returns(store, memory, p, p.want)

    def _returns(self, store: Store, memory: Memory, p: Process, rec: Rec | None) -> Step:
        if rec is None:
            raise AssertionError(f"{p.name} has read nothing")
        if store.age == p.age:
            if p.ghost - rec.past - {rec.uid}:
                raise Broken(f"a reader returns {rec.uid} without {p.ghost - rec.past - {rec.uid}}")
            if p.settled:
                store = store._replace(settled=store.settled | {rec.uid})
        return f"returns {rec.uid}{'' if p.settled else ', not settled'}", store, memory, over(p)

    def _missed(self, store: Store, memory: Memory, p: Process, what: str) -> Step:
        """Begin again; call the store damaged if it happens twice at one record."""
        if store.age != p.age:
            return f"misses {what}: the store was replaced", store, memory, over(p)
        if self.mutant == "readers do not begin again":
            raise Broken(f"a reader misses {what}")
        if p.missed == (p.x, p.s):
            raise Broken(f"a reader calls an intact store damaged: {what}")
        again = p._replace(at="read", tries=p.tries - 1, missed=(p.x, p.s))
        return f"misses {what}, begins again", store, memory, again

    # -- the user ---------------------------------------------------------------------------------------------------

    def user(self, world: World, i: int, p: Process) -> Iterator[tuple[str, World]]:
        """Copy, remove and put back whole stores, in one step each."""
        first, second = world.stores
        if p.at == "backup":
            after = world._replace(backup=first._replace(flying=frozenset()))
        elif p.at == "restore":
            age = (first.age[0], first.age[1] + 1)
            backup = world.backup or Store()
            lost = first.lost | (first.segments - backup.segments)
            backup = backup._replace(
                age=age, lost=lost, restored=frozenset(rec.uid for _, rec in backup.recs)
            )
            after = world._replace(stores=(backup, second))
        elif p.at == "remove":
            empty = Store(flying=first.flying, age=(first.age[0] + 1, first.age[1]))
            after = world._replace(stores=(empty, second))
        else:  # copy
            copied = first._replace(flying=frozenset(), age=(second.age[0] + 1, second.age[1]))
            after = world._replace(stores=(first, copied))
        processes = world.processes
        yield p.at, after._replace(processes=(*processes[:i], onward(p), *processes[i + 1 :]))
