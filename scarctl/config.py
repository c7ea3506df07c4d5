"""Settings: what can be set, in which unit, and where a value may come from.

A value is taken from the first that has it: the call or the command line, the environment
(`SCARCTL_FRACTION`), the file `scarctl.toml` in the current folder, the default. The environment is read here
and by the command line, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scarctl.errors import UsageError
from scarctl.printable import printable
from scarctl.trust import why_untrusted

log = logging.getLogger("scarctl")

FILE_NAME = "scarctl.toml"
DEFAULT_FRACTION = 1 / 8
DEFAULT_POLICY = "priority"
POLICIES = ("priority", "round", "random", "full")
NORMS = ("l2", "rms", "relative")
TRACKERS = ("exact", "overlapped", "sampled", "touched", "auto")
MAX_FILE_BYTES = 1 << 20
STORAGE_OPTIONS = "storage_options"
"""A table of `scarctl.toml` for all commands."""
VERBS = frozenset(
    {"delete", "full", "into", "keep", "live", "lost", "no_writer", "output", "reap", "snapshot", "yes"}
)
"""Options that say what to do, not how: they come from the command line, never from the environment or a file."""

Norm = str | Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSettings:
    """How a training process saves its state. Bad values and combinations are refused at construction."""

    store: str = dataclasses.field(repr=False)
    """Folder of the store, or an address such as `s3://bucket/folder`."""
    storage_options: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False)
    """For the file system of a remote store: endpoint_url, key, secret, ... They may be secret."""
    assume_single_writer: bool = False
    """Make the store also where nothing can be created exclusively: then nothing keeps two writers apart."""
    fraction: float = DEFAULT_FRACTION
    """Share of the state's bytes that one partial checkpoint may write, in (0, 1]."""
    interval: int | Literal["auto"] = 10
    """Iterations between two partial checkpoints. "auto": as many as the store needs to keep up.

    With "auto" checkpoints also become smaller, down to an eighth of `fraction`, where the interval would be long.
    """
    max_bandwidth: float | None = None
    """Bytes per second that partial checkpoints may write on average, with interval "auto". None: no such limit."""
    policy: str = DEFAULT_POLICY
    """Which partitions a partial checkpoint picks: priority, round, random or full."""
    norm: Norm = "l2"
    """What the distance is: l2, rms, relative, or a function of (live, saved): one distance per partition."""
    tracker: str = "overlapped"
    """How distances are found: exact, overlapped, sampled, touched, or auto (see `scarctl.tracker`)."""
    max_staleness: int | None = None
    """A changed partition is saved when its copy is this many iterations old. None: no such limit."""
    extrapolate: bool = False
    """Partial recoveries restore parameters further along the way that they went (see `scarctl.extrapolation`)."""
    shards: int | None = None
    """Parts that fail together; the state is split at random. Fixed when the store is created (None: 1)."""
    seed: int | None = None
    """Seed of that split and of the random policy. Fixed when the store is created (None: 0)."""
    partition_bytes: int | None = None
    """Size of a partition in bytes. Fixed when the store is created (None: from the state's size)."""
    by_layer: bool | None = None
    """Every group is one partition. Fixed when the store is created (None: no)."""
    rows: Mapping[str, int] | None = None
    """Rows per partition by pattern of group names, first match wins. Fixed when the store is created."""
    flush_on_signal: bool = True
    """Before SIGTERM or SIGINT takes effect, bring the newest step into this host's memory."""
    on_error: str = "warn"
    """A fault while saving is logged and counted ("warn"), or raised from the next call or step ("raise")."""
    daemon: bool | None = None
    """Save from the host's daemon, which outlives this process, or from a thread of this process (False).

    None: from the daemon, unless it cannot be started."""
    arena_dir: str | None = None
    """Folder that holds the arena instead of shared memory. None: /dev/shm, or the temporary folder."""
    pin_memory: bool = True
    """Pin the arena where the state is on a GPU, for as long as the session is open."""
    validate: bool = False
    """Compare every copy with the live values before it is kept, at the price of reading both again."""
    drain_timeout: float = 60.0
    """Seconds that closing a session waits for the store to take what is still queued."""

    def __post_init__(self) -> None:
        check_store(self.store)
        check_storage_options(self.storage_options)
        check_fraction(self.fraction)
        check_policy(self.policy)
        if self.interval != "auto":
            _at_least("interval", self.interval, 1)
        self._check_bandwidth()
        _at_least("max_staleness", self.max_staleness, 1)
        check_fixed(self.shards, self.partition_bytes)
        _at_least("seed", self.seed, 0)
        for name in (
            "assume_single_writer",
            "by_layer",
            "flush_on_signal",
            "daemon",
            "pin_memory",
            "validate",
            "extrapolate",
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise UsageError(f"{name} is {value!r}", hint="give true or false")
        if self.arena_dir is not None and not isinstance(self.arena_dir, str | os.PathLike):
            raise UsageError(f"arena_dir is {self.arena_dir!r}", hint="give the path of a folder")
        if self.rows is not None and not isinstance(self.rows, Mapping):
            raise UsageError("rows is not a dict of patterns and numbers of rows")
        for pattern, rows in (self.rows or {}).items():
            _at_least(f"rows of {pattern!r}", rows, 1)
        if self.by_layer and (self.partition_bytes is not None or self.rows):
            raise UsageError(
                "by_layer makes every group one partition: partition_bytes and rows contradict it",
                hint="give by_layer alone, or leave it out",
            )
        if not callable(self.norm) and self.norm not in NORMS:
            raise UsageError(
                f"unknown norm {self.norm!r}", hint=f"use one of {', '.join(NORMS)}, or a function"
            )
        if self.tracker not in TRACKERS:
            raise UsageError(f"unknown tracker {self.tracker!r}", hint=f"use one of {', '.join(TRACKERS)}")
        if self.tracker == "sampled" and callable(self.norm):
            raise UsageError(
                "a norm function has to see all values, and tracker='sampled' looks at a few",
                hint='use tracker="exact", "touched" or "auto", or one of the norms ' + ", ".join(NORMS),
            )
        if self.on_error not in ("warn", "raise"):
            raise UsageError(f"on_error is {self.on_error!r}", hint='use "warn" or "raise"')
        if not (isinstance(self.drain_timeout, int | float) and self.drain_timeout >= 0):
            raise UsageError(f"drain_timeout is {self.drain_timeout!r}", hint="give seconds, 0 or more")

    def _check_bandwidth(self) -> None:
        limit = self.max_bandwidth
        if limit is None:
            return
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
            raise UsageError(f"max_bandwidth is {limit!r}", hint="give bytes per second, more than 0")
        if self.interval != "auto":
            raise UsageError(
                f"max_bandwidth sets the pace, and so does an interval of {self.interval}",
                hint='give interval="auto" with it, or leave one of them out',
            )

    def fixed(self) -> dict[str, Any]:
        """What a store fixes when it is created; None where the store decides."""
        names = ("shards", "seed", "partition_bytes", "by_layer", "rows")
        return {name: getattr(self, name) for name in names}

    def place(self) -> dict[str, Any]:
        """What opening the store needs besides its address."""
        return {"storage_options": self.storage_options, "assume_single_writer": self.assume_single_writer}

    @classmethod
    def resolve(
        cls, given: Mapping[str, object], *, environ: Mapping[str, str], folder: Path | None = None
    ) -> SessionSettings:
        """Settings from `given` (None: not given), `environ`, and `scarctl.toml` in `folder`, in that order.

        Raises UsageError for an unknown name, a value that cannot be read, or a missing store.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise UsageError(f"unknown setting {name!r}", hint=f"known settings: {', '.join(names)}")
        in_file = read_file(folder or Path())
        values: dict[str, Any] = {}
        for name in names:
            if given.get(name) is not None:
                values[name] = given[name]
            elif (text := environ.get(f"SCARCTL_{name.upper()}")) and name in _FROM_TEXT:
                values[name] = _parse(f"SCARCTL_{name.upper()}", text, _FROM_TEXT[name])
            elif name in in_file:
                values[name] = in_file[name]
        if isinstance(values.get("fraction"), str):
            values["fraction"] = parse_fraction(values["fraction"])
        if "store" not in values:
            raise UsageError("no store given", hint='pass store="a/folder", or set SCARCTL_STORE')
        return cls(**values)


KNOWN_NAMES = frozenset(field.name for field in dataclasses.fields(SessionSettings))


def check_store(store: object) -> None:
    """Raise UsageError unless `store` is a text that is not empty."""
    if not isinstance(store, str) or not store:
        raise UsageError(
            "the store is not a text"
            if store
            else "the store is empty",  # not repeated: it may hold a secret
            hint="give the path of a folder, or an address such as s3://bucket/folder",
        )


def check_storage_options(options: object) -> None:
    """Raise UsageError, which does not repeat them, unless `options` are None or a dict with texts as keys."""
    if options is None or (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        return
    raise UsageError("storage_options is not a dict with names as keys")


def storage_options(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The table [storage_options] of `scarctl.toml`'s content, None when there is none. Raises UsageError."""
    options = content.get(STORAGE_OPTIONS)
    check_storage_options(options)
    return None if options is None else dict(options)


def check_fraction(fraction: object) -> None:
    """Raise UsageError unless `fraction` is a number in (0, 1]."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise UsageError(
            f"the fraction is {fraction!r}, not a number above 0 and up to 1",
            hint="it is the share of the state that one checkpoint writes, such as 1/8 or 0.125",
        )


def check_policy(policy: object) -> None:
    """Raise UsageError unless `policy` is one of `POLICIES`."""
    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r}", hint=f"use one of {', '.join(POLICIES)}")


def check_fixed(shards: int | None, partition_bytes: int | None) -> None:
    """Raise UsageError unless the settings that a store fixes are None or positive."""
    _at_least("shards", shards, 1)
    _at_least("partition_bytes", partition_bytes, 1)


def parse_fraction(text: str) -> float:
    """A fraction written as `0.125` or `1/8`. Raises UsageError when it is neither, or not in (0, 1]."""
    above, slash, below = text.partition("/")
    try:
        value = float(above) / float(below if slash else 1)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not 0 < value <= 1:
        raise UsageError(
            f"the fraction is {text!r}, not a number above 0 and up to 1",
            hint="it is the share of the state that one checkpoint writes, such as 1/8 or 0.125",
        )
    return value


def read_file(folder: Path) -> dict[str, Any]:
    """Content of `scarctl.toml` in `folder`; {} when there is none.

    One that others may have written is ignored with a warning. Raises UsageError if it is unreadable.
    """
    path = folder / FILE_NAME
    try:
        # Not waiting for the other end of a pipe.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
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
    """Once, however often the file is read."""
    log.warning(
        "%s is ignored: %s. If it is right, make it and its folder yours (chown, chmod go-w); "
        "or give the settings on the command line or in the environment",
        printable(str(path)),
        reason,
    )


def _at_least(name: str, value: object, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise UsageError(f"{name} is {value!r}", hint=f"give a whole number, {least} or more")


def _interval(text: str) -> int | str:
    return "auto" if text.strip() == "auto" else int(text)


def _flag(text: str) -> bool:
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    return words[text.strip().lower()]


def _parse(name: str, text: str, read: Callable[[str], object]) -> object:
    try:
        return read(text)
    except (ValueError, KeyError):
        raise UsageError(f"{name} is {text!r}, which cannot be read") from None


# A norm function and row patterns have no form as text.
_FROM_TEXT: dict[str, Callable[[str], object]] = {
    "store": str,
    "assume_single_writer": _flag,
    "fraction": parse_fraction,
    "interval": _interval,
    "max_bandwidth": float,
    "policy": str,
    "norm": str,
    "tracker": str,
    "max_staleness": int,
    "extrapolate": _flag,
    "shards": int,
    "seed": int,
    "partition_bytes": int,
    "by_layer": _flag,
    "flush_on_signal": _flag,
    "on_error": str,
    "daemon": _flag,
    "arena_dir": str,
    "pin_memory": _flag,
    "validate": _flag,
    "drain_timeout": float,
}
