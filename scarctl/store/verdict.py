"""Keep the verdict of a program's last rehearsal next to its store (docs/FORMAT.md, section 2): for display only.

Before the program's first start there is no store. So the verdict waits in a folder of the user, under the digest of
the store's address, until a session saves there.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scarctl.errors import Corruption, ScarError
from scarctl.store.format import FORMAT, REHEARSAL, Fields, corrupt, dump_json, load_json
from scarctl.store.saved import parse
from scarctl.util.text import printable

if TYPE_CHECKING:
    from scarctl.store.store import Store

log = logging.getLogger("scarctl")

MAX_VERDICT = 16 << 10
_MOST_TEXT = 1000
_TEXTS = {
    "identical": "identical after {} steps",
    "different": "different after {} steps: it does not continue as if it had not been killed",
    "not-deterministic": "not deterministic: two undisturbed runs of {} steps differ",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a rehearsal."""

    verdict: str
    """"identical", "different" or "not-deterministic"."""
    steps: int
    at: str
    """UTC time, in ISO 8601."""
    command: str
    """The command that was rehearsed."""

    @property
    def data(self) -> bytes:
        """The file's content."""
        return dump_json({"format": FORMAT, "kind": "rehearsal", **asdict(self)})

    @staticmethod
    def parse(data: bytes, what: object) -> Verdict:
        """Parse a verdict from its file's bytes, and check every field. Raises Corruption, naming `what`."""
        f = Fields(load_json(data, what, containers=8, values=64), what)
        found = Verdict(f.text("verdict"), f.integer("steps", 1, 1 << 40), f.text("at"), f.text("command"))
        if f.text("kind") != "rehearsal" or found.verdict not in _TEXTS or parse(found.at) is None:
            raise corrupt(what, "it is not the verdict of a rehearsal")
        if len(found.command) > _MOST_TEXT:
            raise corrupt(what, "its command is too long")
        return found

    def __str__(self) -> str:
        """Return "rehearsed on 2026-11-22: identical after 40 steps"."""
        return f"rehearsed on {printable(self.at[:10])}: {_TEXTS[self.verdict].format(self.steps)}"


def short(command: str) -> str:
    """Return a command as a verdict can hold it."""
    return command if len(command) <= _MOST_TEXT else f"{command[: _MOST_TEXT - 4]} ..."


def read_verdict(store: Store) -> Verdict | None:
    """Return the verdict of the last rehearsal; None without one, or with a damaged one, which is logged at INFO.

    Raises AccessDenied, Unavailable.
    """
    try:
        return Verdict.parse(store.blobs.read(REHEARSAL, MAX_VERDICT), store.blobs.where(REHEARSAL))
    except FileNotFoundError:
        return None
    except Corruption as error:
        log.info("%s: the verdict of a rehearsal is ignored: %s", store.url, error.message)
        return None


def write_verdict(store: Store, verdict: Verdict) -> None:
    """Write a verdict, in place of the one before. Raises AccessDenied, Unavailable, Corruption."""
    store.blobs.replace(REHEARSAL, verdict.data)


def waiting_path(digest: str) -> Path:
    """Return where a verdict waits for its store, by the digest of the store's address."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state, "scarctl", "rehearsals", f"{digest}.json")


def keep_waiting(digest: str, verdict: Verdict) -> None:
    """Keep a verdict until a session saves to its store. Raises OSError."""
    path = waiting_path(digest)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_bytes(verdict.data)
    os.replace(new, path)


def bring_verdict(store: Store) -> None:
    """Move a verdict that waits for this store into it. What fails is logged: training does not depend on it."""
    path = waiting_path(store.address.digest)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_VERDICT + 1)
    except OSError:
        return  # the usual case: none waits
    try:
        write_verdict(store, Verdict.parse(data, path))
        path.unlink(missing_ok=True)
    except (ScarError, OSError) as error:
        log.warning("%s: the verdict of its rehearsal stays in %s: %s", store.url, path, error)
