"""Test whether a place for a store creates files exclusively.

A commit is the exclusive creation of one small file. Some servers silently ignore the condition, so a store is refused
unless the second of two creations fails. A file system that checks first and then writes passes that test, and often
races, too. Such file systems are known (`scarctl.store.backends.exclusive`), and refused before any test.
"""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from dataclasses import dataclass, field
from typing import Any

from scarctl.errors import MissingGuarantee, ScarError
from scarctl.store.backends.base import Blobs
from scarctl.store.format import TEMPORARY, Fields

RACERS = 16
ROUNDS = 50

_LEFT_OVER = re.compile(r"probe-[0-9a-f]{32}(-race-[0-9]+)?", re.ASCII)


def is_left_over(name: str) -> bool:
    """Return whether a name at the top of a store belongs to a file left by a crash or a killed probe."""
    return name.startswith(TEMPORARY) or _LEFT_OVER.fullmatch(name) is not None


def probe_name() -> str:
    """Return a unique name for a file of a probe."""
    return f"probe-{uuid.uuid4().hex}"


def probe(blobs: Blobs, assume_single_writer: bool, *, rounds: int = 0) -> dict[str, Any]:
    """Test a place, and return its entry for `scarctl.json`: `exclusive_create`, and `assumed` if that may be wrong.

    rounds: number of races, for servers that may check first and then write.

    Raises MissingGuarantee if exclusive creation fails, unless `assume_single_writer`; AccessDenied; Unavailable.
    """
    name = probe_name()
    why = blobs.why_not_exclusive() or create_twice(blobs, name)
    if why is None and rounds:
        done = race(blobs, f"{name}-", rounds=rounds)
        why = done.problems[0] if done.problems else None
    if why is None:
        return {"exclusive_create": True, "assumed": False}
    if not assume_single_writer:
        raise _not_exclusive(blobs, why)
    return {"exclusive_create": False, "assumed": True}


def exclusive_here(blobs: Blobs, found: object, what: object, *, strict: bool = False) -> bool:
    """Return whether a remote place creates exclusively, by the entry of `probe` and by its file system.

    strict: the store is opened for writing. If the entry, from an earlier version's probe, contradicts the known
        properties of the file system, raise MissingGuarantee.

    Raises Corruption if the entry is malformed.
    """
    probed = True if found is None else Fields(found, what).flag("exclusive_create")
    why = blobs.why_not_exclusive()
    if probed and why and strict:
        raise _not_exclusive(blobs, why)
    return probed and why is None


def _not_exclusive(blobs: Blobs, why: str) -> MissingGuarantee:
    return MissingGuarantee(
        f"{blobs.where('')}: this store cannot create a file exclusively: {why}",
        hint="two writers would overwrite each other's commits. If there is never a second writer, use "
        "assume_single_writer (--assume-single-writer)",
    )


def create_twice(blobs: Blobs, name: str) -> str | None:
    """Create a file twice. Return None if only the first creation succeeds, otherwise a description of the fault."""
    first, second = b"first " + uuid.uuid4().bytes, b"second " + uuid.uuid4().bytes
    try:
        blobs.create_exclusive(name, [first])
        try:
            blobs.create_exclusive(name, [second])
        except FileExistsError:
            pass
        else:
            return "the second creation overwrote the first"
        found = blobs.read(name, 64)
        return None if found == first else "the second creation failed, and changed the file"
    except MissingGuarantee as error:
        return error.message
    finally:
        with contextlib.suppress(ScarError, OSError):
            blobs.delete(name)


@dataclass
class Races:
    """Counts of outcomes of creating one file from several threads at once."""

    rounds: int = 0
    one_winner: int = 0
    """Rounds in which exactly one racer created the file, with its own bytes."""
    problems: list[str] = field(default_factory=list)


def race(blobs: Blobs, prefix: str, *, racers: int = RACERS, rounds: int = ROUNDS) -> Races:
    """Have `racers` threads create the same file at the same moment, `rounds` times. prefix: start of its name.

    Raises the first error other than that of a racer that loses.
    """
    done = Races()
    for number in range(rounds):
        name = f"{prefix}race-{number}"
        winners, errors = _one_round(blobs, name, racers)
        done.rounds += 1
        try:
            there = blobs.read(name, 64)
        except FileNotFoundError:
            there = b""
        if errors:
            raise errors[0]
        if len(winners) == 1 and there == winners[0]:
            done.one_winner += 1
        else:
            what = f"{len(winners)} of {racers} racers won"
            done.problems.append(what if len(winners) != 1 else "the file is not the winner's")
        with contextlib.suppress(FileNotFoundError):
            blobs.delete(name)
    return done


def _one_round(blobs: Blobs, name: str, racers: int) -> tuple[list[bytes], list[BaseException]]:
    winners: list[bytes] = []
    errors: list[BaseException] = []
    gate = threading.Barrier(racers)

    def run(number: int) -> None:
        data = f"racer {number} {uuid.uuid4().hex}".encode()
        try:
            gate.wait()
            blobs.create_exclusive(name, [data])
            winners.append(data)
        except FileExistsError:
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,), name="scarctl-racer") for k in range(racers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        # After an interrupt, waiting racers would wait for the others forever, and the process for them.
        gate.abort()
        for thread in threads:
            if thread.is_alive():
                thread.join()
        raise
    return winners, errors
