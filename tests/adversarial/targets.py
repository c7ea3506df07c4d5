"""Attack everything that takes untrusted input: each target makes one hostile case from a seed, and reads it."""

from __future__ import annotations

import hashlib
import io
import json
import random
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from scarctl.arena.arena import Arena
from scarctl.arena.extras import parse_extras, write_extras
from scarctl.arena.folder import arena_folder
from scarctl.arena.header import EXTRAS, FIELDS, FILE, Geometry
from scarctl.arena.stale import survey as stale_arenas
from scarctl.cli.inspect_view import plain
from scarctl.cli.main import default_map
from scarctl.config import SessionSettings, read_file, storage_options
from scarctl.daemon import protocol
from scarctl.daemon.server import Daemon, _Peer
from scarctl.errors import Contention, ScarError
from scarctl.formats.state_file import open_state
from scarctl.ops.survey import survey
from scarctl.state.layout import Layout
from scarctl.state.version import pack
from scarctl.store.format import parse_json
from tests.adversarial.image import LAYOUT
from tests.adversarial.mutate import bytes_of, has_raw, hostile, mangle, text, with_raw
from tests.adversarial.targets_store import StoreTargets, _header_of, canonical_or, safetensors
from tests.daemon.rig import copy_into

Target = Callable[[random.Random], None]


class Targets(StoreTargets):
    """All targets, with what they need in their own folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._state_files()
        self._arena()
        self._daemon()

    def all(self) -> dict[str, tuple[int, Target]]:
        """Return by name the share of the cases, and the target."""
        return {
            "safetensors header": (240, self.header),
            "record": (120, self.record),
            "table": (60, self.table),
            "term": (30, self.term),
            "snapshot": (80, self.snapshot_file),
            "settings": (80, self.settings_file),
            "layout": (100, self.layout_file),
            "topology": (60, self.topology_file),
            "layout with places": (60, self.layout_places),
            "store of ranks": (12, self.rank_store),
            "extras": (100, self.extras_text),
            "lock file": (20, self.lock),
            "state file, safetensors": (60, self.state_file),
            "state file, pt": (10, self.torch_file),
            "state file, dcp": (8, self.dcp_folder),
            "message": (60, self.message),
            "reply": (30, self.reply),
            "request": (30, self.request),
            "arena": (25, self.arena),
            "memory extras": (40, self.extras_file),
            "scarctl.toml": (20, self.toml),
            "whole store": (12, self.store),
        }

    # -- state files

    def _state_files(self) -> None:
        tensors = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
        packed = io.BytesIO()
        torch.save({**tensors, "nested": {"l": [tensors["w"] + 1]}, "step": 7}, packed)
        self.pt = packed.getvalue()
        legacy = io.BytesIO()
        torch.save(tensors, legacy, _use_new_zipfile_serialization=False)
        self.legacy = legacy.getvalue()
        from torch.distributed.checkpoint import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        self.dcp = self.folder / "dcp"
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(dict(tensors), storage_writer=FileSystemWriter(self.dcp), no_dist=True)
        self.dcp_metadata = (self.dcp / ".metadata").read_bytes()

    def _open_state(self, data: bytes, name: str) -> None:
        path = self.folder / name
        path.write_bytes(data)
        state = open_state(path)
        for tensor in state.specs:
            state.rows(tensor).sum()

    def state_file(self, rng: random.Random) -> None:
        obj, data = _header_of(rng.choice(list(self.segments.values())))
        what = rng.randrange(3)
        file = safetensors(obj if what == 0 else mangle(rng, obj, rng.randrange(1, 3)), data)
        self._open_state(bytes_of(rng, file) if what == 0 else file, "state.safetensors")

    def torch_file(self, rng: random.Random) -> None:
        what = rng.randrange(4)
        if what == 0:
            self._open_state(bytes_of(rng, self.legacy), "state.pt")
        elif what == 1:
            self._open_state(bytes_of(rng, self.pt), "state.pt")
        else:  # members with valid checksums
            out = io.BytesIO()
            with zipfile.ZipFile(io.BytesIO(self.pt)) as old, zipfile.ZipFile(out, "w") as new:
                for info in old.infolist():
                    data = old.read(info)
                    if info.filename.endswith("data.pkl") and rng.randrange(8):
                        data = bytes_of(rng, data)
                    elif rng.randrange(12) == 0:
                        continue
                    if rng.randrange(12) == 0:
                        info.filename = rng.choice(
                            ("../../x", "/etc/passwd", "archive/data/99", "a\n\x1b[2J")
                        )
                    new.writestr(info, data)
            self._open_state(out.getvalue(), "state.pt")

    def dcp_folder(self, rng: random.Random) -> None:
        (self.dcp / ".metadata").write_bytes(bytes_of(rng, self.dcp_metadata))
        state = open_state(self.dcp)
        for tensor in state.specs:
            state.rows(tensor).sum()

    # -- the daemon

    def _daemon(self) -> None:
        base = self.folder / "host"
        base.mkdir(mode=0o700)
        self.daemon = Daemon(base)
        self.near, self.far = socket.socketpair()
        self.messages = [
            {"v": 2, "op": "status"},
            {
                "v": 2,
                "op": "claim",
                "store": str(self.folder / "nowhere"),
                "options": {"key": "a", "b": {"c": 1}},
            },
            {"v": 2, "op": "open", "again": True},
            {"v": 2, "op": "drain", "milliseconds": 0},
            {"v": 2, "op": "roll_back", "seqs": {"0": 3, "1": 4}},
            {"v": 2, "op": "watch", "run": "0" * 32},
            {"v": 2, "op": "ask", "store": "0" * 32, "request": {"kind": "recover", "lost": ["x"]}},
            {"v": 2, "op": "hold", "seconds": 1},
            *({"v": 2, "op": op} for op in ("pause", "resume", "close", "leave", "notify")),
        ]

    def message(self, rng: random.Random) -> None:
        message = text(mangle(rng, rng.choice(self.messages), 2))
        data = struct.pack(">I", len(message)) + message
        if rng.randrange(3) == 0:
            data = bytes_of(rng, data)[:150_000]
        near, far = socket.socketpair()
        with near, far:
            far.setblocking(False)
            near.settimeout(0.5)
            try:
                far.sendall(data[:100_000])
            except BlockingIOError:
                return
            far.close()
            try:
                protocol.receive(near)
            except protocol.Closed:
                return

    def request(self, rng: random.Random) -> None:
        """Check a well-formed message: every answer is an error of scarctl's own."""
        message = mangle(rng, rng.choice(self.messages), rng.randrange(1, 3))
        if has_raw(message):
            try:
                message = json.loads(text(message))
            except (ValueError, RecursionError):
                return
        if not isinstance(message, dict) or message.get("op") == "stop":
            return
        self.daemon._answer(self.near, _Peer(self.near), message)
        if message.get("op") == "notify":
            return
        reply = protocol.receive(self.far, protocol.MAX_REPLY)
        protocol.check_reply(reply)

    def reply(self, rng: random.Random) -> None:
        error = protocol.failure(Contention("busy", hint="wait"))
        reply = mangle(rng, rng.choice(({"ok": True, "pid": 3}, error)), rng.randrange(1, 4))
        if has_raw(reply):
            try:
                reply = json.loads(text(reply))
            except (ValueError, RecursionError):
                return
        if isinstance(reply, dict):
            protocol.check_reply(reply)

    # -- the arena's folder

    def _arena(self) -> None:
        self.store_id = self.settings["id"]
        self.base = self.folder / "arenas"
        self.base.mkdir()
        self.place = arena_folder(str(self.base), self.store_id)
        arena = Arena.create(self.place, LAYOUT, run_id=self.store_id, epoch=1)
        everything = np.arange(LAYOUT.partitions)
        assert copy_into(arena, everything, pack(1, 3), 3, whole="ab" * 16)
        arena.distance[:] = 0.5
        arena.reach(4)
        arena.close()
        self.arena_bytes = (self.place / FILE).read_bytes()
        write_extras(self.place, arena.current, arena.slot.moment, {"a": np.arange(3), "b": "c"})
        self.extras_bytes = (self.place / EXTRAS[arena.current]).read_bytes()
        self.plain = self.image.open()

    def arena(self, rng: random.Random) -> None:
        data = bytearray(self.arena_bytes)
        what = rng.randrange(4)
        if what == 0:
            data = bytearray(bytes_of(rng, self.arena_bytes[:8192]) + self.arena_bytes[8192:])
        elif what == 1:  # header
            at = rng.randrange(0, 144, 4)
            number = rng.choice((0, 1, -1, 1 << 31, 1 << 62, -(1 << 63), rng.getrandbits(63)))
            data[at : at + 8] = struct.pack("<q", number)
        elif what == 2:  # fields and arrays
            first = 256 if rng.randrange(2) else struct.unpack_from("<Q", data, 48)[0]
            at = first + 8 * rng.randrange(len(FIELDS) if first == 256 else 9 * LAYOUT.partitions)
            number = rng.choice((0, 1, -1, 1 << 31, 1 << 62, -(1 << 63), (1 << 63) - 1, rng.getrandbits(63)))
            value = struct.pack("<d", rng.choice((1e308, -1e308, float("nan"), float("inf"), -1.0)))
            data[at : at + 8] = struct.pack("<q", number) if rng.randrange(2) else value
        else:  # a false layout, and a matching header
            raw = text(mangle(rng, LAYOUT.to_json()))[:3500]
            layout = Layout.from_json(parse_json(raw, "file"))
            geometry = Geometry(layout, raw)
            if geometry.size > 1 << 24:
                return
            data = data[: geometry.size].ljust(geometry.size, b"\0")
            data[4096 : 4096 + len(raw)] = raw
            struct.pack_into("<QQ", data, 16, geometry.size, layout.partitions)
            struct.pack_into("<QQQ", data, 40, len(raw), geometry.arrays_at, geometry.tensors_at[0])
            struct.pack_into("32s", data, 64, bytes.fromhex(layout.digest))
        path = self.place / FILE
        path.write_bytes(data)
        path.chmod(0o600)
        arena = None
        try:
            view = survey(self.plain, str(self.base))
            json.dumps(view.to_json(None), allow_nan=False)
            plain(view)
            for one in stale_arenas(self.place.parent):
                json.dumps(
                    [one.id, one.pid, one.head_step, one.durable_step, one.pending_partitions],
                    allow_nan=False,
                )
            arena = Arena.open_existing(self.place, run_id=self.store_id)
            if arena is not None:
                for array in (arena.newest(), arena.lifted(arena.version), arena.pending(), arena.intact()):
                    array.sum()
        finally:
            if arena is not None:
                arena.close()

    def extras_file(self, rng: random.Random) -> None:
        obj, data = _header_of(self.extras_bytes)
        what = rng.randrange(4)
        if what == 0:
            file = bytes_of(rng, self.extras_bytes)
        else:
            if what == 1:
                obj["__metadata__"] = mangle(rng, obj["__metadata__"])
            elif what == 2:
                tree = mangle(rng, json.loads(obj["__metadata__"]["extras"]))
                obj["__metadata__"]["extras"] = with_raw(json.dumps(tree))
            else:
                obj = mangle(rng, obj)
            known = obj.get("__metadata__") if isinstance(obj, dict) else None
            if isinstance(known, dict) and rng.randrange(5):
                known.pop("digest", None)
                known["digest"] = hashlib.sha256(canonical_or(known) + data).hexdigest()
            file = safetensors(obj, data)
        parse_extras(file, "extras")

    # -- settings

    def toml(self, rng: random.Random) -> None:
        names = [*SessionSettings.__dataclass_fields__, "json", "limit", "dry-run", "recover", "lost"]
        lines = []
        for name in rng.sample(names, 3):
            value = hostile(rng)
            lines.append(f"{name} = {_toml(value)}")
        if rng.randrange(3) == 0:
            lines.append(f"[{rng.choice(('recover', 'storage_options', 'rows', 'x', 'run.a', '__proto__'))}]")
            lines.append(f"{rng.choice(('key', 'lost', 'json', '*'))} = {_toml(hostile(rng))}")
        data = "\n".join(lines).encode("utf-8", "surrogatepass")
        if rng.randrange(4) == 0:
            data = bytes_of(rng, data)
        (self.folder / "scarctl.toml").write_bytes(data)
        for attempt in (
            lambda: storage_options(read_file(self.folder)),
            lambda: default_map(self.folder),
            lambda: SessionSettings.resolve({"store": "x"}, environ={}, folder=self.folder),
        ):
            try:
                attempt()
            except ScarError:
                continue

    def close(self) -> None:
        self.near.close()
        self.far.close()
        self.daemon._say_farewell()


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if value is None:
        return '""'
    return with_raw(json.dumps(value)).replace("NaN", "nan").replace("Infinity", "inf")
