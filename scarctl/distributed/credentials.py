"""Read what daemons of other hosts need to recognize this host: the secret in a file, and the files of TLS.

Members have no process group over which a secret could travel. Ranks have one, but no later start has the secret that
was drawn for an earlier one. With the same file on each host, the store's id takes the place of a start's name: then
also hosts that do not take part in a start recognize each other. For a store on a disk of one machine it is the id of
the store on this machine: a copy of the folder on another machine has the same id, but a future of its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from scarctl.arena.header import boot_id
from scarctl.config import SessionSettings
from scarctl.errors import UsageError
from scarctl.peers.secret import fingerprint, read_secret, secret_of_start
from scarctl.peers.tls import Tls
from scarctl.store import Store
from scarctl.util.file_system import disk_type

MAKE_SECRET = "(umask 077; openssl rand -hex 32 > peer-secret)"
"""A command that makes a file with a secret."""
Identity: TypeAlias = "tuple[str, str | None]"
"""See `identity_of`."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """How the hosts of one store's processes recognize each other."""

    start: str
    """Name by which daemons admit each other: 32 hex digits."""
    secret: str
    """Hex digits."""
    files: list[str] | None
    """Files for TLS; None: links without it."""
    lasting: bool = True
    """Whether later starts have them, too."""

    def __repr__(self) -> str:
        return f"Credentials({self.start})"  # the secret must not appear in logs

    def tls(self) -> Tls | None:
        """Return the settings of TLS. Raises UsageError, AccessDenied for an unusable file."""
        return None if self.files is None else Tls(self.files)


def require_secret(settings: SessionSettings) -> None:
    """Raise UsageError (kind "peer-secret") if a member is to have copies on other hosts, and has no secret's file."""
    if settings.peers and settings.peer_secret_file is None:
        raise UsageError(
            f"peers={settings.peers}: members need the file of a secret, by which their hosts recognize each other",
            hint=f"make it once: {MAKE_SECRET}; copy it to all hosts, and set peer_secret_file "
            "(SCARCTL_PEER_SECRET_FILE)",
            kind="peer-secret",
        )


def check_files(settings: SessionSettings) -> None:
    """Read the files of `peer_tls` and `peer_secret_file`, before anything depends on them.

    Raises UsageError, AccessDenied for an unusable file.
    """
    path, files = settings.peer_secret_file, tls_files(settings)
    if path is not None:
        read_secret(os.path.abspath(path))
    if files is not None and (settings.peers or path is not None):
        Tls(files)


def credentials_of(store: Store, settings: SessionSettings) -> Credentials | None:
    """Return the credentials of a store's processes; None without a secret's file. Raises as `check_files` does."""
    return _credentials(settings, _start_of(store))


def agreed_credentials(
    store: Store, settings: SessionSettings, known: Sequence[Identity]
) -> Credentials | None:
    """Return the credentials of a job's ranks; None without a secret's file.

    known: the result of `identity_of`, by rank. Raises UsageError, naming a rank, if secrets differ.
    """
    for rank, (_, secret) in enumerate(known):
        if secret != known[0][1]:
            raise UsageError(
                f"peer_secret_file is not the same on all ranks: rank {rank} has another one than rank 0",
                hint="put the same file on all hosts, or give none; nothing was changed",
                kind="peer-secret",
            )
    starts = {start for start, _ in known}
    # A disk of one machine, to that machine, may be a shared folder to the others.
    return _credentials(settings, starts.pop() if len(starts) == 1 else store.id)


def identity_of(store: Store, settings: SessionSettings) -> Identity:
    """Return the name of the store's starts, and a digest of the file's secret; None without one. For comparison."""
    known = _credentials(settings, store.id)
    return _start_of(store), None if known is None else fingerprint(known.secret)


def _credentials(settings: SessionSettings, start: str) -> Credentials | None:
    path = settings.peer_secret_file
    if path is None:
        return None
    secret = secret_of_start(read_secret(os.path.abspath(path)), start)
    return Credentials(start, secret, tls_files(settings))


def disk_of(store: Store) -> str:
    """Return the type of the file system that has the store, if only this machine has it; "" otherwise."""
    return "" if store.address.root is None else disk_type(store.address.root)


def _start_of(store: Store) -> str:
    boot = boot_id()
    if not disk_of(store) or not any(boot):
        return store.id
    return hashlib.sha256(f"{store.id} {boot.hex()}".encode()).hexdigest()[:32]


def tls_files(settings: SessionSettings) -> list[str] | None:
    """Return the absolute paths of `peer_tls`; None without it."""
    files = settings.peer_tls
    return None if files is None else [os.path.abspath(path) for path in files]
