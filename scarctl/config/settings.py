"""Resolve and check the settings of one session, and find the texts that document them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from scarctl.config.checks import (
    at_least,
    check_fixed,
    check_fraction,
    check_norm,
    check_overhead,
    check_peer_address,
    check_peer_files,
    check_policy,
    check_rate,
    check_seconds,
    check_storage_options,
    check_store,
    notice_of,
    parse_bytes,
    parse_fraction,
    parse_overhead,
    parse_paths,
    seconds_of,
)
from scarctl.config.file import read_file
from scarctl.config.options import (
    DEFAULT_FRACTION,
    DEFAULT_MAX_LAG,
    DEFAULT_MAX_LOSS,
    DEFAULT_OVERHEAD,
    DEFAULT_POLICY,
    TRACKERS,
    Norm,
    OnError,
    Partitioning,
    PeerAck,
    Policy,
    Selection,
    Settings,
    Tracker,
)
from scarctl.config.unknown import GROUPS
from scarctl.errors import UsageError
from scarctl.state.encodings import ENCODINGS, Encoding

VERBS = frozenset(("all", "atol", "finite", "full", "ignore", "into", "keep", "lost", "memory", "no_writer", "output",
                   "reap", "rtol", "snapshot", "values", "weights", "yes"))  # fmt: skip
"""Options that name an action: they are accepted on the command line only, never from the environment or a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSettings:
    """How a training process saves its state: all options of `attach` in one level, with their values resolved.

    Bad values and combinations raise UsageError at construction. `Partitioning`, `Selection` and `Settings` document
    the options that are not listed here.

    store: Folder of the store, or an address such as s3://bucket/folder.
    fraction: Largest share of the state's bytes that one partial checkpoint writes, above 0 and up to 1 (the paper's
        r). Default: 1/8.
    interval: Iterations between two partial checkpoints in the store (the paper's rC), or "auto": the whole state every
        `max_lag` seconds if the store can take it, otherwise what changed most, as fast as it can. Memory has its own
        pace: see `overhead` and `max_loss` of `Settings`. Default: "auto".
    """

    store: str = dataclasses.field(repr=False)
    storage_options: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False)
    assume_single_writer: bool = False
    fraction: float = DEFAULT_FRACTION
    interval: int | Literal["auto"] = "auto"
    overhead: float = DEFAULT_OVERHEAD
    max_loss: float = DEFAULT_MAX_LOSS
    max_lag: float = DEFAULT_MAX_LAG
    max_bandwidth: float | None = None
    policy: Policy = DEFAULT_POLICY
    norm: Norm = "l2"
    tracker: Tracker = "auto"
    encoding: Encoding = "exact"
    max_staleness: int | None = None
    shards: int | None = None
    seed: int | None = None
    partition_bytes: int | None = None
    by_layer: bool | None = None
    rows: Mapping[str, int] | None = None
    flush_on_signal: bool = True
    grace: float | None = None
    on_error: OnError = "warn"
    daemon: bool | None = None
    arena_dir: str | None = None
    pin_memory: bool = True
    validate: bool = False
    timeout: float = 60.0
    peers: int = 0
    peer_address: str | None = None
    peer_domain: str | None = None
    peer_bandwidth: float | None = None
    peer_ack: PeerAck = "next"
    peer_tls: Sequence[str | os.PathLike[str]] | None = None
    peer_secret_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_store(self.store)
        check_storage_options(self.storage_options)
        check_fraction(self.fraction)
        check_overhead(self.overhead)
        check_seconds("max_loss", self.max_loss)
        check_seconds("max_lag", self.max_lag)
        check_policy(self.policy)
        if self.interval != "auto":
            at_least("interval", self.interval, 1)
        self._check_bandwidth()
        at_least("max_staleness", self.max_staleness, 1)
        check_fixed(self.shards, self.partition_bytes)
        at_least("seed", self.seed, 0)
        for name, read in _FROM_TEXT.items():
            value = getattr(self, name)
            if read is _flag and value is not None and not isinstance(value, bool):
                raise UsageError(f"{name} is {value!r}", hint="give true or false")
        if self.arena_dir is not None and not isinstance(self.arena_dir, str | os.PathLike):
            raise UsageError(f"arena_dir is {self.arena_dir!r}", hint="give the path of a folder")
        if self.rows is not None and not isinstance(self.rows, Mapping):
            raise UsageError("rows is not a dict of patterns and numbers of rows")
        for pattern, rows in (self.rows or {}).items():
            at_least(f"rows of {pattern!r}", rows, 1)
        if self.by_layer and (self.partition_bytes is not None or self.rows):
            raise UsageError(
                "by_layer makes every group one partition: partition_bytes and rows contradict it",
                hint="give by_layer alone, or leave it out",
            )
        check_norm(self.norm)
        if self.tracker not in TRACKERS:
            raise UsageError(f"unknown tracker {self.tracker!r}", hint=f"use one of {', '.join(TRACKERS)}")
        if self.encoding not in ENCODINGS:
            raise UsageError(
                f"unknown encoding {self.encoding!r:.80}", hint=f"use one of {', '.join(ENCODINGS)}"
            )
        if self.on_error not in ("warn", "raise"):
            raise UsageError(f"on_error is {self.on_error!r}", hint='use "warn" or "raise"')
        if self.grace is not None:
            notice_of("grace", self.grace)
            if not self.flush_on_signal:
                raise UsageError(
                    "grace is the time after SIGTERM, and flush_on_signal=False lets it pass at once",
                    hint="leave one of them out",
                )
        if not (isinstance(self.timeout, int | float) and self.timeout >= 0):
            raise UsageError(f"timeout is {self.timeout!r}", hint="give seconds, 0 or more")
        self._check_peers()

    def _check_peers(self) -> None:
        at_least("peers", self.peers, 0)
        check_peer_address(self.peer_address)
        if self.peer_domain is not None and not (
            isinstance(self.peer_domain, str) and len(self.peer_domain) < 200
        ):
            raise UsageError(f"peer_domain is {self.peer_domain!r:.80}", hint="give a short name")
        check_rate("peer_bandwidth", self.peer_bandwidth)
        if self.peer_ack not in get_args(PeerAck):
            raise UsageError(f"peer_ack is {self.peer_ack!r:.80}", hint='use "next" or "all"')
        check_peer_files(self.peer_tls, self.peer_secret_file)
        if self.peers and self.daemon is False:
            raise UsageError(
                f"peers={self.peers} needs the daemon, which sends and keeps the copies",
                hint="leave out daemon=False",
            )

    def _check_bandwidth(self) -> None:
        check_rate("max_bandwidth", self.max_bandwidth)
        if self.max_bandwidth is not None and self.interval != "auto":
            raise UsageError(
                f"max_bandwidth sets the pace, and so does an interval of {self.interval}",
                hint='give interval="auto" with it, or leave one of them out',
            )

    def fixed(self) -> dict[str, Any]:
        """Return the settings that a store fixes when it is created; None where the store decides."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Partitioning)}

    def place(self) -> dict[str, Any]:
        """Return the options for opening the store, other than its address."""
        return {"storage_options": self.storage_options, "assume_single_writer": self.assume_single_writer}

    @classmethod
    def resolve(
        cls, given: Mapping[str, object], *, environ: Mapping[str, str], folder: Path | None = None
    ) -> SessionSettings:
        """Return the settings of `given` (None: not given), `environ`, and `scarctl.toml` in `folder`, in that order.

        Raises UsageError for an unknown name, a value that cannot be parsed, or a missing store.
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
        if "grace" in values:
            values["grace"] = notice_of("grace", values["grace"])
        for name in ("max_loss", "max_lag"):
            if name in values:
                values[name] = seconds_of(name, values[name])
        if isinstance(values.get("peer_tls"), list):
            values["peer_tls"] = tuple(values["peer_tls"])
        # A file may spell these as the command line does: "1/8", "4KiB".
        for name in (
            "fraction",
            "overhead",
            "max_bandwidth",
            "partition_bytes",
            "peer_bandwidth",
            "peer_tls",
        ):
            if isinstance(values.get(name), str):
                values[name] = _FROM_TEXT[name](values[name])
        if "store" not in values:
            raise UsageError("no store given", hint='pass store="a/folder", or set SCARCTL_STORE')
        return cls(**values)


KNOWN_NAMES = frozenset(field.name for field in dataclasses.fields(SessionSettings))


def flatten(
    *, partitioning: Partitioning | None, selection: Selection | None, settings: Settings | None
) -> dict[str, Any]:
    """Return the options of `attach`'s three groups by their names. Raises UsageError for another type."""
    given = {"partitioning": partitioning, "selection": selection, "settings": settings}
    found: dict[str, Any] = {}
    for name, group in given.items():
        kind = GROUPS[name]
        if group is None:
            continue
        if not isinstance(group, kind):
            raise UsageError(f"{name} is {group!r:.80}", hint=f"give a scarctl.{kind.__name__}(...)")
        found |= {field.name: getattr(group, field.name) for field in dataclasses.fields(kind)}
    return found


def grouped(**options: Any) -> dict[str, Any]:
    """Return arguments of `attach` for options given by their own names; other arguments stay as they are."""
    found = dict(options)
    for argument, kind in GROUPS.items():
        own = {f.name: found.pop(f.name) for f in dataclasses.fields(kind) if f.name in found}
        if own:
            found[argument] = kind(**own)
    return found


def describe(name: str) -> str:
    """Return the documentation of an option: meaning, unit and default. Raises KeyError."""
    return _texts()[name]


def brief(name: str) -> str:
    """Return the first sentence of `describe`, and the default. Raises KeyError."""
    first, *others = re.split(r"(?<=\.) +(?=[A-Z])", describe(name))
    return " ".join([first, *(text for text in others if text.startswith("Default: "))])


@functools.cache
def _texts() -> dict[str, str]:
    """Documentation by option, from the docstrings of the classes that have it."""
    found = dict.fromkeys(KNOWN_NAMES, "")  # with `python -OO` there are no docstrings
    for kind in (SessionSettings, *GROUPS.values()):
        text = inspect.cleandoc(kind.__doc__ or "")
        for name, lines in re.findall(r"^(\w+): (.*(?:\n    .*)*)", text, re.MULTILINE):
            if name in KNOWN_NAMES:
                found[name] = " ".join(lines.split())
    return found


def _interval(text: str) -> int | str:
    return "auto" if text.strip() == "auto" else int(text)


def _whole_bytes(text: str) -> int:
    return int(parse_bytes(text))


def _flag(text: str) -> bool:
    words = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
        ("0", "false", "no", "off"), False
    )
    return words[text.strip().lower()]


def _parse(name: str, text: str, read: Callable[[str], object]) -> object:
    try:
        return read(text)
    except (ValueError, KeyError):
        raise UsageError(f"{name} is {text!r}, which cannot be read", hint=_VALUES.get(read, "")) from None


_VALUES: dict[Callable[[str], object], str] = {
    _interval: 'give a number of iterations, 1 or more, or "auto"',
    _flag: "give true or false",
    int: "give a whole number",
    float: "give seconds, 0 or more",
}
"""What a variable that a function reads may be. Other functions say so themselves."""


# A norm function and row patterns have no form as text.
_FROM_TEXT: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("store", "policy", "norm", "tracker", "encoding", "grace", "max_loss", "max_lag"), str),
    **dict.fromkeys(("on_error", "arena_dir"), str),
    **dict.fromkeys(("peer_address", "peer_domain", "peer_ack", "peer_secret_file"), str),
    **dict.fromkeys(("assume_single_writer", "by_layer"), _flag),
    **dict.fromkeys(("flush_on_signal", "daemon", "pin_memory", "validate"), _flag),
    **dict.fromkeys(("max_staleness", "shards", "seed", "peers"), int),
    "fraction": parse_fraction,
    "interval": _interval,
    "overhead": parse_overhead,
    "max_bandwidth": parse_bytes,
    "partition_bytes": _whole_bytes,
    "timeout": float,
    "peer_bandwidth": parse_bytes,
    "peer_tls": parse_paths,
}
