"""Read the secret of a job's hosts from a file that only this user can read, and derive that of one store from it.

Without such a file, rank 0 draws a secret for each start, and sends it over the job's process group.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat

from scarctl.errors import AccessDenied, UsageError

_LEAST, _MOST = 32, 4096
"""Least and most bytes of the file, without surrounding white space."""


def read_secret(path: str) -> bytes:
    """Return the secret in a file. Raises AccessDenied if others can read it, UsageError if it is missing or too short.

    No error quotes the content.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _bad(path, "is not a file")
        if status.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
            raise AccessDenied(
                f"the secret's file {path} can be read by other users, or belongs to another user",
                hint=f"chmod 600 {path}, and draw a new secret",
                kind="peer-secret",
            )
        content = os.read(fd, _MOST + 1).strip()
    finally:
        os.close(fd)
    if not _LEAST <= len(content) <= _MOST:
        raise _bad(path, f"must have {_LEAST} to {_MOST} bytes")
    return content


def secret_of_start(secret: bytes, start: str) -> str:
    """Return the secret of the starts of this name, in hex digits. With a file that is the store's id."""
    return hmac.new(secret, b"scarctl-start:" + start.encode(), hashlib.sha256).hexdigest()


def fingerprint(secret: str) -> str:
    """Return a digest that shows whether two secrets are equal, and nothing else."""
    return hashlib.sha256(b"scarctl-fingerprint:" + secret.encode()).hexdigest()[:16]


def _bad(path: str, why: str) -> UsageError:
    return UsageError(
        f"the secret's file {path} {why}",
        hint="create the same file on all hosts: openssl rand -hex 32",
        kind="peer-secret",
    )
