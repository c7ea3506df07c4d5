"""Make small files that claim large contents, for `tests.adversarial.claims`: stores and state files.

Contents of many megabytes are given as functions: a test that is only collected does not make them.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.arena.header import FILE
from scarctl.state import codec
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.state.version import pack
from scarctl.store import Store, open_writer
from scarctl.store.format import canonical, checksum
from scarctl.store.header import parse_header, place_header
from scarctl.theory.history import MOST
from tests.adversarial.image import LAYOUT, Image
from tests.store.helpers import Data
from tests.support.ranks import belong

HUGE = 1 << 28


def signed(obj: dict[str, Any]) -> bytes:
    """Return a JSON file of a store with a valid checksum."""
    return canonical({**obj, "checksum": checksum(obj)})


class Ground:
    """A store, state files of each kind, and a folder to write to."""

    def __init__(self, root: Path, image: Image) -> None:
        self.root = root
        self.store = root / "run"
        self.state = root / "state.safetensors"
        self.torch = root / "state.pt"
        self.dcp = root / "dcp"
        image.write(self.store)
        save_file({"w": np.arange(4, dtype=np.float32)}, self.state)

    def rewrite(self, folder: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Change every JSON file in a folder of the store."""
        for path in (self.store / folder).iterdir():
            path.write_bytes(signed(change(json.loads(path.read_bytes()))))

    def newest_full(self) -> tuple[Path, dict[str, Any]]:
        """Return the newest full record, after removing those after it."""
        records = sorted((self.store / "lanes/0/log").glob("*/*.json"))
        while (obj := json.loads(records[-1].read_bytes()))["kind"] != "full":
            records.pop().unlink()
        return records[-1], obj

    def relaid(self, layout: Layout) -> None:
        """Give the store another layout, named by its newest record."""
        digest = layout.digest
        for path in (self.store / "layout").iterdir():
            path.unlink()
        text = {"format": 1, "kind": "layout", "digest": digest, "layout": layout.to_json()}
        (self.store / "layout" / f"{digest}.json").write_bytes(signed(text))
        for path in (self.store / "snapshots").iterdir():
            path.unlink()
        path, obj = self.newest_full()
        path.write_bytes(signed(obj | {"layout": digest}))


def bomb(obj: dict[str, Any], unit: bytes, size: int, key: str = "zzz") -> bytes:
    """Return `obj` with a list of `unit` of the maximum length, and a valid checksum."""
    body = listed(unit, size // (len(unit) + 1))
    plain = canonical({k: v for k, v in obj.items() if k != "checksum"})
    inner = plain[:-1] + b',"%s":' % key.encode() + body + b"}"
    digest = hashlib.sha256(inner).hexdigest()
    head = canonical({**{k: v for k, v in obj.items() if k != "checksum"}, "checksum": digest})
    return head[:-1] + b',"%s":' % key.encode() + body + b"}"


def in_json(folder: str, unit: bytes, size: int) -> Callable[[Ground], None]:
    def change(ground: Ground) -> None:
        for path in (ground.store / folder).iterdir():
            path.write_bytes(bomb(json.loads(path.read_bytes()), unit, size))

    return change


def partitions(ground: Ground) -> None:
    ground.relaid(build_layout([("w", "parameter", (TensorSpec("", "F32", (HUGE, 1)),))], rows={"w": 1}))


def header(content: bytes, path: Path) -> None:
    content += b" " * (-len(content) % 8)
    path.write_bytes(len(content).to_bytes(8, "little") + content)


def segment_header(ground: Ground) -> None:
    for path in sorted((ground.store / "lanes").glob("*/seg/*"))[-1:]:
        header(b'{"a":[' + b"[]," * (20 << 20) + b"[]" + b"]}", path)


def state_header(unit: bytes) -> Callable[[Ground], None]:
    return lambda ground: header(b'{"a":' + listed(unit, (60 << 20) // (len(unit) + 1)) + b"}", ground.state)


def metadata(content: Callable[[], bytes]) -> Callable[[Ground], None]:
    def change(ground: Ground) -> None:
        ground.dcp.mkdir()
        (ground.dcp / ".metadata").write_bytes(content())

    return change


def archive(entries: int, content: Callable[[], bytes]) -> Callable[[Ground], None]:
    def change(ground: Ground) -> None:
        with zipfile.ZipFile(ground.torch, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("archive/data.pkl", content())
            archive.writestr("archive/version", b"3\n")
            for number in range(entries):
                archive.writestr(f"archive/data/{number}", b"")

    return change


def huge_archive(ground: Ground) -> None:
    """Write an archive whose directory has a million entries, without making a million calls."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    data = buffer.getvalue()
    at = data.rindex(b"PK\x01\x02")
    end = data.rindex(b"PK\x05\x06")
    entry, count = data[at:end], 1_000_000
    directory = entry * count
    eocd64 = b"PK\x06\x06" + (44).to_bytes(8, "little") + bytes([45, 0, 45, 0]) + bytes(8)
    eocd64 += (
        count.to_bytes(8, "little") * 2 + len(directory).to_bytes(8, "little") + at.to_bytes(8, "little")
    )
    locator = (
        b"PK\x06\x07" + bytes(4) + (at + len(directory)).to_bytes(8, "little") + (1).to_bytes(4, "little")
    )
    tail = b"PK\x05\x06" + bytes(4) + b"\xff\xff" * 2 + b"\xff\xff\xff\xff" * 2 + bytes(2)
    ground.torch.write_bytes(data[:at] + directory + eocd64 + locator + tail)


def settings_bomb(ground: Ground) -> None:
    """Fill the store's settings with as many lists as there is room for."""
    path = ground.store / "scarctl.json"
    path.write_bytes(bomb(json.loads(path.read_bytes()), b"[]", 900_000))


def cut_small(**fixed: Any) -> Callable[[Ground], None]:
    """Make an empty store whose settings cut the state file into one partition per row."""

    def change(ground: Ground) -> None:
        path = ground.store / "scarctl.json"
        obj = json.loads(path.read_bytes())
        obj["settings"] |= {"partition_bytes": None, "rows": [], "shards": 1, **fixed}
        path.write_bytes(signed(obj))
        for folder in ("layout", "snapshots", "lanes"):
            for file in (ground.store / folder).rglob("*.*"):
                file.unlink()
        save_file({"w": np.zeros(1 << 22, dtype=np.float32)}, ground.state)

    return change


def in_table(change: Callable[[dict[str, Any]], None]) -> Callable[[Ground], None]:
    """Change the table of the newest full record, which all commands read."""

    def made(ground: Ground) -> None:
        path, obj = ground.newest_full()
        ref = obj["segment"]
        segment = ground.store / "lanes/0/seg" / ref["name"]
        raw = segment.read_bytes()
        was = parse_header(raw[: ref["head"]], len(raw), segment)
        entry = was.tensors["scarctl/table"]
        state = json.loads(raw[entry.start : entry.stop])
        change(state)
        text = canonical(state)
        text += b" " * (-len(text) % 8)
        shapes = [
            (n, e.dtype, (len(text),) if e == entry else e.shape)
            for n, e in sorted(was.tensors.items(), key=lambda x: (x[1].start, x[1].stop))
        ]
        head = place_header(shapes, was.metadata)[1]
        grown = len(head) - ref["head"]
        tail = raw[ref["tail"] : entry.start] + text + raw[entry.stop :]
        between = raw[ref["head"] + ref["data"] : ref["tail"]]
        content = head + raw[ref["head"] : ref["tail"]] + tail
        segment.write_bytes(content)
        ref |= {"head": len(head), "tail": ref["tail"] + grown, "bytes": len(content)}
        ref |= {"digest": hashlib.sha256(head + between).hexdigest()}
        ref |= {"tail_digest": hashlib.sha256(tail).hexdigest()}
        path.write_bytes(signed(obj))

    return made


def many_segments(state: dict[str, Any]) -> None:
    state["segments"] = state["segments"][:1] * 150_000


def many_lists(state: dict[str, Any]) -> None:
    state["zzz"] = [[]] * 1_000_000


def in_extras(text: Callable[[], str]) -> Callable[[Ground], None]:
    """Commit extras with this text."""
    return lambda ground: _commit(ground, {}, (text(), {}))


def points(count: int, norm: float) -> Callable[[Ground], None]:
    """Commit extras with so many points of the parameters' movement."""

    def change(ground: Ground) -> None:
        steps = np.arange(count, dtype=np.float64) * 2
        found = np.stack([steps, np.ones(count), np.full(count, norm)], axis=1)
        _commit(ground, {"state": {}, "history": {"norm": "l2", "points": found}}, None)

    return change


def all_points(norm: float) -> Callable[[Ground], None]:
    return points(MOST, norm)


def _commit(ground: Ground, extras: object, encoded: tuple[str, dict[str, Any]] | None) -> None:
    store = Store.open(ground.store)
    with (
        open_writer(store, layout=LAYOUT) as writer,
        mock.patch.object(codec, "encode", return_value=encoded or codec.encode(extras)),
    ):
        writer.commit(np.empty(0, np.int64), Data(LAYOUT, 0), step=10_000, extras=extras)
    store.close()


def in_arena(made: Callable[[], bytes]) -> Callable[[Ground], None]:
    """Leave a stopped run's arena with this text as its layout; the rest of its header is consistent."""

    def change(ground: Ground) -> None:
        store = Store.open(ground.store)
        folder, everything = arena_folder(str(ground.root), store.run_id), np.arange(LAYOUT.partitions)
        arena = Arena.create(folder, LAYOUT, run_id=store.run_id, epoch=9)
        arena.slot.end(everything, pack(9, 900), 1)
        belong(arena, store)
        arena.close()
        store.close()
        text = made()
        with (folder / FILE).open("r+b") as file:
            file.seek(4096)
            file.write(text)
            file.truncate(max(file.tell(), (folder / FILE).stat().st_size))
            size = file.seek(0, 2)
            for at, value in ((16, size), (40, len(text))):
                file.seek(at)
                file.write(struct.pack("<Q", value))

    return change


def listed(unit: bytes, count: int) -> bytes:
    return b"[" + ((unit + b",") * count)[:-1] + b"]"


_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."


def legacy(content: Callable[[], bytes]) -> Callable[[Ground], None]:
    """Write a `.pt` file of the format before archives, with this pickle."""

    def change(ground: Ground) -> None:
        ground.torch.write_bytes(_LEGACY + content())

    return change


def unbacked(*, keys: bool) -> Callable[[Ground], None]:
    """Claim a tensor of 64 GiB without data. keys: whether its storage is named like one that follows."""

    def change(ground: Ground) -> None:
        import torch

        out = io.BytesIO()
        torch.save({"w": torch.zeros(77)}, out, _use_new_zipfile_serialization=False)
        data = out.getvalue().replace(b"K\x4d", b"\x8a\x05" + (1 << 34).to_bytes(5, "little"))
        at = data.rindex(b"\x80\x02]")
        end = data.index(b"a.", at) + 2
        ground.torch.write_bytes(data[:at] + (data[at:end] if keys else b"\x80\x02].") + data[end:])

    return change
