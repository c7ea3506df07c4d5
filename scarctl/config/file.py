"""Read the file `scarctl.toml` in the current folder, but only if no other user may have written it."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scarctl.config.checks import check_storage_options
from scarctl.errors import UsageError
from scarctl.util.text import printable

log = logging.getLogger("scarctl")

FILE_NAME = "scarctl.toml"
MAX_FILE_BYTES = 1 << 20
STORAGE_OPTIONS = "storage_options"
"""A table of `scarctl.toml` for all commands."""


def storage_options(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the table [storage_options] of `scarctl.toml`'s content, or None. Raises UsageError."""
    options = content.get(STORAGE_OPTIONS)
    check_storage_options(options)
    return None if options is None else dict(options)


def read_file(folder: Path) -> dict[str, Any]:
    """Return the content of `scarctl.toml` in `folder`; {} without such a file.

    A file that other users may have written is ignored with a warning. Raises UsageError if it is unreadable.
    """
    path = folder / FILE_NAME
    try:
        # If it is a pipe, opening it must not wait for the other end.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            from scarctl.util.trust import why_untrusted

            if reason := why_untrusted(path, os.fstat(file.fileno())):
                _warn_of(path.absolute(), reason)
                return {}
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits
        raise UsageError(f"{path} is not TOML: {error}") from error


@functools.cache
def _warn_of(path: Path, reason: str) -> None:
    """Log the reason once per process; the file is read several times."""
    log.warning(
        "%s is ignored: %s. If it is right, make it and its folder yours (chown, chmod go-w); "
        "or give the settings on the command line or in the environment",
        printable(str(path)),
        reason,
    )
