"""Keep the control plane in a folder that all servers reach: no other service.

Record e is the file `e.json`. It is created exclusively, so that of two who change record e - 1 one succeeds. A session
is a counter that its server writes. It has ended for an observer who has not seen it change for longer than the server
waits until it stops; each measures with its own clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from pathlib import Path

from examples.parameter_server.roles import SESSION, Record

MARGIN = 1.1
"""Factor by which others wait longer than the server itself."""


class FolderControl:
    """One server's, or one worker's, connection. All methods raise OSError while the folder is away."""

    def __init__(self, folder: Path, name: str = "") -> None:
        """name: the server; "" only reads."""
        self._folder, self._name, self._beats = folder, name, 0
        self._seen: dict[str, tuple[str, float]] = {}

    @staticmethod
    def make(folder: Path) -> None:
        """Make the folder, with a record of no server."""
        (folder / "alive").mkdir(parents=True)
        FolderControl(folder)._create(Record(0, (), frozenset()))

    def read(self) -> Record:
        """Return the newest record."""
        newest = max(int(name.stem) for name in self._folder.glob("*.json"))
        found = json.loads((self._folder / f"{newest}.json").read_text(encoding="ascii"))
        return Record(newest, tuple(found["chain"]), frozenset(found["synced"]))

    def swap(self, record: Record) -> bool:
        """Create the record that follows another one. Return whether no other server has."""
        try:
            self._create(record)
        except FileExistsError:
            return False
        return True

    def _create(self, record: Record) -> None:
        temporary = self._folder / f".{uuid.uuid4().hex}"
        temporary.write_text(
            json.dumps({"chain": record.chain, "synced": sorted(record.synced)}), encoding="ascii"
        )
        try:
            os.link(temporary, self._folder / f"{record.epoch}.json")
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def beat(self) -> None:
        """Keep this server's session."""
        self._beats += 1
        temporary = self._folder / "alive" / f".{self._name}"
        temporary.write_text(f"{os.getpid()} {self._beats}", encoding="ascii")
        temporary.rename(self._folder / "alive" / self._name)

    def alive(self) -> set[str]:
        """Return the servers whose sessions have not ended, as far as this one has seen."""
        now, found = time.monotonic(), set[str]()
        for path in (self._folder / "alive").glob("[!.]*"):
            beat = path.read_text(encoding="ascii")
            last, since = self._seen.get(path.name, ("", now))
            if beat != last:
                since = now
            self._seen[path.name] = beat, since
            if now - since < SESSION * MARGIN:
                found.add(path.name)
        return found
