"""Test the guarantees of a place for a store, and measure its speed.

All files are created in a separate folder, and deleted at the end.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypedDict

from scarctl.errors import NoStore, ScarError, Unavailable
from scarctl.store.backends.address import Address
from scarctl.store.backends.base import Blobs
from scarctl.store.backends.connect import blobs_at
from scarctl.store.backends.probe import RACERS, ROUNDS, create_twice, probe_name, race
from scarctl.store.foreign import refuse_foreign
from scarctl.util.document import Document
from scarctl.util.text import counted

SMALL_BYTES = 1_000
"""About as long as a record."""
SMALL_COUNT = 30
LARGE_BYTES = 32 << 20
SECONDS = 60.0
"""Longest duration of all tests."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check(Document):
    """A guarantee of a place for stores."""

    name: str
    ok: bool
    detail: str
    needed: bool = True
    """Whether commits rely on it."""


@dataclass(frozen=True, slots=True)
class Latency(Document):
    """Seconds of one small request."""

    median: float
    p95: float

    @staticmethod
    def of(seconds: list[float]) -> Latency:
        ordered = sorted(seconds)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        return Latency(round(ordered[len(ordered) // 2], 6), round(p95, 6))


class Races(TypedDict, total=False):
    """Races of several writers for one name. Empty if none was held."""

    racers: int
    rounds: int
    one_winner: int


@dataclass(slots=True)
class Diagnosis(Document):
    """`scarctl doctor --store S`."""

    COMPUTED: ClassVar = ("sound", "exclusive")
    where: str
    local: bool
    has_store: bool
    checks: list[Check] = field(default_factory=list)
    races: Races = field(default_factory=Races)
    small_put_seconds: Latency | None = None
    small_get_seconds: Latency | None = None
    write_bytes_per_second: int | None = None
    read_bytes_per_second: int | None = None
    left_behind: list[str] = field(default_factory=list)
    """Files that could not be deleted."""

    @property
    def sound(self) -> bool:
        """Whether the place has all guarantees that commits rely on."""
        return all(check.ok for check in self.checks if check.needed)

    @property
    def exclusive(self) -> bool:
        """Whether exactly one of several creations of a file succeeds."""
        return all(check.ok for check in self.checks if check.name.startswith("exclusive"))


def diagnose(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    rounds: int = ROUNDS,
    large_bytes: int = LARGE_BYTES,
    progress: Progress | None = None,
    seconds: float = SECONDS,
) -> Diagnosis:
    """Test the place at `url`, which may have a store already.

    rounds: number of races.
    large_bytes: size of the file for measuring bandwidth.
    progress: called with the name of the next test.
    seconds: time limit for a remote place.

    Raises NoStore (no such bucket, a file, or other files), Corruption (a store without its settings), UsageError,
    AccessDenied, Unavailable. A missing guarantee is not an error: see `Diagnosis.sound`.
    """
    address = Address.parse(url, storage_options)
    blobs, other = blobs_at(address), blobs_at(address, apart=True)
    with _ends((blobs, other), address, seconds):
        return _diagnose(blobs, other, address, rounds, large_bytes, progress)


@contextmanager
def _ends(clients: tuple[Blobs, ...], address: Address, seconds: float) -> Iterator[None]:
    """End all waiting for the place after `seconds`, or after an interrupt; the cleanup's, too."""
    late = threading.Event()

    def hurry() -> None:
        late.set()
        for blobs in clients:
            blobs.hurry()

    timer = threading.Timer(seconds, hurry)
    timer.daemon = True
    timer.start()
    try:
        yield
    except ScarError as error:
        if not late.is_set():
            raise
        raise Unavailable(
            f"{address.shown}: the test did not end within {seconds:g} s; last: {error.message}",
            hint="the place is too slow for a store, or does not answer; fewer --rounds take less time",
        ) from None
    finally:
        timer.cancel()
        timer.join()


def _diagnose(
    blobs: Blobs, other: Blobs, address: Address, rounds: int, large_bytes: int, progress: Progress | None
) -> Diagnosis:
    """Test with `blobs`, and with `other` as another client."""
    refuse_foreign(address, blobs, "no store would be made here: give a new folder, or a store's")
    found = Diagnosis(str(address.root or address.shown), address.root is not None, blobs.has("scarctl.json"))
    report = progress or (lambda _: None)
    with _folder(blobs, address, found) as folder:
        report("creating the same file twice")
        why = blobs.why_not_exclusive() or create_twice(blobs, f"{folder}/twice")
        found.checks.append(
            Check("exclusive-create", why is None, why or "creating a file twice fails the second time")
        )
        blobs.exclusive = other.exclusive = why is None
        if why is None:
            report(f"{RACERS} racers, {counted(rounds, 'round')}")
            found.checks.append(_races(blobs, folder, rounds, found))
        report("reading and listing after writing")
        found.checks.append(_read_after_write(blobs, folder))
        found.checks += [_list_after_write(blobs, other, folder), _seen_absent(blobs, other, folder)]
        found.checks.append(_unfinished(blobs, folder))
        other.close()
        report("latency")
        found.small_put_seconds, found.small_get_seconds = _latency(blobs, folder)
        report("bandwidth")
        found.checks.append(_bandwidth(blobs, folder, large_bytes, found))
    return found


@contextmanager
def _folder(blobs: Blobs, address: Address, found: Diagnosis) -> Iterator[str]:
    """Yield a folder for test files, and delete it afterwards, as well as the store's folder and its parents if new."""
    root = address.root
    new = [] if root is None else [path for path in (root, *root.parents) if not path.exists()]
    folder = probe_name()
    try:
        blobs.begin()
        blobs.prepare(folder)
        yield folder
    except BaseException:
        blobs.hurry()  # the caller ends with an error, and must not wait for the cleanup
        raise
    finally:
        with contextlib.suppress(ScarError, NoStore):
            for name, _ in blobs.files(folder):
                try:
                    blobs.delete(f"{folder}/{name}")
                except FileNotFoundError:
                    continue
                except ScarError:
                    found.left_behind.append(blobs.where(f"{folder}/{name}"))
        if address.root is not None:
            with contextlib.suppress(OSError):
                os.rmdir(address.root / folder)
                for path in new:
                    os.rmdir(path)
        blobs.close()


def _races(blobs: Blobs, folder: str, rounds: int, found: Diagnosis) -> Check:
    done = race(blobs, f"{folder}/", rounds=rounds)
    found.races = {"racers": RACERS, "rounds": done.rounds, "one_winner": done.one_winner}
    detail = (
        f"{RACERS} writers at once: exactly one won in {done.one_winner} of {counted(done.rounds, 'round')}"
    )
    if done.problems:
        detail += f" ({done.problems[0]})"
    return Check("exclusive-races", done.one_winner == done.rounds, detail)


def _read_after_write(blobs: Blobs, folder: str) -> Check:
    stale = 0
    for number in range(10):
        data, name = os.urandom(SMALL_BYTES), f"{folder}/read-{number}"
        blobs.create_exclusive(name, [data])
        try:
            stale += blobs.read(name, len(data)) != data
        except FileNotFoundError:
            stale += 1
    return Check("read-after-write", not stale, f"{10 - stale} of 10 reads returned the bytes just written")


def _list_after_write(blobs: Blobs, other: Blobs, folder: str) -> Check:
    """List a folder after this and another client have created and deleted a file there."""
    stale = 0
    for number in range(10):
        name, writer = f"list-{number}", (blobs, other)[number % 2]
        writer.create_exclusive(f"{folder}/{name}", [b"x"])
        stale += (name, 1) not in blobs.files(folder)
        writer.delete(f"{folder}/{name}")
        stale += name in dict(blobs.files(folder))
    detail = f"{20 - stale} of 20 listings were up to date, half of them after another client's change"
    return Check("list-after-write", not stale, detail)


def _seen_absent(blobs: Blobs, other: Blobs, folder: str) -> Check:
    """Look for a file before and after another client has created it."""
    stale = 0
    for number in range(5):
        name = f"{folder}/absent-{number}"
        blobs.has(name)
        other.create_exclusive(name, [b"x"])
        stale += not blobs.has(name)
    detail = f"{5 - stale} of 5 files that another client created were seen at once"
    return Check("absent-then-there", not stale, detail, needed=False)


def _unfinished(blobs: Blobs, folder: str) -> Check:
    with blobs.writer(f"{folder}/unfinished") as out:
        out.write(os.urandom(SMALL_BYTES))
    there = blobs.has(f"{folder}/unfinished")
    detail = "a file whose writer gives up " + ("appears nevertheless" if there else "does not appear")
    return Check("nothing-unfinished", not there, detail)


def _latency(blobs: Blobs, folder: str) -> tuple[Latency, Latency]:
    puts, gets = [], []
    for number in range(SMALL_COUNT):
        name, data = f"{folder}/small-{number}", os.urandom(SMALL_BYTES)
        started = time.perf_counter()
        blobs.create_exclusive(name, [data])
        written = time.perf_counter()
        blobs.read(name, len(data))
        puts.append(written - started)
        gets.append(time.perf_counter() - written)
    return Latency.of(puts), Latency.of(gets)


def _bandwidth(blobs: Blobs, folder: str, size: int, found: Diagnosis) -> Check:
    block, name = os.urandom(min(size, 4 << 20)), f"{folder}/large"
    started = time.perf_counter()
    with blobs.writer(name) as out:
        for start in range(0, size, len(block)):
            out.write(memoryview(block)[: size - start])
        out.commit()
    found.write_bytes_per_second = int(size / max(time.perf_counter() - started, 1e-9))
    buffer = bytearray(size)
    started = time.perf_counter()
    with blobs.reader(name) as file:
        file.read_into(0, memoryview(buffer))
        found.read_bytes_per_second = int(size / max(time.perf_counter() - started, 1e-9))
        wrong = sum(
            buffer[start : start + len(block)] != block[: size - start]
            for start in range(0, size, len(block))
        )
        for start in range(0, size, max(1, size // 7)):
            stop = min(size, start + 777)
            wrong += file.read(start, stop) != buffer[start:stop]
    return Check("range-reads", not wrong, "every range has the bytes that were written")
