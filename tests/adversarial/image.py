"""Make a small store with everything that a store can hold, its files in memory, and the truth about its copies."""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from unittest import mock

import numpy as np

from scarctl.state.encoding import decode, encode, parts
from scarctl.state.encodings import Encoding
from scarctl.state.version import pack
from scarctl.store import Collector, Store, complete_sets, create_snapshot, open_writer, sealed_sets
from scarctl.store.backends.address import Address
from scarctl.store.encoder import Encoder
from scarctl.store.format import TEMPORARY, check_name, corrupt
from scarctl.util.arrays import Ids
from tests.store.helpers import Data, files, make_finite, memory_folder, place, small_layout
from tests.support.ranks import RankStore

LAYOUT = small_layout()
SEED = 7
T = TypeVar("T")
R = TypeVar("R")


class MemoryBlobs:
    """A store's files as a dictionary: read-only, with the guarantees of `LocalBlobs`."""

    gap = 16 << 10
    batch = 4 << 20
    exclusive = True

    def __init__(self, root: Path, content: dict[str, bytes]) -> None:
        self.root = root
        self.content = content

    def where(self, name: str) -> str:
        return str(self.root / name)

    def has(self, name: str) -> bool:
        check_name(name)
        return name in self.content

    def top(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.content})

    def read(self, name: str, limit: int) -> bytes:
        with self.reader(name) as file:
            if file.size > limit:
                raise corrupt(self.where(name), f"it has {file.size} bytes, more than the limit of {limit}")
            return file.read(0, file.size)

    @contextmanager
    def reader(self, name: str) -> Iterator[MemoryReader]:
        check_name(name)
        if name not in self.content:
            raise FileNotFoundError(errno.ENOENT, "no such file", self.where(name))
        yield MemoryReader(self.content[name], self.where(name))

    def files(self, folder: str) -> list[tuple[str, int]]:
        return sorted(
            (rest, len(data))
            for name, data in self.content.items()
            if (rest := name.removeprefix(f"{folder}/")) != name
            and "/" not in rest
            and not rest.startswith(TEMPORARY)
        )

    def names(self, folder: str) -> list[str]:
        return [name for name, _ in self.files(folder)]

    def marks(self, folder: str) -> list[tuple[str, str]]:
        return [(name, "") for name in self.names(folder)]

    def each(self, work: Callable[[T], R], items: Iterable[T], size: object = None) -> Iterator[R]:
        return map(work, items)

    def folders(self, folder: str) -> list[str]:
        below = (name.removeprefix(f"{folder}/") for name in self.content if name.startswith(f"{folder}/"))
        return sorted({rest.partition("/")[0] for rest in below if "/" in rest})

    def close(self) -> None:
        """Do nothing: no file is open."""


class MemoryReader:
    def __init__(self, data: bytes, what: str) -> None:
        self._data = data
        self._what = what
        self.size = len(data)

    def read(self, start: int, stop: int) -> bytes:
        if not 0 <= start <= stop <= self.size:
            raise corrupt(self._what, f"bytes {start}..{stop} are wanted, it has {self.size}")
        return self._data[start:stop]

    def read_into(self, start: int, buffer: memoryview) -> None:
        buffer[:] = self.read(start, start + len(buffer))

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for start, buffer in ranges:
            self.read_into(start, buffer)


@dataclass
class Image:
    """The store, and its true states. Two calls of `make` with the same seed differ only in times."""

    root: Path
    """The former place of the store, which messages name."""
    files: dict[str, bytes] = field(default_factory=dict)
    copies: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By version: the bytes of all partitions at that version."""
    extras: dict[int, object] = field(default_factory=dict)
    """By version."""
    newest: dict[int, int] = field(default_factory=dict)
    """Version of the newest copy of every partition."""
    sealed: list[int] = field(default_factory=list)
    """Versions of the sealed sets, oldest first."""
    named: dict[str, int] = field(default_factory=dict)
    """Version of every snapshot."""

    def open(self, changed: dict[str, bytes] | None = None) -> Store:
        """Open the store with some files changed. Raises the errors of opening."""
        blobs = MemoryBlobs(self.root, {**self.files, **(changed or {})})
        return Store._open(Address.parse(self.root), blobs)  # type: ignore[arg-type]

    def write(self, folder: Path) -> None:
        """Write the store as files."""
        for name, data in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def make(
    seed: int = 0,
    *,
    shards: int = 3,
    rounds: int = 2,
    encoding: Encoding = "exact",
) -> Image:
    """Make a store with superseded and moved copies, a collected log, a roll-back, and two snapshots.

    rounds: of changes between two sealed states. encoding: of every other change.
    """
    folder, names = memory_folder(), random.Random(seed)
    try:
        with (
            mock.patch.object(uuid, "uuid4", side_effect=lambda: uuid.UUID(int=names.getrandbits(128))),
            mock.patch.object(socket, "gethostname", return_value="host"),
            mock.patch.object(os, "getpid", return_value=4242),
        ):
            image = _Maker(folder / "run", seed, shards, rounds, encoding).image
    finally:
        shutil.rmtree(folder)
    return image


def make_ranks() -> Image:
    """Make a store saved by four ranks, then by three: with topologies, layouts with places, and a snapshot."""
    folder = memory_folder()
    try:
        four = RankStore(folder / "run", 4)
        four.save(3)
        four.save(4, [0, 2], every=2)
        create_snapshot(four.store, "first", complete_sets(four.close().store)[0])
        three = RankStore(folder / "run", 3)
        three.save(6)
        three.save(7, [1], every=2)
        three.close()
        return Image(folder / "run", files(folder / "run"))
    finally:
        shutil.rmtree(folder)


class _Maker:
    def __init__(self, root: Path, seed: int, shards: int, rounds: int, encoding: Encoding) -> None:
        rows = {"emb": 1, "fc.*": 8, "odd": 3}
        self.store = Store.create(root, shards=shards, seed=SEED, rows=rows)
        self.image = Image(root)
        self.encoding = encoding
        self.rng = np.random.default_rng(seed)
        self.data = Data(LAYOUT, seed)
        self.step = 0
        self.seq = 0
        with open_writer(self.store, layout=LAYOUT) as self.writer:
            collector = Collector(self.writer, ratio=1.2, floor=0, turn_bytes=50_000)
            self.seal("first")
            self.change(rounds)
            self.seal("second")
            self.change(rounds)
            collector.collect()
            collector.settle()
            self.change(1)
            self.seal()
            self.change_at_once(2)
            self.seal()
            newest, before = dict(self.image.newest), [[t.copy() for t in g] for g in self.data.tensors]
            sealed = self.seq
            self.change(1)
            self.writer.roll_back(sealed)
            self.image.newest, self.data.tensors = newest, before
            self.change(rounds - 1)
            self.seal()
            self.change(rounds - 1)
        self.store.close()
        self.image.files = files(root)

    def change(self, rounds: int) -> None:
        """Change some partitions, and save them."""
        for _ in range(rounds):
            self.step += 1
            self._save(self._some(), sealed=False)

    def _some(self) -> Ids:
        return self.rng.permutation(LAYOUT.partitions)[: LAYOUT.partitions // 3]

    def change_at_once(self, rounds: int) -> None:
        """Do the same with one commit that has copies of every round's step."""
        steps: dict[int, int] = {}
        for _ in range(rounds):
            self.step += 1
            ids = self._some().tolist()
            self._change(ids)
            steps |= dict.fromkeys(ids, self.step)
        ids, own = np.array(sorted(steps)), np.array([steps[i] for i in sorted(steps)])
        self.seq = self.writer.commit(ids, self.data, step=self.step, steps=own).seq
        self.image.newest.update({i: pack(self.writer.epoch, step) for i, step in steps.items()})

    def seal(self, name: str | None = None) -> None:
        """Do the same as `change`, sealed."""
        self.step += 1
        version = self._save(self._some() if self.image.newest else np.arange(LAYOUT.partitions), sealed=True)
        self.image.newest = dict.fromkeys(range(LAYOUT.partitions), version)
        self.image.sealed.append(version)
        if name is not None:
            create_snapshot(self.store, name, sealed_sets([self.writer.state])[0])
            self.image.named[name] = version

    def _save(self, chosen: Ids, *, sealed: bool) -> int:
        if sealed:  # what is not stored exactly has to be in it
            state = self.writer.state
            chosen = np.union1d(chosen, state.ids[state.encoded])
        chosen = np.sort(chosen)
        ids = chosen.tolist()
        encoding = self.encoding if not sealed and self.step % 2 else "exact"
        version = self._change(ids)
        self.image.copies[version].update({i: self._coarse(i, encoding) for i in ids})
        self.image.extras[version] = extras = {"step": self.step, "noise": self.rng.bytes(21)}
        source = Encoder(LAYOUT, encoding, self.data, chosen) if encoding != "exact" else self.data
        record = self.writer.commit(chosen, source, step=self.step, sealed=sealed, extras=extras)
        self.seq = record.seq
        self.image.newest.update(dict.fromkeys(ids, version))
        return version

    def _coarse(self, i: int, encoding: Encoding) -> bytes:
        """Return the bytes that come back of a partition that is stored so."""
        g, start, stop = place(LAYOUT, i)
        group = LAYOUT.groups[g]
        stored = [
            encode(self.data.tensors[g][part.of][start:stop].reshape(-1), group.tensors[part.of], part)
            for part in parts(group, encoding)
        ]
        return b"".join(piece.tobytes() for piece in decode(group, encoding, stored))

    def _change(self, ids: list[int]) -> int:
        """Return the version of these partitions' new content."""
        self.data.change(ids, self.step)
        if self.encoding != "exact":
            for group, tensors in zip(LAYOUT.groups, self.data.tensors, strict=True):
                for spec, data in zip(group.tensors, tensors, strict=True):
                    make_finite(data, spec)
        version = pack(self.writer.epoch, self.step)
        self.image.copies[version] = self.data.all(range(LAYOUT.partitions))
        return version
