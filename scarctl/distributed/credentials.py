"""Read what daemons of other hosts need to recognize this host: the secret in a file, and the files of TLS.

Members have no process group over which a secret could travel. So each host has the same file, and the store's id takes
the place of a start's name. For a store on a disk of one machine it is the id of the store on this machine: a copy of
the folder on another machine has the same id, but a future of its own.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from scarctl.arena.header import boot_id
from scarctl.config import SessionSettings
from scarctl.distributed.host_address import place_of
from scarctl.errors import UsageError
from scarctl.peers.secret import read_secret, secret_of_start
from scarctl.peers.tls import Tls
from scarctl.store import Store
from scarctl.util.file_system import disk_type

MAKE_SECRET = "(umask 077; openssl rand -hex 32 > peer-secret)"
"""A command that makes a file with a secret."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """How the hosts of one store's members recognize each other."""

    start: str
    """Name by which daemons admit each other: 32 hex digits."""
    secret: str
    """Hex digits."""
    files: list[str] | None
    """Files for TLS; None: links without it."""

    def __repr__(self) -> str:
        return f"Credentials({self.start})"  # the secret must not appear in logs

    def tls(self) -> Tls | None:
        """Return the settings of TLS. Raises UsageError, AccessDenied for an unusable file."""
        return None if self.files is None else Tls(self.files)


def require_secret(settings: SessionSettings) -> None:
    """Raise UsageError (kind "peer-secret") if a member is to have copies on other hosts, and has no secret's file.

    Raises UsageError, AccessDenied for an unusable file.
    """
    if settings.peers and settings.peer_secret_file is None:
        raise UsageError(
            f"peers={settings.peers}: members need the file of a secret, by which their hosts recognize each other",
            hint=f"make it once: {MAKE_SECRET}; copy it to all hosts, and set peer_secret_file "
            "(SCARCTL_PEER_SECRET_FILE)",
            kind="peer-secret",
        )
    if settings.peer_secret_file is not None:
        read_secret(os.path.abspath(settings.peer_secret_file))
        if settings.peer_tls is not None:
            Tls([os.path.abspath(path) for path in settings.peer_tls])


def credentials_of(store: Store, settings: SessionSettings) -> Credentials | None:
    """Return a member's credentials; None without a secret's file. Raises as `require_secret` does."""
    path, files = settings.peer_secret_file, settings.peer_tls
    if path is None:
        return None
    start = _start_of(store)
    secret = secret_of_start(read_secret(os.path.abspath(path)), start)
    return Credentials(start, secret, None if files is None else [os.path.abspath(one) for one in files])


def disk_of(store: Store) -> str:
    """Return the type of the file system that has the store, if only this machine has it; "" otherwise."""
    return "" if store.address.root is None else disk_type(store.address.root)


def _start_of(store: Store) -> str:
    boot = boot_id()
    if not disk_of(store) or not any(boot):
        return store.id
    return hashlib.sha256(f"{store.id} {boot.hex()}".encode()).hexdigest()[:32]


def digest_of_place(settings: SessionSettings) -> str:
    """Return a digest of the place of this process's arenas: 16 hex digits, others on each host and after a boot."""
    return hashlib.sha256(place_of(settings).encode()).hexdigest()[:16]
