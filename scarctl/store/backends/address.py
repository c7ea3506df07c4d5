"""Parse a store's address: a local folder, or the URL of a file system that fsspec knows.

An address may hold secrets (`s3://key:secret@bucket`), and so may storage options. Messages, logs and records never
show them: they have `Address.shown`.
"""

from __future__ import annotations

import hashlib
import os
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scarctl.errors import UsageError
from scarctl.util.text import printable

IN_THIS_PROCESS = "memory"
"""Scheme of a store that no other process can see."""
DEFAULT_TIMEOUT = 60.0
TIMEOUT_OPTION = "scarctl_timeout"
"""The only storage option of scarctl itself: time limit of one operation in seconds, all retries included."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*", re.ASCII)
_MISTYPED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(:|:/|//)[^/]*:[^/]*@")
"""Pattern of a mistyped address. It may contain a password, so it must not be taken for a folder and shown."""
S3_SCHEMES = ("s3", "s3a")
PORTABLE = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
)
"""Variables with credentials or their paths. A daemon gets them with each run, not from its own environment."""
_WHO = ("key", "secret", "username", "password", "profile", "anon", "session")
_HINT = "use a folder, or an address such as s3://bucket/folder"


@dataclass(frozen=True, slots=True)
class Address:
    """A store's place. `root` is None unless it is a local folder."""

    shown: str
    """One printable line for display, without user, password and query."""
    root: Path | None
    scheme: str = ""
    path: str = ""
    """Path of a remote store: `<bucket or host>/<folder>`, without a slash at the end."""
    url: str = field(default="", repr=False)
    """Address that opens the store again. It may hold a secret."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Options for the file system. They may hold secrets."""
    timeout: float = DEFAULT_TIMEOUT

    @property
    def digest(self) -> str:
        """Id of this place: 16 hex digits. Symbolic links to a local folder are resolved."""
        place = f"{self.scheme}://{self.path}" if self.root is None else os.path.realpath(self.root)
        return hashlib.sha256(os.fsencode(place)).hexdigest()[:16]

    @staticmethod
    def parse(url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Address:
        """Parse an address and its storage options. A local folder ignores them.

        Raises UsageError, without quoting either, if they are not valid.
        """
        text = os.fspath(url)
        if "://" not in text and _MISTYPED.match(text):
            raise UsageError(
                "the store's address has no ://, or its user and password are in a path", hint=_HINT
            )
        if "://" not in text or text.startswith("file:"):
            root = local_path(text)
            return Address(printable(text if "://" not in text else str(root)), root, url=str(root))
        return _remote(text, dict(options or {}))


def _remote(text: str, options: dict[str, Any]) -> Address:
    scheme = text.partition("://")[0]
    if not _SCHEME.fullmatch(scheme):
        raise UsageError("the store's address has no valid scheme", hint=_HINT)
    scheme = scheme.lower()
    try:
        parts = urllib.parse.urlsplit(text)
        port = parts.port
    except ValueError:
        raise UsageError(f"the store's {scheme}:// address cannot be parsed", hint=_HINT) from None
    if parts.query or parts.fragment:
        # A query may be a signature, so the message does not quote it.
        raise UsageError(
            f"the store's {scheme}:// address has a query or a fragment",
            hint="put options of the file system into storage_options",
        )
    user, at, place = parts.netloc.rpartition("@")
    s3 = scheme in S3_SCHEMES
    if "@" in parts.path or (at and not place):
        # A secret with a slash in it would be taken for a folder, and shown.
        raise UsageError(
            f"the store's {scheme}:// address has an '@' after its first '/'",
            hint="write / in a secret as %2F; better, put it into storage_options",
        )
    folder = parts.path.strip("/")
    if any(part in (".", "..", "") for part in folder.split("/") if folder) or "\0" in text:
        raise UsageError(f"the store's {scheme}:// address has an empty part, or '.' or '..'", hint=_HINT)
    path = "/".join(filter(None, [place, folder]))
    if not path:
        raise UsageError(f"the store's {scheme}:// address names no place", hint=_HINT)
    if s3 and port is not None:
        raise UsageError(
            "a bucket's name has no port", hint="set the server as endpoint_url in storage_options"
        )
    if s3 and at:  # other file systems parse user and password themselves
        options = {**_keys(user), **options}
    return Address(
        shown=printable(f"{scheme}://{path}"),
        root=None,
        scheme=scheme,
        path=path,
        url=text,
        options={name: value for name, value in options.items() if name != TIMEOUT_OPTION},
        timeout=_timeout(options.get(TIMEOUT_OPTION, DEFAULT_TIMEOUT)),
    )


def _keys(user: str) -> dict[str, str]:
    """Return the storage options for the part of an s3:// address before the `@`."""
    key, _, secret = user.partition(":")
    given = {"key": urllib.parse.unquote(key), "secret": urllib.parse.unquote(secret)}
    return {name: value for name, value in given.items() if value}


def _timeout(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 31:
        raise UsageError(f"{TIMEOUT_OPTION} in storage_options is not a number of seconds above 0")
    return float(value)


def local_path(url: str | os.PathLike[str]) -> Path:
    """Return the folder that a path, or file:///path, names. ~ is the home folder. Raises UsageError otherwise."""
    text = os.fspath(url)
    if "://" not in text:
        if not text or "\0" in text:
            raise UsageError(f"{text!r} is not a path", hint="use the store's folder")
        return Path(os.path.abspath(os.path.expanduser(text)))
    parts = urllib.parse.urlsplit(text)
    if (
        parts.scheme != "file"
        or parts.netloc not in ("", "localhost")
        or not parts.path
        or parts.query
        or parts.fragment
    ):
        # An address may hold a password, so the message quotes only the scheme.
        raise UsageError(f"this {parts.scheme}:// address is not a local folder", hint="use file:///path")
    return Path(os.path.abspath(urllib.parse.unquote(parts.path)))


def portable_options(
    address: Address, options: Mapping[str, Any] | None, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the options with which another process can reach an S3 store as this user.

    They are `options`, and the variables `PORTABLE` of `environ`. Options take precedence, as in s3fs. Keys of the
    environment are used only without other credentials.
    """
    given = dict(options or {})
    if address.scheme not in S3_SCHEMES:
        return given
    own = any(address.options.get(name) for name in _WHO)
    found: dict[str, str | None] = {}
    if not own:
        found["profile"] = environ.get("AWS_DEFAULT_PROFILE") or environ.get("AWS_PROFILE")
        if environ.get("AWS_ACCESS_KEY_ID") and environ.get("AWS_SECRET_ACCESS_KEY"):
            found["key"] = environ["AWS_ACCESS_KEY_ID"]
            found["secret"] = environ["AWS_SECRET_ACCESS_KEY"]
            found["token"] = environ.get("AWS_SESSION_TOKEN")
    client = dict(given.get("client_kwargs") or {})
    if "endpoint_url" not in client:
        found["endpoint_url"] = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if region := environ.get("AWS_DEFAULT_REGION"):
        client.setdefault("region_name", region)
    new = {name: value for name, value in found.items() if value and name not in given}
    return {**given, **new, **({"client_kwargs": client} if client else {})}
