"""Files that are not what they should be, and names that lead elsewhere: refused, without a wait, and nothing outside
of the store is read, written or deleted.

    python -m tests.adversarial.hostile [CASE ...] [--cases N]

A case is a change of a store or of an arena's folder; commands and calls are then tried on it. `CASE` is part
of a name.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from click.testing import CliRunner
from safetensors.numpy import save_file

from scarctl.arena.arena import Arena
from scarctl.arena.extras import extras_file, parse_extras
from scarctl.arena.folder import arena_folder, host_folder
from scarctl.cli.main import cli
from scarctl.daemon import client
from scarctl.errors import ScarError
from tests.adversarial.hostile_cases import CANARY, Case, Yard, cases
from tests.adversarial.image import make

SECONDS = 20
"""A command that takes longer hangs."""
GOOD_CODES = (0, 2, 3, 10, 11, 12, 13, 14, 15, 16, 17)


class Hang(BaseException):
    """A command does not end."""


# -- what is tried ------------------------------------------------------------------------------------------------


class Attack:
    """Runs cases, and collects `violations`."""

    def __init__(self) -> None:
        self.image = make(0, shards=2, rounds=1)
        self.violations: list[str] = []
        self.commands = 0
        self.codes: dict[int, int] = {}
        self._watched: Path | None = None
        self._touched: list[str] = []
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._watched is not None and event in (
            "open",
            "os.remove",
            "os.rename",
            "os.link",
            "os.mkdir",
            "os.truncate",
        ):
            for path in arguments[:2]:
                if isinstance(path, str | bytes | os.PathLike):
                    real = os.path.realpath(os.fsdecode(path))
                    flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
                    # A link that is not followed, but refused, moved or deleted, leads nowhere. Of files with an
                    # opener of their own the first event does not know the flags; settings may be a link.
                    own = event != "open" or flags & os.O_NOFOLLOW or arguments[1] is not None
                    unfollowed = own and os.path.islink(path)
                    exists = event == "os.mkdir" and os.path.lexists(path)
                    known = os.fsdecode(path) == "scarctl.toml"
                    if Path(real).is_relative_to(self._watched) and not (unfollowed or exists or known):
                        self._touched.append(f"{event} {os.fsdecode(path)!r}")

    def play(self, case: Case) -> None:
        yard = Yard(self.image)
        try:
            save_file({"w": np.arange(4, dtype=np.float32)}, yard.state)
            case.make(yard)
            before = yard.tree()
            unprivileged = "unreadable" in case.name and os.geteuid() == 0
            if unprivileged:
                for path in (yard.root, *yard.root.rglob("*")):
                    os.chown(path, 65534, 65534, follow_symlinks=False)
                os.seteuid(65534)
            self._touched, self._watched = [], yard.outside
            try:
                getattr(self, f"_{case.tried}")(case, yard)
            finally:
                self._watched = None
                if unprivileged:
                    os.seteuid(0)
            if yard.tree() != before:
                self.violations.append(f"{case.name}: something outside has changed")
            if self._touched and "hard link" not in case.name:
                self.violations.append(f"{case.name}: opened outside: {sorted(set(self._touched))[:3]}")
        finally:
            yard.end()

    def _store(self, case: Case, yard: Yard) -> None:
        store, out = str(yard.store), str(yard.root / "work/out.safetensors")
        for arguments in (
            ["verify"],
            ["verify", "--json"],
            ["inspect"],
            ["recover", "--lost", "all", "--output", out],
            ["recover", "--lost", "all", "--mode", "rollback", "--snapshot", "first", "--output", out],
            ["snapshot", "delete", "--yes", "../../outside/secret"],
            ["snapshot", "delete", "--yes", "first"],
            ["export", str(yard.root / "work/all.safetensors")],
            ["recover", "--lost", "0", "--mode", "rollback", "--into", str(yard.state)],
            ["checkpoint", str(yard.state), "--step", "1000"],
        ):
            self._command(case, yard, [*arguments, "--store", store])

    def _arena(self, case: Case, yard: Yard) -> None:
        store = str(yard.store)
        for arguments in (
            ["inspect", "--store", store],
            ["inspect", "--store", store, "--json"],
            ["daemon", "status"],
            ["daemon", "stop", "--all", "--reap"],
            ["recover", "--lost", "0", "--store", store],
        ):
            self._command(case, yard, arguments)
        folder = host_folder(str(yard.base))
        self._call(case, lambda: Arena.share(arena_folder(str(yard.base), yard.id), run_id=yard.id))
        folders = host_folder(str(yard.base)), arena_folder(str(yard.base), yard.id)
        if all(folder.is_dir() and not folder.is_symlink() for folder in folders):  # sessions check this
            place = arena_folder(str(yard.base), yard.id)
            for slot in range(2):
                self._call(case, lambda slot=slot: parse_extras(extras_file(place, slot) or b"", place))
        if "daemon" in case.name or "host" in case.name:
            self._call(case, lambda: client.connect(folder, patience=3).close())
            self._command(case, yard, ["daemon", "stop", "--all"])

    def _state(self, case: Case, yard: Yard) -> None:
        for arguments in (
            ["checkpoint", str(yard.state), "--step", "1", "--store", str(yard.root / "new")],
            ["inspect", "--store", str(yard.root / "new")],
            ["recover", "--lost", "all", "--into", str(yard.state), "--store", str(yard.store)],
        ):
            self._command(case, yard, arguments)

    def _call(self, case: Case, attempt: Callable[[], object]) -> None:
        with _bounded():
            try:
                attempt()
            except ScarError:
                return
            except (Exception, Hang) as error:
                self.violations.append(f"{case.name}: {type(error).__name__}: {error}")

    def _command(self, case: Case, yard: Yard, arguments: Sequence[str]) -> None:
        self.commands += 1
        environ = {"SCARCTL_ARENA_DIR": str(yard.base), "SCARCTL_DAEMON": "0"}
        with (
            contextlib.chdir(yard.root / "work")
            if hasattr(contextlib, "chdir")
            else _chdir(yard.root / "work"),
            _bounded(),
        ):
            done = CliRunner(env=environ).invoke(cli, list(arguments))
        self.codes[done.exit_code] = self.codes.get(done.exit_code, 0) + 1
        shown = " ".join(arguments).replace(str(yard.root), "")
        output = done.stdout + done.stderr
        if done.exit_code not in GOOD_CODES or "unexpected" in output:
            self.violations.append(f"{case.name}: {shown!a} ends with {done.exit_code}: {output[-300:]!a}")
        if CANARY in output:
            self.violations.append(f"{case.name}: {shown!a} shows what lies outside")
        if not all(line.isprintable() for line in output.split("\n")) or "\nscarctl: all is well" in output:
            self.violations.append(f"{case.name}: {shown!a} sends control characters: {output[-300:]!a}")


@contextlib.contextmanager
def _chdir(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    def hang(number: int, frame: FrameType | None) -> None:
        raise Hang(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.hostile", description=__doc__)
    parser.add_argument("case", nargs="*", help="part of a case's name; default: all")
    parser.add_argument("--cases", type=int, default=10_000, help="at most")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("scarctl").addHandler(logging.NullHandler())
    attack, started, count = Attack(), time.monotonic(), 0
    for case in cases():
        if count < args.cases and (not args.case or any(part in case.name for part in args.case)):
            attack.play(case)
            count += 1
    for line in attack.violations[:60]:
        print(f"VIOLATION {line}")  # noqa: T201
    codes = ", ".join(f"{code}: {n}" for code, n in sorted(attack.codes.items()))
    print(  # noqa: T201
        f"{count} cases, {attack.commands} commands in {time.monotonic() - started:.0f} s; exit codes {codes}; "
        f"{len(attack.violations)} violations"
    )
    return bool(attack.violations)


if __name__ == "__main__":
    sys.exit(main())
