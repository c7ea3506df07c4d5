"""The file of a study's results: one line of JSON per trial, so that a study that was stopped goes on.

The first line says which study it is of. A last line without its end is what a killed process was writing: it is cut
off.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from scarctl.errors import AccessDenied, Contention, Corruption, UsageError

FORMAT = 1


class Results:
    """Results by the number of their trial; with a file, those that it has already too. One process at a time."""

    def __init__(self, path: Path | None, study: dict[str, Any]) -> None:
        """`study`: what results depend on. Raises UsageError for the file of another study, Contention, Corruption."""
        self.by_trial: dict[int, dict[str, Any]] = {}
        self._path = path
        self._file = -1
        if path is None:
            return
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except PermissionError:
            raise AccessDenied(f"{path}: permission denied") from None
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}", hint="give the path of a file") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(path, {"format": FORMAT, "kind": "simulate", **study})
        except BlockingIOError:
            self.close()
            raise Contention(f"{path}: another simulation writes to it", hint="give another file") from None
        except BaseException:
            self.close()
            raise

    def add(self, result: dict[str, Any]) -> None:
        """Take a result, and write it down."""
        self.by_trial[result["trial"]] = result
        self._write(result)

    def close(self) -> None:
        """Let go of the file. The second time does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, line: dict[str, Any]) -> None:
        if self._file >= 0:
            data = memoryview(json.dumps(line).encode() + b"\n")
            while data:
                data = data[os.write(self._file, data) :]

    def _read(self, path: Path, head: dict[str, Any]) -> None:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if not lines and len(content) > len(whole) and not json.dumps(head).encode().startswith(content):
            raise UsageError(f"{path} is no file of results", hint="give another one; it was not changed")
        found: Any = None
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if number == 1:
                _check_head(path, found, head)
            elif not isinstance(found, dict) or not isinstance(found.get("trial"), int):
                raise Corruption(
                    f"{path}: line {number} is no result", hint="give another file, or repair it"
                )
            else:
                self.by_trial[found["trial"]] = found
        os.ftruncate(self._file, len(whole))
        if not lines:
            self._write(head)


def _check_head(path: Path, found: Any, head: dict[str, Any]) -> None:
    if not isinstance(found, dict) or found.get("kind") != "simulate":
        raise UsageError(f"{path} is no file of results", hint="give another one; it was not changed")
    for name, value in head.items():
        if found.get(name) != value:
            what = (
                "the workload's program is another"
                if name == "source"
                else f"{name} was {found.get(name)!r}, is {value!r}"
            )
            raise UsageError(
                f"{path} has the results of another study: {what}",
                hint="give another file; only --trials and --jobs may change",
                kind="other-study",
            )
