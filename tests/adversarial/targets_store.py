"""Make hostile files of a store: see `tests.adversarial.targets`."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scarctl.errors import Contention, ScarError
from scarctl.ops.assemble import check_complete, content, onto, whole_groups
from scarctl.ops.sinks import FileSink
from scarctl.ops.survey import survey
from scarctl.recovery.plan import plan_partial
from scarctl.recovery.reshard import find_parts
from scarctl.recovery.shared_plan import execute_shared, plan_lost, plans_back
from scarctl.recovery.shares import open_shares
from scarctl.state import codec
from scarctl.state.layout import Layout, TensorSpec
from scarctl.state.layouts import Layouts
from scarctl.state.raw_tensor import RawTensor
from scarctl.store import Snapshot, Store, Topology, read_snapshot, verify
from scarctl.store.format import canonical, checksum
from scarctl.store.header import parse_header
from scarctl.store.lock import StoreLock
from scarctl.store.record import Record
from scarctl.store.segment import TABLE
from scarctl.store.settings import Settings
from scarctl.store.table import parse_table
from scarctl.store.term import Place, Term
from tests.adversarial.image import LAYOUT, SEED, make, make_ranks
from tests.adversarial.mutate import bytes_of, has_raw, mangle, text, with_raw
from tests.store.helpers import read_all

Target = Callable[[random.Random], None]


class Defect(Exception):
    """A reader has answered as it must not."""


def signed(obj: dict[str, Any]) -> bytes:
    """Return a JSON file of a store with a valid checksum, if the content allows one."""
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


class _Buffers:
    """A file that is not written, but notes where bytes would be put."""

    def __init__(self, specs: dict[str, TensorSpec]) -> None:
        self.tensors = {name: np.zeros(spec.nbytes, np.uint8) for name, spec in specs.items()}

    def write(self, name: str, rows: Any, data: np.ndarray) -> None:
        self.tensors[name].reshape(-1, data.shape[1])[rows] = data

    def commit(self) -> None: ...

    def __enter__(self) -> _Buffers:
        return self

    def __exit__(self, *error: object) -> None: ...


class StoreTargets:
    """Targets that read a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.image = make(0, shards=2, rounds=1)
        files = self.image.files
        self.records = {
            name: json.loads(data) for name, data in files.items() if name.split("/")[2:3] == ["log"]
        }
        self.terms = {
            name: json.loads(data) for name, data in files.items() if name.split("/")[2:3] == ["terms"]
        }
        self.segments = {name: data for name, data in files.items() if name.split("/")[2:3] == ["seg"]}
        self.snapshot = json.loads(files["snapshots/first.json"])
        self.settings = json.loads(files["scarctl.json"])
        self.layout = json.loads(files[f"layout/{LAYOUT.digest}.json"])
        self.shard_of = LAYOUT.shards(2, SEED)
        self.ranks = make_ranks()
        parsed = {name: json.loads(data) for name, data in self.ranks.files.items() if name.endswith(".json")}
        self.topologies = {name: obj for name, obj in parsed.items() if name.startswith("topology/")}
        self.places = {name: obj for name, obj in parsed.items() if obj["kind"] == "layout"}
        self.rank_logs = {name: obj for name, obj in parsed.items() if "/log/" in name}
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
        Record.parse(self._json(rng, obj), "file", shard=obj["lane"], place=Place(*obj["place"]))

    def term(self, rng: random.Random) -> None:
        obj = rng.choice(list(self.terms.values()))
        Term.parse(self._json(rng, obj), "file", shard=obj["lane"], number=obj["number"])

    def _table_of(self, file: bytes) -> tuple[list[np.ndarray], bytes, np.ndarray]:
        """Return the arrays and the text of a full record's table, and the segment's own partitions."""
        obj, data = _header_of(file)
        found = {name: data[slice(*entry["data_offsets"])] for name, entry in obj.items() if name[0] != "_"}
        arrays = [np.frombuffer(found[f"scarctl/{name}"], "<i8").copy() for name in TABLE]
        return arrays, found["scarctl/table"], np.frombuffer(found["scarctl/partitions"], "<i8")

    def table(self, rng: random.Random) -> None:
        """Read a table whose arrays contradict each other, or whose text is another."""
        full = [file for file in self.segments.values() if "scarctl/table" in _header_of(file)[0]]
        arrays, content, own = self._table_of(rng.choice(full))
        if rng.randrange(2):
            for _ in range(rng.randrange(1, 4)):
                array = rng.choice([one for one in arrays if len(one)] or [np.zeros(1, np.int64)])
                array[rng.randrange(len(array))] = rng.choice(
                    (-1, 0, 1, 1 << 62, -(1 << 63), (1 << 63) - 1, 1 << 31, rng.randrange(64))
                )
        elif rng.randrange(2):
            content = bytes_of(rng, content)
        else:
            state = mangle(rng, json.loads(content), rng.randrange(1, 3))
            content = with_raw(json.dumps(state)).encode("utf-8", "surrogatepass")
        parse_table(arrays, content, own, LAYOUT.partitions, "file")

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

    def topology_file(self, rng: random.Random) -> None:
        name = rng.choice(list(self.topologies))
        epoch = int(name[-13:-5])
        found = Topology.parse(self._json(rng, self.topologies[name]), "file", epoch=epoch)
        if Topology.parse(found.data, "file", epoch=epoch) != found:
            raise Defect("what was read is not written back")

    def layout_places(self, rng: random.Random) -> None:
        """Read boxes of whole tensors with false places."""
        objs = [obj["layout"] for obj in self.places.values()]
        chosen = [rng.choice(objs) for _ in range(rng.randrange(1, 4))]
        layouts = [Layout.from_json(mangle(rng, obj, rng.randrange(0, 3))) for obj in chosen]
        ids = [np.arange(min(layout.partitions, 1000)) for layout in layouts]
        joined = Layouts(layouts)
        if joined.partitions:
            joined.row_ranges(np.arange(min(joined.partitions, 1000)))
        for layout in layouts:
            for i in range(min(layout.partitions, 3)):
                layout.name(i)
        for attempt in (
            lambda: [layout.match("table[20:30]") for layout in layouts],
            lambda: whole_groups(layouts),
            lambda: check_complete(layouts),
            lambda: content(layouts, ids),
            lambda: onto(layouts),
        ):
            try:
                attempt()
            except ScarError:
                continue

    def rank_store(self, rng: random.Random) -> None:
        """Open a store of ranks with false topologies, layouts or logs, as commands do."""
        changed: dict[str, bytes] = {}
        what = rng.randrange(4)
        if what == 0:
            name = rng.choice(list(self.topologies))
            changed[name] = self._json(rng, self.topologies[name])
        elif what == 1:
            other = rng.randrange(1, 99)
            obj = {**rng.choice(list(self.topologies.values())), "epoch": other}
            changed[f"topology/{other:08d}.json"] = signed(mangle(rng, obj, rng.randrange(2)))
        elif what == 2:
            changed |= self._lying_places(rng)
        else:
            name = rng.choice(list(self.rank_logs))
            changed[name] = signed(mangle(rng, self.rank_logs[name], rng.randrange(1, 3)))
        store = self.ranks.open(changed)
        for attempt in (
            lambda: find_parts(store, sealed=True),
            lambda: self._shared(store, None),
            lambda: self._shared(store, read_snapshot(store, "first")),
            lambda: self._verify(store),
            lambda: self._inspect(store),
        ):
            try:
                attempt()
            except ScarError:
                continue

    def _lying_places(self, rng: random.Random) -> dict[str, bytes]:
        """Replace the layout of a shard's newest record, with a valid digest."""
        shard = rng.randrange(4, 7)
        name = max(name for name in self.rank_logs if name.startswith(f"lanes/{shard}/log/"))
        record = dict(self.rank_logs[name])
        obj = self.places[f"layout/{record['layout']}.json"]
        layout = Layout.from_json(mangle(rng, obj["layout"], rng.randrange(1, 3)))
        changed = {}
        for path, other in self.rank_logs.items():
            if path.rpartition("/")[0] == name.rpartition("/")[0] and other["kind"] != "end":
                changed[path] = signed({**other, "layout": layout.digest})
        made = {**obj, "digest": layout.digest, "layout": layout.to_json()}
        return {**changed, f"layout/{layout.digest}.json": signed(made)}

    def _shared(self, store: Store, snapshot: Snapshot | None) -> None:
        state = open_shares(store, snapshot)
        if state.nbytes > 1 << 22:
            return
        none = [None] * len(state.shares)
        plan = plan_lost(state, state.everything(), none)
        json.dumps(plan.to_json(), allow_nan=False)
        check_complete(state.layouts)
        specs, targets = content(state.layouts, state.everything())
        if sum(spec.nbytes for spec in specs.values()) > 1 << 22:
            raise Defect("what is to be written is larger than what was saved")
        sinks = [
            FileSink(of, target, _Buffers(specs)) for of, target in zip(state.layouts, targets, strict=True)
        ]
        for one in [plan, *plans_back(state, none, 0, snapshot)]:
            execute_shared(one, none, sinks)

    def extras_text(self, rng: random.Random) -> None:
        tree = mangle(rng, json.loads(self.extras), rng.randrange(1, 4))
        tensors = dict(self.tensors)
        if rng.randrange(3) == 0:
            name = rng.choice(list(tensors))
            shape = tuple(rng.choice((0, 1, 2, 6, 1 << 40, 1 << 62)) for _ in range(rng.randrange(4)))
            tensors[name] = RawTensor(rng.choice(("F32", "U8", "BF16", "C64")), shape, tensors[name].data)
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
        """Open, as commands do, a store whose files are false but consistent, with valid checksums."""
        changed: dict[str, bytes] = {}
        what = rng.randrange(4)
        newest = max(self.records)
        if what == 0:
            name = rng.choice(list(self.terms))
            changed[name] = self._json(rng, self.terms[name])
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
        name = newest.partition("/log/")[0] + "/seg/" + ref["name"]
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
        plan_partial(np.arange(LAYOUT.partitions), LAYOUT, self.shard_of, store.state(0, LAYOUT))

    def _verify(self, store: Store) -> None:
        verify(store, read_data=True)

    def _inspect(self, store: Store) -> None:
        view = survey(store, str(self.folder / "none"))
        json.dumps(view.to_json(None), allow_nan=False)

    def _records(self, store: Store) -> None:
        for shard in store.shards():
            for _ in store.log(shard).records():
                pass
