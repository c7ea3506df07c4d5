"""Check single values, with errors that name the setting and suggest a valid value."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from scarctl.config.options import MODES, NORMS, POLICIES
from scarctl.errors import UsageError

_FRACTION = "it is the share of the state that one checkpoint writes, such as 1/8, 0.125 or 12.5%"
_OVERHEAD = "it is the share of training time that checkpoints may take, such as 0.01 or 1%"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def check_store(store: object) -> None:
    """Raise UsageError unless `store` is a non-empty string."""
    if not isinstance(store, str) or not store:
        raise UsageError(
            "the store is not a string"
            if store
            else "the store is empty",  # not repeated: it may hold a secret
            hint="give the path of a folder, or an address such as s3://bucket/folder",
        )


def check_storage_options(options: object) -> None:
    """Raise UsageError unless `options` is None or a dict with strings as keys. The error contains no values."""
    if options is None or (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        return
    raise UsageError("storage_options is not a dict with names as keys")


def check_fraction(fraction: object) -> None:
    """Raise UsageError unless `fraction` is a number in (0, 1]."""
    _check_share("fraction", fraction, _FRACTION)


def check_overhead(overhead: object) -> None:
    """Raise UsageError unless `overhead` is a number in (0, 1]."""
    _check_share("overhead", overhead, _OVERHEAD)


def _check_share(name: str, value: object, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise UsageError(f"the {name} is {value!r}, not a number above 0 and up to 1", hint=hint)


def check_seconds(name: str, value: object) -> None:
    """Raise UsageError naming the setting unless `value` is a finite number of seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{name} is {value!r:.40}", hint='give seconds above 0, such as 30, "30s" or "2m"')


def check_policy(policy: object) -> None:
    """Raise UsageError unless `policy` is one of `POLICIES`."""
    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r}", hint=f"use one of {', '.join(POLICIES)}")


def check_rate(name: str, value: object) -> None:
    """Raise UsageError naming the setting unless `value` is None or a finite number above 0."""
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf
    ):
        raise UsageError(f"{name} is {value!r}", hint="give bytes per second, more than 0")


def check_norm(norm: object) -> None:
    """Raise UsageError unless `norm` is one of `NORMS` or a callable."""
    if not callable(norm) and norm not in NORMS:
        raise UsageError(f"unknown norm {norm!r}", hint=f"use one of {', '.join(NORMS)}, or a function")


def check_peer_address(address: object) -> None:
    """Raise UsageError unless the address is an IP address of one host, or None."""
    if address is None:
        return
    try:
        found = ip_address(str(address).partition("%")[0])
    except ValueError:
        found = None
    if found is None or found.is_unspecified or found.is_multicast:
        raise UsageError(
            f"peer_address is {address!r:.80}, not an IP address of this host",
            hint="give the address at which other hosts reach this one, such as 10.0.0.7",
        )


def check_peer_files(tls: object, secret: object) -> None:
    """Raise UsageError unless `tls` is three paths, `secret` is one, or None. The files are read later."""
    if secret is not None and not (isinstance(secret, str | os.PathLike) and os.fspath(secret)):
        raise UsageError("peer_secret_file is not a path")  # not repeated: it may be the secret itself
    if tls is None:
        return
    files = list(tls) if isinstance(tls, Sequence) and not isinstance(tls, str | bytes) else []
    if len(files) != 3 or not all(isinstance(path, str | os.PathLike) and os.fspath(path) for path in files):
        raise UsageError(
            "peer_tls is not three paths",
            hint="give the PEM files of this host's certificate, its key, and the authority, in this order",
        )


def parse_paths(text: str) -> tuple[str, ...]:
    """Return the paths in a text, which commas separate."""
    return tuple(part.strip() for part in text.split(","))


def check_fixed(shards: int | None, partition_bytes: int | None) -> None:
    """Raise UsageError unless both numbers are None or positive."""
    at_least("shards", shards, 1)
    at_least("partition_bytes", partition_bytes, 1)


def parse_fraction(text: str) -> float:
    """Return the fraction written as `0.125`, `1/8` or `12.5%`. Raises UsageError otherwise, or if not in (0, 1]."""
    return _parse_share("fraction", text, _FRACTION)


def parse_overhead(text: str) -> float:
    """Return the overhead written as `0.01`, `1/100` or `1%`. Raises UsageError otherwise, or if not in (0, 1]."""
    return _parse_share("overhead", text, _OVERHEAD)


def _parse_share(name: str, text: str, hint: str) -> float:
    above, slash, below = without_percent(text).partition("/")
    try:
        value = float(above) / float(below if slash else 1)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not 0 < value <= 1:
        raise UsageError(f"the {name} is {text!r}, not a number above 0 and up to 1", hint=hint)
    return value


LONGEST_NOTICE = 86400.0
"""Most seconds until a host shuts down: training makes no checkpoints meanwhile."""


def notice_of(name: str, value: object) -> float:
    """Return the time until a host shuts down, in seconds: see `seconds_of`. Raises UsageError, also for over a day."""
    found = seconds_of(name, value)
    if found > LONGEST_NOTICE:
        raise UsageError(
            f"{name} is {value!r:.40}, more than a day",
            hint="evacuate shortly before the host shuts down: no checkpoints are made meanwhile",
        )
    return found


def seconds_of(name: str, value: object) -> float:
    """Return a duration in seconds, given as a number or as text: 25, "25", "25s", "2m". Raises UsageError."""
    found: float = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value)
    elif isinstance(value, str):
        number, unit = value.strip(), 1.0
        if number[-1:] in _UNITS:
            number, unit = number[:-1], _UNITS[number[-1]]
        with contextlib.suppress(ValueError):
            found = float(number) * unit
    if not 0 <= found < math.inf:
        raise UsageError(
            f"{name} is {value!r:.40}", hint='give seconds, 0 or more, such as 25, "25s" or "2m"'
        )
    return found


def without_percent(text: str) -> str:
    """Return `12.5%` as `12.5/100`, and other text as it is."""
    number = text.strip()
    return f"{number[:-1].strip()}/100" if number.endswith("%") else text


_MULTIPLES = {
    f"{prefix}{binary}": (1024 if binary else 1000) ** power
    for power, prefix in enumerate(("", "k", "m", "g", "t", "p"))
    for binary in ("", "i")
    if prefix or not binary
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([kmgtp]i?|)b?\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> float:
    """Return the number of bytes written as `4096`, `4KB` (4000), `4KiB` (4096) or `1.5GB`. Raises UsageError."""
    match = _SIZE.fullmatch(text)
    value = float(match[1]) * _MULTIPLES[match[2].lower()] if match else math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{text!r} is not a number of bytes", hint="give one such as 4096, 4KiB or 1.5GB")
    return value


def at_least(name: str, value: object, least: int) -> None:
    """Raise UsageError naming the setting unless `value` is None or an integer, `least` or more."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise UsageError(f"{name} is {value!r}", hint=f"give a whole number, {least} or more")


def check_mode(mode: object) -> None:
    """Raise UsageError for an unknown mode of recovery."""
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}", hint=f"use one of {', '.join(MODES)}")
