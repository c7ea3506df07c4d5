"""Compare the metadata of a folder of `torch.distributed.checkpoint` with its files, without reading values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scarctl.formats.dcp import read_metadata, tensors_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint import metadata

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a piece."""


def faults(folder: Path) -> Iterator[tuple[str, str | None, str]]:
    """Yield the faults of a checkpoint folder: file, tensor if it concerns one, and reason.

    Raises Corruption when the metadata cannot be read.
    """
    known = read_metadata(folder)
    try:
        yield from _of_files(folder, known)
        yield from _of_tensors(known)
    except (AttributeError, TypeError, ValueError) as error:  # fields of other types than they should have
        yield ".metadata", None, f"it does not describe a checkpoint: {error}"


def _of_files(folder: Path, known: metadata.Metadata) -> Iterator[tuple[str, str | None, str]]:
    """Compare the places of all pieces with the existing files."""
    places: dict[str, list[tuple[int, int, str]]] = {}
    for index, info in known.storage_data.items():
        places.setdefault(info.relative_path, []).append((info.offset, info.length, index.fqn))
    for name, pieces in sorted(places.items()):
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            yield ".metadata", None, f"the metadata name the file {name!r}"
            continue
        file = folder / name
        if not file.is_file():
            yield name, None, f"this file is missing; it has {len(pieces)} pieces"
            continue
        size, end = file.stat().st_size, 0
        for offset, length, of in sorted(pieces):
            if offset < 0 or length < 0 or offset + length > size:
                yield name, of, f"bytes {offset} to {offset + length}, but the file has {size}"
            elif offset < end:
                yield name, of, f"bytes {offset} to {offset + length} overlap those of another piece"
            end = max(end, offset + length)
    for path in sorted(folder.iterdir()):
        if path.suffix == ".distcp" and path.name not in places:
            yield path.name, None, "the metadata do not name this file, which belongs to another save"


def _of_tensors(known: metadata.Metadata) -> Iterator[tuple[str, str | None, str]]:
    """Check that the pieces of every tensor are stored, and cover it once."""
    stored: dict[str, set[tuple[int, ...] | None]] = {}
    for index in known.storage_data:
        stored.setdefault(index.fqn, set()).add(None if index.offset is None else tuple(index.offset))
    for name, item in tensors_of(known).items():
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in item.chunks]
        missing = sum(offset not in stored.get(name, ()) for offset, _ in boxes)
        if missing:
            yield ".metadata", name, f"{missing} of its {len(boxes)} pieces are stored nowhere"
        size = tuple(item.size)
        if any(not _within(box, size) for box in boxes):
            yield ".metadata", name, "a piece lies outside the tensor"
        elif sum(math.prod(sizes) for _, sizes in boxes) != math.prod(size) or _overlap(boxes):
            yield ".metadata", name, "its pieces do not cover the tensor once"


def _within(box: Box, size: Sequence[int]) -> bool:
    offset, sizes = box
    return len(offset) == len(sizes) == len(size) and all(
        min(a, n) >= 0 and a + n <= most for a, n, most in zip(offset, sizes, size, strict=True)
    )


def _overlap(boxes: list[Any]) -> bool:
    """Return whether two boxes share a value. Boxes in the order of their first dimension end the search early."""
    full = sorted(box for box in boxes if math.prod(box[1]))
    for i, (offset, sizes) in enumerate(full):
        for other, more in full[i + 1 :]:
            if not offset or other[0] >= offset[0] + sizes[0]:
                break
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, sizes, other, more, strict=True)):
                return True
    return len(full) > 1 and not full[0][0]
