"""Verify a checkpoint that is not a store: its structure, its files, and which values are not finite.

Structure is what a reader relies on: headers, offsets, checksums of an archive, an index compared with its files.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from scarctl.errors import Corruption, UsageError
from scarctl.formats.hf_index import INDEX_ENDING, Index, index_in, read_index
from scarctl.formats.source import METADATA, Source, open_source
from scarctl.formats.state_file import os_errors
from scarctl.ops.measure import is_float, measure
from scarctl.store.check import Problem
from scarctl.util.document import Document


@dataclass(frozen=True, slots=True)
class NotFinite(Document):
    """A tensor with values that are not finite."""

    name: str
    nan: int
    inf: int


@dataclass(slots=True)
class VerifiedCheckpoint(Document):
    """`scarctl verify CHECKPOINT`."""

    COMPUTED: ClassVar = ("intact", "nan", "inf")
    checkpoint: str
    format: str = "unknown"
    tensors: int = 0
    bytes: int = 0
    read_data: bool = False
    """Whether all values were read."""
    problems: list[Problem] = field(default_factory=list)
    not_finite: list[NotFinite] = field(default_factory=list)

    @property
    def intact(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def nan(self) -> int:
        """Number of values that are NaN."""
        return sum(tensor.nan for tensor in self.not_finite)

    @property
    def inf(self) -> int:
        """Number of values that are infinite."""
        return sum(tensor.inf for tensor in self.not_finite)


def verify_file(
    path: Path,
    *,
    read_data: bool = True,
    finite: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> VerifiedCheckpoint:
    """Verify a file or folder. All damage that is found is in the result.

    read_data: also read all values. finite: a value that is NaN or infinite is a fault. progress: called with bytes
    done and in total.

    Raises UsageError for a missing path or an unknown format, AccessDenied, Unavailable.
    """
    found = VerifiedCheckpoint(str(path))
    try:
        with os_errors(path):
            found.problems += _structure(path)
        source = open_source(path)
    except Corruption as error:
        reason = error.message.removeprefix(f"{path}: ").removeprefix(f"{path} is damaged: ")
        if not found.problems:
            found.problems.append(Problem(str(path), None, reason))
        return found
    found.format, found.tensors = source.format, len(source.specs)
    found.bytes = sum(spec.nbytes for spec in source.specs.values())
    if read_data and not found.problems:
        _values(source, found, finite, progress)
    return found


def _structure(path: Path) -> Iterator[Problem]:
    """Yield the problems that can be found before the checkpoint is opened as a whole."""
    folder = path if path.is_dir() else path.parent
    if path.name == METADATA or (path.is_dir() and (path / METADATA).exists()):
        from scarctl.formats.dcp_check import faults

        for name, tensor, reason in faults(folder):
            yield Problem(str(folder / name), tensor, reason)
        return
    file = index_in(path) if path.is_dir() else path
    if file is None:
        return
    if file.name.endswith(INDEX_ENDING):
        yield from _index(read_index(file))
    elif file.is_file() and _begins_as_archive(file):
        yield from _archive(file)


def _index(index: Index) -> Iterator[Problem]:
    """Compare an index with the headers of its files."""
    size, readable, files = 0, True, index.by_file()
    for file, names in files.items():
        path = index.path.parent / file
        try:
            opened = index.open_shard(file)
        except Corruption as error:
            readable = False
            yield Problem(str(path), None, error.message.removeprefix(f"{index.path}: "))
            continue
        size += opened.nbytes
        for name in names:
            if name not in opened.specs:
                yield Problem(str(path), name, "the index names this file, which does not have the tensor")
        for name in opened.specs:
            other = index.files.get(name)
            if other is None:
                yield Problem(str(path), name, "the index does not name this tensor")
            elif other != file:
                yield Problem(str(path), name, f"the index places it in {other}")
    shard = re.compile(
        re.escape(index.path.name.removesuffix(INDEX_ENDING)) + r"-\d{5}-of-\d{5}\.safetensors"
    )
    for path in sorted(index.path.parent.iterdir()):
        if shard.fullmatch(path.name) and path.name not in files:
            yield Problem(str(path), None, "the index does not name this file, which belongs to another save")
    if readable and index.total_size is not None and index.total_size != size:
        yield Problem(
            str(index.path), None, f"it claims {index.total_size} bytes of tensors, the files have {size}"
        )


def _begins_as_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _archive(path: Path) -> Iterator[Problem]:
    """Compare the files of a `.pt` archive with their checksums, which torch does not check."""
    open_source(path)  # refuses archives that must not be unpacked
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.CRC:  # torch can leave checksums out
                continue
            try:
                with archive.open(info) as file:
                    while file.read(1 << 20):
                        pass
            except zipfile.BadZipFile as error:
                yield Problem(str(path), None, f"{info.filename}: {error}")


def _values(
    source: Source, found: VerifiedCheckpoint, finite: bool, progress: Callable[[int, int], object] | None
) -> None:
    done = 0
    for name, spec in source.specs.items():
        try:
            values = measure(source, name)
        except (Corruption, UsageError) as error:
            found.problems.append(Problem(found.checkpoint, name, error.message))
            return
        if values.nan or values.inf:
            found.not_finite.append(NotFinite(name, values.nan, values.inf))
            if finite and is_float(spec.dtype):
                found.problems.append(
                    Problem(found.checkpoint, name, f"{values.nan} NaN, {values.inf} infinite")
                )
        done += spec.nbytes
        if progress is not None:
            progress(done, found.bytes)
    found.read_data = True
