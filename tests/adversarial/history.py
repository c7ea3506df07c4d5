"""What really happened to a store: every record that a process tried to create, and what each commit held.

The log's truth is every record below what closes each term's log, whatever was deleted of it meanwhile. From that the
state is computed once more, without the code under test, and compared with what a reader gets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scarctl.state.version import pack
from scarctl.store import Store, read_snapshot, verify
from scarctl.store.format import number_of_record, term_of_log
from scarctl.store.record import Record
from scarctl.store.term import Place
from tests.store.helpers import read_all


class Violated(Exception):
    """A violation of the protocol."""


@dataclass
class Truth:
    """The state of a shard after one record: versions and contents by partition, and the seals."""

    versions: dict[int, int] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    sealed: dict[tuple[int, int], int] = field(default_factory=dict)

    def copy(self) -> Truth:
        return Truth(dict(self.versions), dict(self.contents), dict(self.sealed))


@dataclass
class History:
    """Records by digest with the contents of their commits, acknowledged commits, and promised snapshots."""

    records: dict[str, tuple[Record, dict[int, bytes]]] = field(default_factory=dict)
    places: dict[tuple[int, Place], str] = field(default_factory=dict)
    """Digest of the record at each place of each lane."""
    acknowledged: list[tuple[str, str]] = field(default_factory=list)
    """Writer and digest of each acknowledged commit."""
    promised: dict[str, dict[int, int]] = field(default_factory=dict)

    def copy(self) -> History:
        return History(dict(self.records), dict(self.places), list(self.acknowledged), dict(self.promised))

    def tried(self, path: str, data: bytes, contents: dict[int, bytes]) -> None:
        """Note a request to create a file."""
        parts = path.split("/")
        if len(parts) != 5 or parts[2] != "log":
            return
        term, k = term_of_log(parts[3]), number_of_record(parts[4])
        assert term is not None
        assert k is not None
        place, shard = Place(*term, k), int(parts[1])
        record = Record.parse(data, path, shard=shard, place=place)
        if not record.ends:
            # One in doubt is created again while the writer's next commit is already pending.
            self.records.setdefault(record.digest, (record, contents if record.commits else {}))
            self.places[shard, place] = record.digest

    def check(self, store: Store) -> None:
        """Raise Violated unless the store holds everything that it must hold."""
        report = verify(store, read_data=True)
        if report.problems:
            raise Violated(f"verify: {report.problems[0]}")
        truths = {shard: self._shard(store, shard) for shard in store.shards()}
        common = set.intersection(*(set(t[max(t)].sealed) for t in truths.values()))
        if common:
            newest = max(common)
            self._kept(
                store, truths, {s: t[max(t)].sealed[newest] for s, t in truths.items()}, "the newest seal"
            )
        for name, seqs in self.promised.items():
            if dict(read_snapshot(store, name).seqs) != seqs:
                raise Violated(f"snapshot {name} is another one")
            self._kept(store, truths, seqs, f"snapshot {name}")

    def _shard(self, store: Store, shard: int) -> dict[int, Truth]:
        chain = self._chain(store, shard)
        there = {record.digest for record in chain}
        for who, digest in self.acknowledged:
            if self.records[digest][0].shard == shard and digest not in there:
                raise Violated(
                    f"{who} was told that record {self.records[digest][0].seq} of {shard} was there"
                )
        truths: dict[int, Truth] = {}
        now, epoch = Truth(), 0
        for record in chain:
            if record.epoch < epoch:
                raise Violated(f"record {record.seq} of shard {shard}: epoch {record.epoch} after {epoch}")
            epoch = record.epoch
            now = now.copy()
            if record.first:
                now = Truth() if record.base is None else truths[record.base.seq].copy()
            contents = self.records[record.digest][1]
            now.contents |= contents
            now.versions |= {i: pack(record.epoch, record.step) for i in contents}
            if record.sealed:
                now.versions = {i: pack(record.epoch, record.step) for i in now.versions}
                now.sealed[record.epoch, record.step] = record.seq
            truths[record.seq] = now
        self._compare(store, shard, now, None, "the newest state")
        return truths

    def _chain(self, store: Store, shard: int) -> list[Record]:
        log, chain = store.log(shard), list[Record]()
        for number in log.terms():
            term = log.term(number)
            top = log.top(term)
            count = top.count if top.closed is None else top.closed - 1
            chain += [self.records[self.places[shard, term.place(k)]][0] for k in range(1, count + 1)]
        return chain

    def _kept(
        self, store: Store, truths: dict[int, dict[int, Truth]], seqs: dict[int, int], what: str
    ) -> None:
        for shard, seq in seqs.items():
            self._compare(store, shard, truths[shard][seq], seq, what)

    @staticmethod
    def _compare(store: Store, shard: int, truth: Truth, at: int | None, what: str) -> None:
        state = store.state(shard, at=at)
        found, bad = read_all(store, state)
        if bad:
            raise Violated(f"{what} of shard {shard}: {next(iter(bad.items()))}")
        versions = {i: v for i, v in zip(state.ids.tolist(), state.version.tolist(), strict=True) if v >= 0}
        if found != truth.contents or versions != truth.versions:
            wrong = [i for i in truth.contents if found.get(i) != truth.contents[i]]
            raise Violated(
                f"{what} of shard {shard}: partitions {wrong} are not what was committed; {versions}"
            )
