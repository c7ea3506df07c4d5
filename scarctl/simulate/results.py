"""Keep a study's results in a file, one line of JSON per trial, so that a stopped study can continue.

The first line names the study. A last line without a newline, from a process that was killed, is cut off.
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
    """Results by trial number, including those already in the file. One process at a time may open a file."""

    def __init__(self, path: Path | None, study: dict[str, Any]) -> None:
        """Open `path`; None: keep results in memory only. study: the values that results depend on.

        Raises UsageError for the file of another study, Contention (another process has it open), Corruption,
        AccessDenied.
        """
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
        """Add a result, and append it to the file."""
        self.by_trial[result["trial"]] = result
        self._write(result)

    def close(self) -> None:
        """Close the file. May be called twice."""
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
            raise UsageError(f"{path} is not a file of results", hint="give another one; it was not changed")
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
                    f"{path}: line {number} is not a result", hint="give another file, or repair it"
                )
            else:
                self.by_trial[found["trial"]] = found
        os.ftruncate(self._file, len(whole))
        if not lines:
            self._write(head)


def _check_head(path: Path, found: Any, head: dict[str, Any]) -> None:
    if not isinstance(found, dict) or found.get("kind") != "simulate":
        raise UsageError(f"{path} is not a file of results", hint="give another one; it was not changed")
    for name, value in head.items():
        before = found.get(name)
        if before != value:
            what = (
                "the workload's program has changed"
                if name == "source"
                else f"{name} was {before!r}, and is {value!r}"
            )
            raise UsageError(
                f"{path} has the results of another study: {what}",
                hint="give another file; only --trials and --jobs may change",
                kind="other-study",
            )
