"""Hostile files of a store: see `tests.attack.targets`."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scarctl import extras as codec
from scarctl.cli.inspect import survey
from scarctl.errors import Contention, ScarError
from scarctl.layout import Layout
from scarctl.recovery import plan_partial
from scarctl.store import Settings, Snapshot, Store, verify
from scarctl.store.format import canonical, checksum, parse_header
from scarctl.store.lock import StoreLock
from scarctl.store.record import Record
from scarctl.store.state import parse_index
from tests.attack.image import LAYOUT, SEED, make
from tests.attack.mutate import bytes_of, has_raw, mangle, text, with_raw
from tests.store.helpers import read_all

Target = Callable[[random.Random], None]


class Defect(Exception):
    """Something answered as it must not."""


def signed(obj: dict[str, Any]) -> bytes:
    """A JSON file of a store with a right checksum, whatever is in it, where there can be one."""
    if has_raw(obj):
        return text({**obj, "checksum": "0" * 64})
    try:
        return canonical({**obj, "checksum": checksum(obj)})
    except ValueError:
        return text(obj)


def safetensors(header: Any, data: bytes) -> bytes:
    raw = with_raw(json.dumps(header)).encode("utf-8", "surrogatepass")
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + data


def _header_of(file: bytes) -> tuple[dict[str, Any], bytes]:
    head = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:head]), file[head:]


def canonical_or(obj: object) -> bytes:
    try:
        return canonical(obj)
    except ValueError:
        return b""


class StoreTargets:
    """What reads a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.image = make(0, shards=2, rounds=1)
        files = self.image.files
        self.records = {
            name: json.loads(data) for name, data in files.items() if name.split("/")[2:3] == ["log"]
        }
        self.indexes = {name: data for name, data in files.items() if name.split("/")[2:3] == ["index"]}
        self.segments = {name: data for name, data in files.items() if name.split("/")[2:3] == ["seg"]}
        self.snapshot = json.loads(files["snapshots/first.json"])
        self.settings = json.loads(files["scarctl.json"])
        self.layout = json.loads(next(data for name, data in files.items() if name.startswith("layout/")))
        self.shard_of = LAYOUT.shards(2, SEED)
        self.extras, self.tensors = codec.encode(
            {
                "lr": 0.1,
                "list": [1, (2, 3), {4}, frozenset({5})],
                "keys": {1: "a", (2,): None},
                "np": np.float32(1.5),
                "array": np.arange(6).reshape(2, 3),
                "odd": np.array(["a", "bc"]),
                "big": 1 << 100,
                "bytes": b"abc",
                "inf": float("inf"),
            }
        )

    # -- files of a store

    def header(self, rng: random.Random) -> None:
        obj, data = _header_of(rng.choice(list(self.segments.values())))
        if rng.randrange(3):
            file = safetensors(mangle(rng, obj, rng.randrange(1, 4)), data)
        else:
            file = bytes_of(rng, safetensors(obj, data))
        prefix = 8 + int.from_bytes(file[:8], "little") if rng.randrange(9) else rng.randrange(99)
        size = rng.choice((len(file), len(file), len(file), prefix, 1 << 40, 0))
        parse_header(file[:prefix], size, "file")

    def _json(self, rng: random.Random, obj: dict[str, Any]) -> bytes:
        if rng.randrange(4) == 0:
            return bytes_of(rng, canonical(obj))
        changed = mangle(rng, obj, rng.randrange(1, 4))
        return text(changed) if rng.randrange(6) == 0 else signed(changed)

    def record(self, rng: random.Random) -> None:
        obj = rng.choice(list(self.records.values()))
        Record.parse(self._json(rng, obj), "file", shard=obj["shard"], seq=obj["seq"])

    def _index_bytes(self, rng: random.Random, name: str) -> bytes:
        file = self.indexes[name]
        obj, data = _header_of(file)
        what = rng.randrange(4)
        if what == 0:
            return bytes_of(rng, file)
        if what == 1:  # arrays that contradict each other
            body = bytearray(data[:-32])
            for _ in range(rng.randrange(1, 4)):
                at = 8 * rng.randrange(len(body) // 8)
                number = rng.choice(
                    (-1, 0, 1, 1 << 62, -(1 << 63), (1 << 63) - 1, 1 << 31, rng.randrange(64))
                )
                body[at : at + 8] = struct.pack("<q", number)
            made = safetensors(obj, bytes(body))
        else:
            state = mangle(rng, json.loads(obj["__metadata__"]["state"]), rng.randrange(1, 3))
            if what == 2:
                obj["__metadata__"]["state"] = with_raw(json.dumps(state))
            else:
                obj = mangle(rng, obj)
            made = safetensors(obj, data[:-32])
        return made + hashlib.sha256(made).digest()

    def index(self, rng: random.Random) -> None:
        name = rng.choice(list(self.indexes))
        raw = np.frombuffer(self._index_bytes(rng, name), np.uint8)
        part = name.split("/")
        parse_index(raw, "file", shard=int(part[1]), seq=int(part[3][:20]))

    def snapshot_file(self, rng: random.Random) -> None:
        Snapshot.parse(self._json(rng, self.snapshot), "file", name="first")

    def settings_file(self, rng: random.Random) -> None:
        if rng.randrange(3) == 0:
            Settings.from_json(mangle(rng, self.settings["settings"], 2), "file")
        else:
            self.image.open({"scarctl.json": self._json(rng, self.settings)})

    def layout_file(self, rng: random.Random) -> None:
        if rng.randrange(2):
            name = f"layout/{self.layout['digest']}.json"
            self.image.open({name: self._json(rng, self.layout)}).layout(self.layout["digest"])
            return
        layout = Layout.from_json(mangle(rng, self.layout["layout"], rng.randrange(1, 4)))
        LAYOUT.differences(layout)
        layout.base.sum()

    def extras_text(self, rng: random.Random) -> None:
        tree = mangle(rng, json.loads(self.extras), rng.randrange(1, 4))
        tensors = dict(self.tensors)
        if rng.randrange(3) == 0:
            name = rng.choice(list(tensors))
            shape = tuple(rng.choice((0, 1, 2, 6, 1 << 40, 1 << 62)) for _ in range(rng.randrange(4)))
            tensors[name] = codec.RawTensor(
                rng.choice(("F32", "U8", "BF16", "C64")), shape, tensors[name].data
            )
        given = with_raw(json.dumps(tree))
        codec.decode(given if rng.randrange(4) else given[: rng.randrange(len(given) + 1)], tensors)

    def lock(self, rng: random.Random) -> None:
        path = self.folder / "lock"
        path.write_bytes(bytes_of(rng, b"1234 host.example\n"))
        with path.open() as held:
            import fcntl

            fcntl.flock(held, fcntl.LOCK_EX)
            try:
                StoreLock(path).release()
            except Contention as error:
                if not error.message.isprintable():
                    raise Defect(f"{error.message!r} reaches the terminal") from error
                raise
        raise Defect("a lock that is held was taken")

    def store(self, rng: random.Random) -> None:
        """Consistent lies: everything that is read has a right checksum, and is opened as commands do."""
        changed: dict[str, bytes] = {}
        what = rng.randrange(4)
        shard = rng.randrange(2)
        newest = max(name for name in self.records if name.startswith(f"shards/{shard}/"))
        if what == 0:
            name = rng.choice(list(self.indexes))
            changed[name] = self._index_bytes(rng, name)
        elif what == 1:
            changed[newest] = signed(mangle(rng, self.records[newest], rng.randrange(1, 3)))
        elif what == 2:
            changed["snapshots/first.json"] = signed(mangle(rng, self.snapshot))
        else:
            changed |= self._lying_segment(rng, newest)
        store = self.image.open(changed)
        for attempt in (self._read_all, self._plan, self._verify, self._inspect, self._records):
            try:
                attempt(store)
            except ScarError:
                continue

    def _lying_segment(self, rng: random.Random, newest: str) -> dict[str, bytes]:
        record = dict(self.records[newest])
        ref = dict(record["segment"])
        name = newest.rpartition("/log/")[0] + "/seg/" + ref["name"]
        file = self.segments[name]
        obj, data = _header_of(file)
        if rng.randrange(2):
            file = safetensors(mangle(rng, obj), data)
            if rng.randrange(2):
                ref["head"] = 8 + int.from_bytes(file[:8], "little")
                grown = len(file) - ref["bytes"]
                ref["bytes"], ref["tail"] = ref["bytes"] + grown, ref["tail"] + grown
        else:
            out = bytearray(file)
            for _ in range(rng.randrange(1, 3)):  # ids and checksums
                at = ref["tail"] + 8 * rng.randrange((len(out) - ref["tail"]) // 8)
                number = rng.choice((-1, 0, 1, 1 << 62, -(1 << 63), (1 << 63) - 1, rng.randrange(64)))
                out[at : at + 8] = struct.pack("<q", number)
            file = bytes(out)
        head, tail = ref["head"], ref["tail"]
        ref["tail_digest"] = hashlib.sha256(file[tail:]).hexdigest()
        ref["digest"] = hashlib.sha256(file[:head] + file[head + ref["data"] : tail]).hexdigest()
        return {newest: signed({**record, "segment": ref}), name: file}

    def _read_all(self, store: Store) -> None:
        for shard in store.shards():
            state = store.state(shard)
            if state.layout is not None:
                read_all(store, state)
            store.read_extras(state)

    def _plan(self, store: Store) -> None:
        states = {shard: store.state(shard, LAYOUT) for shard in store.shards()}
        plan_partial(np.arange(LAYOUT.partitions), LAYOUT, self.shard_of, states)

    def _verify(self, store: Store) -> None:
        verify(store, read_data=True)

    def _inspect(self, store: Store) -> None:
        view = survey(store, str(self.folder / "none"))
        json.dumps(view.to_json(None), allow_nan=False)

    def _records(self, store: Store) -> None:
        for shard in store.shards():
            for _ in store.records(shard):
                pass
