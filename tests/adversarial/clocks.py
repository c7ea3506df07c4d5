"""Clocks that are a day off, and listings that are not up to date: nothing changes, but that data are kept longer.

    python -m tests.adversarial.clocks --cases 400

Half of the cases play writers one after the other, with right clocks and then with clocks (of the processes, and of the
file system's times) a day ahead or behind, each its own: they must do the same operations on the same files and leave
the same state. In the other half every listing lags behind by up to so many operations, but that of the snapshots: who
makes one has to know the newest record, and who collects the newest snapshot.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from scarctl.errors import Corruption
from scarctl.store import Store
from tests.adversarial.actors import Actor
from tests.adversarial.history import Violated
from tests.adversarial.races import PLACES, SCRIPTS, Case, Place, _go_on
from tests.store.helpers import memory_folder, summary

DAY = 86_400
_READS = frozenset(("reader", "ranges", "read", "has"))
_UNIQUE = re.compile(r"[0-9a-f]{32,}")


@contextmanager
def clock(offset: float) -> Iterator[None]:
    """Shift the process's clock by so many seconds. Elapsed time stays right, as with monotonic clocks."""
    right = time.time

    def shifted_time() -> float:
        return right() + offset

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.fromtimestamp(shifted_time(), tz)

    shifted = mock.Mock(wraps=datetime, datetime=Shifted, timezone=datetime.timezone)
    with mock.patch("time.time", shifted_time), mock.patch("scarctl.store.term.datetime", shifted):
        yield


def shift_times(folder: Path, rng: random.Random) -> None:
    """Shift the times of every file, each by another span."""
    for path in folder.rglob("*"):
        when = time.time() + rng.uniform(-DAY, DAY)
        os.utime(path, (when, when))


def _played(case: Case, place: Place, offsets: Sequence[float]) -> tuple[list[str], Any]:
    """Return the operations of consecutive writers, and the state that they leave."""
    url, history, done = place.copy(), place.history.copy(), []
    rng = random.Random(case.seed)
    try:
        for i, (script, offset) in enumerate(zip(case.scripts, offsets, strict=True)):
            actor = Actor(f"writer-{i}", Store.open(url), history, case.seed + i, gate=done.append)
            if offset and case.place == "local":
                shift_times(Path(url), rng)
            with clock(offset):
                actor.play(SCRIPTS[script])
            if actor.lost:
                raise Violated(f"{actor.name}: {actor.lost}")
        store = Store.open(url)
        history.check(store)
        years = {record.created[:4] for record, _ in history.records.values()}
        assert years <= {str(datetime.date.today().year + n) for n in (-1, 0, 1)}
        states = [_UNIQUE.sub("", repr(summary(store.state(shard)))) for shard in store.shards()]
        names = sorted(f"{_UNIQUE.sub('', name)} {size}" for name, size in _files(store))
        # Pieces are read ahead by other threads, in any order; everything else is done in one.
        reads = sorted(word for word in done if word in _READS)
        return [*(word for word in done if word not in _READS), *reads], (states, names)
    finally:
        place.remove(url)


def _files(store: Store) -> Iterator[tuple[str, int]]:
    for folder in [f"lanes/{s}/{kind}" for s in store.shards() for kind in ("seg", "terms")]:
        yield from ((f"{folder}/{name}", size) for name, size in store.blobs.files(folder))


def play_clocks(case: Case, place: Place) -> Counter[str]:
    """Compare right and wrong clocks. Raises Violated if there is a difference."""
    rng = random.Random(case.seed)
    right = _played(case, place, [0] * len(case.scripts))
    wrong = _played(case, place, [rng.choice((-DAY, DAY, DAY / 2)) for _ in case.scripts])
    if right != wrong:
        raise Violated("with other clocks something else is done, or there")
    return Counter({"with other clocks": 1, "operations compared": len(right[0])})


class Past:
    """The listings of a store's folders at each operation."""

    def __init__(self, lag: int, rng: random.Random) -> None:
        self.lag, self.rng, self.now = lag, rng, 0
        self.listings: dict[str, list[tuple[int, list[tuple[str, int]]]]] = {}


class Lagging:
    """Blobs whose listings may be up to `past.lag` operations old."""

    def __init__(self, inner: Any, past: Past) -> None:
        self.inner, self.past = inner, past
        self.stale = 0

    def _changes(self, name: str, call: Any, *args: Any) -> Any:
        past, folder = self.past, name.rpartition("/")[0]
        past.listings.setdefault(folder, [(past.now, self.inner.files(folder))])
        try:
            return call(name, *args)
        finally:
            past.now += 1
            past.listings[folder].append((past.now, self.inner.files(folder)))

    def create_exclusive(self, name: str, parts: Any) -> None:
        self._changes(name, self.inner.create_exclusive, parts)

    def settle(self, name: str, data: bytes) -> bool:
        there: bool = self._changes(name, self.inner.settle, data)
        return there

    def delete(self, name: str) -> None:
        self._changes(name, self.inner.delete)

    @contextmanager
    def writer(self, name: str) -> Iterator[Any]:
        with self.inner.writer(name) as out:
            commit = out.commit
            out.commit = lambda: self._changes(name, lambda _: commit())
            yield out

    def read(self, name: str, limit: int) -> bytes:
        self.past.now += 1
        data: bytes = self.inner.read(name, limit)
        return data

    def files(self, folder: str) -> list[tuple[str, int]]:
        past = self.past
        past.now += 1
        found: list[tuple[str, int]] = self.inner.files(folder)
        if folder == "snapshots":
            return found
        seen = past.now - past.rng.randint(0, past.lag)
        old = [listing for when, listing in past.listings.get(folder, []) if when <= seen]
        listing = old[-1] if old else past.listings.get(folder, [(0, found)])[0][1]
        self.stale += listing != found
        return listing

    def names(self, folder: str) -> list[str]:
        return [name for name, _ in self.files(folder)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def play_stale(case: Case, place: Place) -> Counter[str]:
    """Run writers, each taking over from the one before, and readers. Raises Violated."""
    url, history = place.copy(), place.history.copy()
    counts: Counter[str] = Counter({"with stale listings": 1})
    rng = random.Random(case.seed)
    past = Past(rng.choice((3, 10, 40)), rng)
    try:
        actors = []
        for i, script in enumerate(case.scripts):
            store = Store.open(url)
            lagging = store.blobs = Lagging(store.blobs, past)
            actor = Actor(f"writer-{i}", store, history, case.seed + i, gate=_go_on)
            actors.append(actor)
            try:
                actor.play([word for word in SCRIPTS[script] if word not in ("snap", "close")])
            except Violated as error:
                # An error about a file that a listing still shows does no harm. A false success would.
                if not isinstance(error.__cause__, Corruption):
                    raise
                counts["gave up over a stale listing"] += 1
            counts["listings that were stale"] += lagging.stale
            counts.update(actor.counts)
            history.check(Store.open(url))
        if sum(actor.is_writer() for actor in actors) > 1:
            raise Violated("two writers")
        history.check(Store.open(url))
        newest = Actor("the next", Store.open(url), history, case.seed, gate=_go_on)
        newest.play(("open", "commit", "collect", "close"))
        history.check(Store.open(url))
        if newest.lost:
            raise Violated(f"the next writer: {newest.lost}")
    finally:
        place.remove(url)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases. Return 1 after a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.clocks", description=__doc__)
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="begin with this case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end when this time is over")
    args = parser.parse_args(argv)
    folder = memory_folder()
    started = time.monotonic()
    counts: Counter[str] = Counter()
    failed = 0
    try:
        places = {kind: Place(kind, folder) for kind in PLACES}
        for number in range(args.first, args.cases):
            if time.monotonic() - started > args.seconds:
                break
            rng = random.Random(f"{args.seed}/{number}")
            names = tuple(rng.choices(list(SCRIPTS), k=rng.choice((1, 2, 3))))
            case = Case(number, PLACES[number // 2 % 2], names, (), 0, rng.getrandbits(32))
            try:
                play = play_stale if number % 2 else play_clocks
                counts.update(play(case, places[case.place]))
            except Violated as error:
                failed += 1
                again = f"--seed {args.seed} --first {number} --cases {number + 1}"
                print(f"{case}\n  {error}\nagain: python -m tests.adversarial.clocks {again}", flush=True)  # noqa: T201
    finally:
        shutil.rmtree(folder)
    for what, count in counts.items():
        print(f"{what:45}{count:>10,}")  # noqa: T201
    print(f"seed {args.seed}: {failed} violations, {time.monotonic() - started:.0f} s")  # noqa: T201
    return failed > 0


if __name__ == "__main__":
    logging.getLogger("scarctl").setLevel(logging.ERROR)
    sys.exit(main())
