"""Model the store's protocol as a transition system: each visible effect is one step, and any step may be the last.

One shard has two partitions. A record holds what the log up to it means (`table`: the segment of each partition), so a
state is readable if the files that lead to it exist. Each step names the function of scarctl that it models. A dead
process takes no further step, so a crash after every step is among the interleavings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tests.adversarial.protocol_files import Files, Rec, Segment, has_way
from tests.adversarial.search import Broken


class Process(NamedTuple):
    name: str
    at: str
    todo: tuple[str, ...] = ()
    tail: Rec | None = None
    seq: int = -1
    epoch: int = 0
    want: Rec | None = None
    work: tuple[tuple[str, object], ...] = ()
    kept: frozenset[int] = frozenset()
    count: int = 0
    lossy: int = 0
    """Number of answers that may still be lost."""
    tries: int = 3


Step = tuple[str, Files, Process]
ENDED = ("over", "fenced")

MUTANTS = {
    "a plain put instead of exclusive creation": "two openings, one collects",
    "a lost answer is taken for a failure": "lost answers",
    "a lost answer is taken for a success": "lost answers",
    "the ground is not looked at": "a zombie, its successor collects",
    "an opening does not look at the ground": "stale listings of an empty log",
    "the indexes are not looked at": "late requests for the ground",
    "records are deleted in descending order": "stale listings",
    "who misses the ground deletes its segment": "lost answers",
    "segments are deleted before the boundary's record": "back while the other collects",
    "records are deleted before the boundary's record": "back while the other collects",
    "the boundary's index is not written": "back while the other collects",
    "kept states get no index": "back while the other collects",
    "the newest sealed state is not kept": "back while the other collects",
    "snapshots are listed before the boundary is moved": "a snapshot while it collects",
    "a snapshot does not look at the boundary": "a snapshot while it collects",
    "the boundary's index lists what was given up": "back while the other collects",
    "segments of later epochs are deleted": "a collector and its successor",
    "prune deletes segments of the newest epoch": "prune beside an upload",
    "readers do not begin again": "a reader beside a collector",
}
"""Rules left out, and the scenario that shows the consequence."""
PLAIN_PUT = next(iter(MUTANTS))


class Model:
    """`mutant`: one of `MUTANTS`, or none. `stale`: the number of records by which a listing may lag."""

    def __init__(self, mutant: str = "", stale: int = 0) -> None:
        assert mutant in ("", *MUTANTS)
        self.mutant = mutant
        self.stale = stale

    def steps(self, files: Files, p: Process) -> Iterator[Step]:
        """Yield the next possible steps of a process."""
        if p.at not in ENDED:
            yield from getattr(self, f"_{p.at}")(files, p, dict(files.log))

    def arrivals(self, files: Files) -> Iterator[tuple[str, Files]]:
        """Yield requests that arrive at the server after their sender has given up waiting."""
        for seq, rec in files.flying:
            left = files._replace(flying=files.flying - {(seq, rec)})
            if seq not in dict(files.log) or self.mutant == PLAIN_PUT:
                left = _create(left, seq, rec)
            yield f"a late request for record {seq} arrives", left

    # -- a writer ------------------------------------------------------------------------------------------------

    def _next(self, files: Files, p: Process) -> Process:
        """Begin the next word, without a visible effect."""
        if not p.todo:
            return p._replace(at="over", want=None, work=(), kept=frozenset())
        word, todo = p.todo[0], p.todo[1:]
        return p._replace(at=word, todo=todo, want=None, work=(), kept=frozenset())

    def _open(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model Store.state, as StoreWriter._take_over calls it."""
        newest = max(log, default=-1)
        if p.tries == 0:
            yield f"{p.name}: Contention", files, p._replace(at="over")
            return
        for seen in range(max(newest - self.stale, -1), newest + 1):
            tail = log.get(seen)
            if tail is None and seen >= 0:
                continue  # Corruption, or read again
            epoch = (tail.epoch if tail else 0) + 1
            q = p._replace(tail=tail, seq=seen, epoch=epoch, tries=p.tries - 1, count=p.count + 1)
            want = self._record(q, "epoch", tail.table if tail else (None, None))
            yield f"{p.name}: reads the log up to {seen}", files, q._replace(want=want, at="put")

    def _record(self, p: Process, kind: str, table: tuple[Segment | None, Segment | None]) -> Rec:
        past = (*p.tail.past, p.tail.uid) if p.tail else ()
        sealed = p.tail.sealed if p.tail else ()
        seal = p.tail.seal if p.tail else -1
        boundary = p.tail.boundary if p.tail else 0
        if kind == "seal":
            sealed, seal = (*sealed, p.seq + 1), p.seq + 1
        return Rec((p.name, p.count), kind, p.epoch, table, boundary, sealed, seal, p.seq, past)

    def _commit(self, files: Files, p: Process, log: dict[int, Rec], kind: str = "commit") -> Iterator[Step]:
        """Model StoreWriter._segment: the segment is durable under its name, and no record names it."""
        assert p.tail is not None
        p = p._replace(count=p.count + 1)
        segment = (p.epoch, p.name, p.count)
        old = p.tail.table
        table = (segment, segment)
        if kind == "commit":
            table = (segment, old[1]) if p.count % 2 else (old[0], segment)  # type: ignore[assignment]
        want = self._record(p, kind, table)
        written = files._replace(segments=files.segments | {segment})
        yield f"{p.name}: segment of {kind} {p.count}", written, p._replace(want=want, at="put")

    def _seal(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        yield from self._commit(files, p, log, "seal")

    def _compact(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model StoreWriter.compact, which reads copies and writes them again."""
        assert p.tail is not None
        if None not in p.tail.table and set(p.tail.table) <= files.segments:
            yield from self._commit(files, p, log, "compact")
        else:
            yield f"{p.name}: nothing to compact", files, self._next(files, p)

    def _put(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model one request of Blobs.create_exclusive."""
        assert p.want is not None
        seq = p.seq + 1
        there = log.get(seq)
        if there is not None and self.mutant != PLAIN_PUT:
            if there.uid == p.want.uid:
                yield f"{p.name}: record {seq} is its own", files, p._replace(at="ground")
            else:
                yield f"{p.name}: record {seq} is another's", *self._beaten(files, p, log)
            return
        made = _create(files, seq, p.want)
        yield f"{p.name}: creates record {seq} ({p.want.kind})", made, p._replace(at="ground")
        if p.lossy:
            q = p._replace(at="doubt", lossy=p.lossy - 1)
            yield f"{p.name}: creates record {seq} ({p.want.kind}), the answer is lost", made, q
            flying = files._replace(flying=files.flying | {(seq, p.want)})
            yield f"{p.name}: asks for record {seq} ({p.want.kind}), no answer yet", flying, q

    def _doubt(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model FsspecBlobs._look and StoreWriter._settle: an existing file decides; otherwise creation is repeated."""
        assert p.want is not None
        if self.mutant == "a lost answer is taken for a failure":
            yield f"{p.name}: gives up", _drop(files, p.want), self._next(files, p)
        elif self.mutant == "a lost answer is taken for a success":
            yield f"{p.name}: goes on", files, p._replace(at="ground")
        else:
            yield f"{p.name}: looks", files, p._replace(at="put")

    def _beaten(self, files: Files, p: Process, log: dict[int, Rec]) -> tuple[Files, Process]:
        """Model StoreWriter._drop, then Fenced; an opening begins again."""
        assert p.want is not None
        if self._stands(files, p, log):
            files = _drop(files, p.want)
        return files, self._again(p)

    def _again(self, p: Process) -> Process:
        assert p.want is not None
        if p.want.kind == "epoch":
            return p._replace(at="open", want=None)
        return p._replace(at="fenced", want=None, tail=None, work=(), todo=())

    def _stands(self, files: Files, p: Process, log: dict[int, Rec]) -> bool:
        """Model Publisher._is_newest."""
        assert p.want is not None
        if self.mutant == "the ground is not looked at":
            return True
        if self.mutant == "an opening does not look at the ground" and p.want.kind == "epoch":
            return True
        if p.tail is None:
            return max(log, default=0) == 0
        if (p.tail.boundary + 1 if p.tail.boundary else 0) not in log:
            return False
        if self.stale or self.mutant == "the indexes are not looked at":
            return True  # the list may be an old one
        return max(files.index, default=0) <= p.seq + 1 or log[max(log)].boundary <= p.seq + 1

    def _ground(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model StoreWriter._conclude: acknowledged, or fenced."""
        want = p.want
        assert want is not None
        if not self._stands(files, p, log):
            if self.mutant == "who misses the ground deletes its segment":
                files = _drop(files, want)
            yield f"{p.name}: misses the ground", files, self._again(p)
            return
        seq = p.seq + 1
        q = p._replace(tail=want, seq=seq, epoch=want.epoch)
        if want.kind in ("commit", "seal"):
            files = files._replace(acknowledged=files.acknowledged | {(seq, want.uid)})
        q = q._replace(at="list") if want.kind == "boundary" else self._next(files, q)
        yield f"{p.name}: record {seq} counts", files, q

    def _back(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model StoreWriter.roll_back to any kept sealed state (snapshot.is_kept)."""
        assert p.tail is not None
        found = False
        for base in p.tail.sealed:
            if base in log and has_way(log, files.index, base):
                found = True
                q = p._replace(count=p.count + 1, epoch=p.epoch + 1)
                old = log[base]
                want = self._record(q, "roll-back", old.table)
                sealed = tuple(s for s in p.tail.sealed if s <= base)
                want = replace(want, back=base, sealed=sealed, seal=base)
                yield f"{p.name}: will go back to {base}", files, q._replace(want=want, at="put")
        if not found:
            yield f"{p.name}: no way back", files, self._next(files, p)

    # -- collection ----------------------------------------------------------------------------------------------

    def _collect(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model Collector._kept, Collector._pin, ShardLog.put_index: G1."""
        assert p.tail is not None
        kept = {seq for _, seq in files.snapshots if seq <= p.seq}
        if self.mutant != "the newest sealed state is not kept":
            kept |= set(p.tail.sealed[-1:])
        index = {p.seq}
        if self.mutant == "the boundary's index is not written":
            index = set()
        if self.mutant != "kept states get no index":
            index |= {seq for seq in kept if seq in log}
        sealed = tuple(s for s in p.tail.sealed if s in kept or s == p.seq)
        if self.mutant == "the boundary's index lists what was given up":
            sealed = p.tail.sealed
        q = p._replace(count=p.count + 1, kept=frozenset(kept))
        want = replace(self._record(q, "boundary", p.tail.table), boundary=p.seq, sealed=sealed)
        q = q._replace(want=want, at="put")
        files = files._replace(index=files.index | index)
        early = {
            "segments are deleted before the boundary's record": "segment",
            "records are deleted before the boundary's record": "record",
        }.get(self.mutant)
        if early:
            work = tuple(w for w in self._garbage(files, q, log, p.seq, p.tail) if w[0] == early)
            q = q._replace(work=work, at="early" if work else "put")
        yield f"{p.name}: indexes of {sorted(index)}", files, q

    def _early(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        files, done = _delete(files, p.work[0])
        yield (
            f"{p.name}: {done} too early",
            files,
            p._replace(work=p.work[1:], at="early" if p.work[1:] else "put"),
        )

    def _list(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model Collector._give_up after the boundary's record: list the snapshots again, then Collector._garbage."""
        assert p.tail is not None
        boundary = p.tail.boundary
        if self.mutant != "snapshots are listed before the boundary is moved":
            late = {seq for _, seq in files.snapshots if seq <= boundary and seq in log}
            p = p._replace(kept=p.kept | late)
            if self.mutant != "kept states get no index":
                files = files._replace(index=files.index | late)
        work = self._garbage(files, p, log, boundary, p.tail)
        q = p._replace(work=work, at="delete") if work else self._next(files, p)
        yield f"{p.name}: lists {len(work)} files to delete", files, q

    def _garbage(
        self, files: Files, p: Process, log: dict[int, Rec], boundary: int, tail: Rec
    ) -> tuple[tuple[str, object], ...]:
        """Model Collector._garbage."""
        needed = set(tail.table)
        for seq in p.kept | {boundary}:
            if seq in log:
                needed |= set(log[seq].table)
        segments = sorted(
            s
            for s in files.segments
            if s not in needed and (s[0] <= p.epoch or self.mutant == "segments of later epochs are deleted")
        )
        index = sorted(s for s in files.index if s < boundary and s not in p.kept)
        records = sorted(s for s in log if s < boundary and s not in p.kept)
        if self.mutant == "records are deleted in descending order":
            records.reverse()
        return (
            *(("segment", s) for s in segments),
            *(("index", s) for s in index),
            *(("record", s) for s in records),
        )

    def _delete(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model the deletion of one file by Collector._delete or prune."""
        files, done = _delete(files, p.work[0])
        q = p._replace(work=p.work[1:])
        yield f"{p.name}: {done}", files, q if q.work else self._next(files, q)

    def _prune(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model gc.orphans: the segments are listed first."""
        work = tuple(("segment", s) for s in sorted(files.segments))
        yield f"{p.name}: lists segments", files, p._replace(work=work, at="orphans")

    def _orphans(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model gc._reachable, then the rest of the list."""
        newest = log[max(log)]
        epoch = newest.epoch + (self.mutant == "prune deletes segments of the newest epoch")
        needed = {segment for rec in log.values() for segment in rec.table}
        work = tuple(w for w in p.work if w[1] not in needed and w[1][0] < epoch)  # type: ignore[index]
        q = p._replace(work=work, at="delete") if work else self._next(files, p)
        yield f"{p.name}: finds {len(work)} orphans", files, q

    # -- snapshots -----------------------------------------------------------------------------------------------

    def _snap(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model sealed_sets of a state that was just read."""
        sealed = log[max(log)].sealed if log else ()
        for seq in sealed:
            yield f"{p.name}: chooses {seq}", files, p._replace(seq=seq, at="name")
        if not sealed:
            yield f"{p.name}: no sealed state", files, self._next(files, p)

    def _name(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model create_snapshot: S1."""
        made = files._replace(snapshots=files.snapshots | {(p.name, p.seq)})
        yield f"{p.name}: creates the snapshot of {p.seq}", made, p._replace(at="late")

    def _late(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model create_snapshot: S2."""
        unchecked = self.mutant == "a snapshot does not look at the boundary"
        if not unchecked and (log[max(log)].boundary > p.seq or p.seq not in log):
            yield f"{p.name}: is late", files, p._replace(at="unname")
        else:
            kept = files._replace(promised=files.promised | {(p.name, p.seq)})
            yield f"{p.name}: promises {p.seq}", kept, self._next(files, p)

    def _unname(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model delete_snapshot."""
        gone = (p.name, p.seq)
        files = files._replace(snapshots=files.snapshots - {gone}, promised=files.promised - {gone})
        yield f"{p.name}: deletes the snapshot", files, self._next(files, p)

    # -- readers -------------------------------------------------------------------------------------------------

    def _read(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model ShardLog.state, which lists the records."""
        newest = max(log, default=-1)
        if newest < 0 or not p.tries:
            yield f"{p.name}: ends", files, p._replace(at="over")
            return
        for seen in range(max(newest - self.stale, 0), newest + 1):
            yield f"{p.name}: lists up to {seen}", files, p._replace(seq=seen, at="indexes")

    def _indexes(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model ShardLog.indexes."""
        q = p._replace(kept=frozenset(i for i in files.index if i <= p.seq), count=p.seq, tail=None)
        yield f"{p.name}: lists indexes", files, q._replace(at="walk")

    def _walk(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model ShardLog._walk: read a record, and its index if there is one. `count`: the record's number."""
        rec = log.get(p.count)
        if rec is None:
            yield self._missed(files, p, log, f"record {p.count}")
            return
        p = p._replace(tail=p.tail or rec)
        if (p.count in p.kept and p.count in files.index) or rec.back < 0:
            assert p.tail is not None
            work = tuple(("segment", s) for s in dict.fromkeys(p.tail.table) if s is not None)
            yield f"{p.name}: has the state of {p.seq}", files, p._replace(work=work, at="copies")
        else:
            yield f"{p.name}: reads record {p.count}", files, p._replace(count=rec.back)

    def _copies(self, files: Files, p: Process, log: dict[int, Rec]) -> Iterator[Step]:
        """Model Store._read_segment."""
        if not p.work:
            yield f"{p.name}: has read all", files, p._replace(at="over", tail=None)
        elif p.work[0][1] in files.segments:
            yield f"{p.name}: reads a segment", files, p._replace(work=p.work[1:])
        else:
            yield self._missed(files, p, log, f"segment {p.work[0][1]}")

    def _missed(self, files: Files, p: Process, log: dict[int, Rec], what: str) -> Step:
        """Model ShardLog.state and Store._read_again: begin again if the log has moved on; otherwise report damage."""
        if self.mutant == "readers do not begin again" or (max(log) == p.seq and not self.stale):
            raise Broken(f"{p.name} misses {what}")
        again = Process(p.name, "read", p.todo, tries=p.tries - 1)
        return f"{p.name}: misses {what}, begins again", files, again


def _create(files: Files, seq: int, rec: Rec) -> Files:
    return files._replace(log=tuple(sorted({**dict(files.log), seq: rec}.items())))


def _drop(files: Files, rec: Rec) -> Files:
    own = {s for s in rec.table if s is not None and s[1:] == rec.uid}
    return files._replace(segments=files.segments - own)


def _delete(files: Files, what: tuple[str, object]) -> tuple[Files, str]:
    kind, key = what
    if kind == "segment":
        files = files._replace(segments=files.segments - {key})
    elif kind == "index":
        files = files._replace(index=files.index - {key})
    else:
        files = files._replace(log=tuple(item for item in files.log if item[0] != key))
    return files, f"deletes {kind} {key}"
