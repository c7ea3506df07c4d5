"""Several processes create one file at the same moment, on each kind of place.

    python -m tests.adversarial.creations [PLACE ...] [--rounds N] [--processes N]

PLACE: local, s3, ftp. A place that scarctl accepts must have one winner in each round, whose bytes are there. One that
has more must be refused, whatever its probe saw: on the FTP server the race is run anyway, to show why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scarctl.errors import MissingGuarantee, ScarError
from scarctl.store import Store
from scarctl.store.backends.address import Address
from scarctl.store.backends.connect import blobs_at
from tests.support.ftp import ftp_server
from tests.support.places import KEY, SECRET, s3_client, s3_server

PLACES = ("local", "s3", "ftp")
_AHEAD = 0.02
"""Seconds until a race begins, by which all processes are ready and wait for the same moment."""


@dataclass
class Result:
    """The outcome of races on one place."""

    refused: bool
    rounds: int = 0
    one_winner: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """Return what must not happen."""
        found = list(self.errors)
        if not self.refused and self.one_winner < self.rounds:
            found.append(
                f"accepted, and {self.rounds - self.one_winner} of {self.rounds} races had several winners"
            )
        return found


class Racers:
    """Processes that create a file on command, each with its own client."""

    def __init__(self, url: str, options: Mapping[str, Any], count: int) -> None:
        start = json.dumps({"url": url, "options": dict(options)})
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name, "--racer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]
        for process in self._processes:
            _say(process, start)
        for process in self._processes:
            _hear(process)

    def race(self, name: str) -> list[str]:
        """Race once. Return each racer's result: "lost", "won" and its bytes, or an error."""
        at = time.monotonic() + _AHEAD
        for process in self._processes:
            _say(process, f"{name} {at}")
        return [_hear(process) for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.communicate()


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def racer() -> None:
    """Run one process of a race. A refused place is used as if it had passed its probe."""
    start = json.loads(sys.stdin.readline())
    blobs = blobs_at(Address.parse(start["url"], start["options"]))
    blobs.exclusive = True
    blobs.top()  # connected before the first race
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        name, at = line.split()
        data = uuid.uuid4().hex
        while time.monotonic() < float(at):
            pass
        try:
            blobs.create_exclusive(name, [data.encode()])
            said = f"won {data}"
        except FileExistsError:
            said = "lost"
        except ScarError as error:
            said = f"error {error.kind}"
        print(said, flush=True)  # noqa: T201


@contextlib.contextmanager
def place(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield address and storage options of a new place."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scarctl-creations-")))
        if kind == "s3":
            endpoint = stack.enter_context(s3_server())
            s3_client(endpoint).create_bucket(Bucket="creations")
            yield (
                "s3://creations/run",
                {"endpoint_url": endpoint, "key": KEY, "secret": SECRET, "anon": False},
            )
        elif kind == "ftp":
            url, _ = stack.enter_context(ftp_server(folder))
            yield f"{url}/run", {}
        else:
            yield str(folder / "run"), {}


def attack(kind: str, *, rounds: int, processes: int) -> Result:
    """Race on a place of this kind. Whether it is refused is found by creating a store there."""
    with place(kind) as (url, options):
        try:
            store = Store.create(url, storage_options=options)
            result = Result(refused=False)
        except MissingGuarantee:
            store = Store.create(url, storage_options=options, assume_single_writer=True)
            result = Result(refused=True)
        store.blobs.prepare("races")
        racers = Racers(url, options, processes)
        try:
            for number in range(rounds):
                name = f"races/{number}"
                said = racers.race(name)
                won = [line.removeprefix("won ") for line in said if line.startswith("won ")]
                there = store.blobs.read(name, 64).decode() if won else ""
                result.rounds += 1
                result.one_winner += won == [there]
                result.errors += [line for line in said if not line.startswith(("won ", "lost"))]
        finally:
            racers.close()
            store.close()
        return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.creations", description=__doc__)
    parser.add_argument("place", nargs="*", help="default: all")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--racer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.racer:
        racer()
        return 0
    failed = False
    for kind in args.place or PLACES:
        result = attack(kind, rounds=args.rounds, processes=args.processes)
        refused = "refused" if result.refused else "accepted"
        print(  # noqa: T201
            f"{kind}: {refused}; {args.processes} processes, "
            f"one winner in {result.one_winner} of {result.rounds} rounds"
        )
        for line in result.violations:
            print(f"VIOLATION {kind}: {line}")  # noqa: T201
            failed = True
    return failed


if __name__ == "__main__":
    sys.exit(main())
