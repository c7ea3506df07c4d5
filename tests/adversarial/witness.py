"""Derive from the messages of `tests.adversarial.workload` alone what must be true of a store.

Everything has one state that was acknowledged last, and states that were begun since. After a crash the store has one
of these.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from scarctl.errors import NoStore
from scarctl.state.encodings import Encoding
from scarctl.state.version import NEVER, pack
from scarctl.store import Store, read_snapshot, sealed_sets, verify
from scarctl.store.snapshot import snapshot_names
from tests.adversarial.workload import Message, Player, content
from tests.store.helpers import read_all

T = TypeVar("T")
Mark = tuple[int, int]
"""Epoch and step of a sealed state."""


class Violation(Exception):
    """A condition does not hold."""


class Options(Generic[T]):
    """The state acknowledged last, and those begun since."""

    def __init__(self, first: T) -> None:
        self.all = [first]

    @property
    def sure(self) -> T | None:
        """Return the state if it is certain."""
        return self.all[0] if len(self.all) == 1 else None

    def begin(self, state: T) -> None:
        self.all.append(state)

    def done(self) -> None:
        del self.all[:-1]


@dataclass(frozen=True)
class Copies:
    """The version, stamp and encoding of every saved partition; the stamp of the extras."""

    version: Mapping[int, int] = field(default_factory=dict)
    stamp: Mapping[int, tuple[int, Encoding]] = field(default_factory=dict)
    extras: int | None = None


@dataclass(frozen=True)
class Contents:
    """The contents of the store: its copies, and those of its seals, oldest first."""

    copies: Copies = field(default_factory=Copies)
    seals: Mapping[Mark, Copies] = field(default_factory=dict)

    def committed(self, message: Message) -> Contents:
        """Return the contents after a commit."""
        version = pack(message["epoch"], message["step"])
        ids, old = message["ids"], self.copies
        own = [pack(message["epoch"], step) for step in message["steps"]]
        copies = Copies(
            {**old.version, **dict(zip(ids, own, strict=True))},
            {**old.stamp, **dict.fromkeys(ids, (message["stamp"], message["encoding"]))},
            message["stamp"] if message["extras"] else old.extras,
        )
        if not message["sealed"]:
            return Contents(copies, self.seals)
        copies = replace(copies, version=dict.fromkeys(copies.version, version))
        return Contents(copies, {**self.seals, (message["epoch"], message["step"]): copies})

    def rolled_back(self, to: Mark) -> Contents:
        marks = list(self.seals)
        before = marks[: marks.index(to) + 1]
        return Contents(self.seals[to], {mark: self.seals[mark] for mark in before})


class Witness:
    """Takes the messages of all lives of one store."""

    def __init__(self, encoding: Encoding = "exact") -> None:
        self.encoding = encoding
        self.exists = Options(False)
        self.contents = Options(Contents())
        self.snapshots: dict[str, Options[Copies | None]] = {}
        self.stamp = 0
        self.acknowledged = 0

    def take(self, message: Message) -> None:
        """Take a message. Raises Violation if a writer has found what cannot be."""
        if "begin" in message:
            getattr(self, f"_begin_{message['begin']}", lambda _: None)(message)
        elif "done" in message:
            getattr(self, f"_done_{message['done']}")(message)
        else:
            self._failed_commit(message)

    def copy(self) -> Witness:
        """Return a copy; states are never changed, only replaced."""
        other = copy.copy(self)
        other.exists = copy.deepcopy(self.exists)
        other.contents = _copied(self.contents)
        other.snapshots = {name: _copied(options) for name, options in self.snapshots.items()}
        return other

    def _begin_create(self, _: Message) -> None:
        self.exists.begin(True)

    def _done_open(self, message: Message) -> None:
        """Note that what the new writer has found is now certain."""
        self.exists.done()
        found = {i: version for i, version in enumerate(message["version"]) if version != NEVER}
        options = self.contents
        options.all = [option for option in options.all if option.copies.version == found][:1]
        if not options.all:
            raise Violation(f"a writer found what nobody saved: {found}")

    def _begin_commit(self, message: Message) -> None:
        self.stamp = max(self.stamp, message["stamp"])
        # The writer first settles records in doubt, and then they exist.
        self.contents.begin(self.contents.all[-1].committed(message))

    def _done_commit(self, _: Message) -> None:
        self.contents.done()
        self.acknowledged += 1

    def _failed_commit(self, message: Message) -> None:
        if not message["doubt"]:
            self.contents.all.pop()

    def _begin_back(self, message: Message) -> None:
        epoch, step = message["to"]
        self.contents.begin(self.contents.all[-1].rolled_back((epoch, step)))

    def _done_back(self, _: Message) -> None:
        self.contents.done()
        self.acknowledged += 1

    def _begin_snapshot(self, message: Message) -> None:
        epoch, step = message["of"]
        mark = (epoch, step)
        named = next(option.seals[mark] for option in self.contents.all if mark in option.seals)
        self._name(message).begin(named)

    def _done_snapshot(self, message: Message) -> None:
        self._name(message).done()
        self.acknowledged += 1

    def _begin_drop(self, message: Message) -> None:
        self._name(message).begin(None)

    def _done_drop(self, message: Message) -> None:
        self._name(message).done()

    def _name(self, message: Message) -> Options[Copies | None]:
        return self.snapshots.setdefault(message["name"], Options(None))


def _copied(options: Options[T]) -> Options[T]:
    fresh = copy.copy(options)
    fresh.all = list(options.all)
    return fresh


def check(url: str, witness: Witness, *, tidy: bool = False) -> None:
    """Raise Violation unless the store equals what the witness knows. `tidy`: and has no orphans."""
    try:
        store = Store.open(url)
    except NoStore:
        if witness.exists.sure:
            raise Violation("the store is gone") from None
        return
    if not any(witness.exists.all):
        raise Violation("there is a store that nobody made")
    report = verify(store, read_data=True)
    if report.problems or (tidy and report.orphans):
        raise Violation(f"verify: {report.problems[:3]} {report.orphans[:3]}")
    options = witness.contents.all
    copies = _read(store, None, [option.copies for option in options], "the newest state")
    _check_sealed(store, next(option for option in options if option.copies is copies))
    names = snapshot_names(store)
    for name in {*names, *witness.snapshots}:
        known = witness.snapshots.get(name, Options(None)).all
        if name not in names:
            if None not in known:
                raise Violation(f"snapshot {name} is gone")
            continue
        wanted = [option for option in known if option is not None]
        _read(store, read_snapshot(store, name).seqs[0], wanted, f"snapshot {name}")


def _check_sealed(store: Store, contents: Contents) -> None:
    there = sealed_sets([store.state(0)])
    if not contents.seals:
        return
    newest = max(contents.seals)
    if not there or (there[0].epoch, there[0].step) != newest:
        raise Violation(f"the newest sealed state is not {newest}, but one of {there[:1]}")
    _read(store, there[0].seqs[0], [contents.seals[newest]], f"sealed {newest}")


def _read(store: Store, at: int | None, options: list[Copies], what: str) -> Copies:
    """Return which of the options a state is, with every byte read."""
    state = store.state(0, at=at)
    saved = state.saved
    version = dict(zip(state.ids[saved].tolist(), state.version[saved].tolist(), strict=True))
    held, bad = ({}, {}) if state.layout is None else read_all(store, state)
    if bad:
        raise Violation(f"{what} cannot be read: {dict(list(bad.items())[:3])}")
    extras = store.read_extras(state)
    stamp = extras[1]["stamp"] if extras is not None else None  # type: ignore[index]
    for option in options:
        if option.version == version and option.extras == stamp:
            wrong = [i for i, data in held.items() if data != content(i, *option.stamp[i])]
            if wrong or held.keys() != version.keys():
                raise Violation(f"{what} has wrong bytes in partitions {wrong[:5]}")
            return option
    raise Violation(
        f"{what} has versions {version}, extras {stamp}, which is none of {len(options)} that may be"
    )


def check_goes_on(url: str, witness: Witness, *, tidy: bool = True) -> None:
    """Check that the next writer works, whatever was left. `tidy`: and that it leaves no garbage."""
    player = Player(url, witness.take, stamp=witness.stamp, encoding=witness.encoding)
    try:
        player.play([("open",), ("commit",)])
        if tidy:
            player.play([("seal",), ("commit",), ("collect",)])
    finally:
        player.close()
    if tidy:
        check(url, witness, tidy=True)
        return
    _read(Store.open(url), None, [option.copies for option in witness.contents.all], "the newest state")
