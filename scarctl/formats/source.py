"""Open any checkpoint as a source of named tensors that are read in blocks: for comparing, listing and verifying.

It opens the state files of `scarctl.formats.state_file`, and folders of several safetensors files with an index, as
Hugging Face writes them. A scarctl store is also a source: `scarctl.ops.store_source`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from scarctl.errors import UsageError
from scarctl.formats.hf_index import INDEX_ENDING, Index, index_in, read_index
from scarctl.formats.state_file import StateFile, open_state, os_errors, tensor_rows
from scarctl.state.group import DTYPES
from scarctl.state.layout import TensorSpec
from scarctl.store.foreign import near
from scarctl.util.arrays import Bytes

BLOCK = 1 << 20
"""Bytes of a tensor that are read at a time."""
METADATA = ".metadata"
_AHEAD = 64 << 20
"""Bytes of adjacent tensors of a DCP folder that are loaded together."""
_OPEN_SHARDS = 16
"""Shards of an index that are open at the same time."""


class Source(Protocol):
    """Named tensors of a checkpoint."""

    where: str
    """Path, for display."""
    format: str
    """"safetensors", "torch", "dcp", "index" or "store"."""
    specs: Mapping[str, TensorSpec]
    """Dtype and shape of every tensor, ordered by name."""
    problems: list[str]
    """Damage that was passed over so far, for display."""

    def read(self, name: str, start: int, stop: int) -> Bytes:
        """Return bytes `[start, stop)` of a tensor in C order: uint8 (stop - start,). Do not write to them.

        Raises Corruption, NoIntactCopy, AccessDenied, Unavailable.
        """


def blocks(spec: TensorSpec, nbytes: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Yield the values of a tensor in blocks of about `nbytes` bytes, as ranges of indices."""
    values = spec.nbytes // DTYPES[spec.dtype]
    step = max(1, nbytes // DTYPES[spec.dtype])
    for start in range(0, values, step):
        yield start, min(start + step, values)


def open_source(path: Path) -> Source:
    """Open a safetensors file, a `.pt` file, a DCP folder, a folder of safetensors files, or its index.

    Raises UsageError for a missing path or an unknown format, Corruption, AccessDenied, Unavailable.
    """
    try:
        return _open(path)
    except UsageError as error:
        stores = near(path) if error.kind in ("no-file", "foreign-state-file") else ""
        if not stores:
            raise
        raise UsageError(error.message, hint=f"{error.hint}{stores}", kind=error.kind) from error


def _open(path: Path) -> Source:
    if path.name == METADATA:
        return DcpSource(path.parent)
    if path.name.endswith(INDEX_ENDING):
        return IndexSource(read_index(path))
    with os_errors(path):
        if not path.is_dir():
            return FileSource(open_state(path, may_be_empty=True))
        found = index_in(path)
        if (path / METADATA).exists():
            if found is not None:
                raise UsageError(
                    f"{path} is a folder of torch.distributed.checkpoint, and has {found.name} too",
                    hint=f"name the one that is meant: {path / METADATA} or {found}",
                )
            return DcpSource(path)
    if found is None:
        raise UsageError(
            f"{path} is a folder without a checkpoint: no .metadata, no *{INDEX_ENDING}, no model.safetensors",
            hint="give a file, or a folder with one of these",
            kind="foreign-state-file",
        )
    return _open(found)


class FileSource:
    """The tensors of one file, which is mapped."""

    problems: list[str]

    def __init__(self, state: StateFile) -> None:
        self.where, self.format, self.specs = str(state.path), state.format, state.specs
        self.problems = []
        self._state = state
        self._kept: tuple[str, Bytes] | None = None

    def read(self, name: str, start: int, stop: int) -> Bytes:
        """See `Source`. A tensor with its values in another order is kept in C order until the next one is read."""
        if self._kept is None or self._kept[0] != name:
            self._kept = name, self._state.rows(name).reshape(-1)
        return self._kept[1][start:stop]


class DcpSource:
    """The tensors of a folder of `torch.distributed.checkpoint`, loaded in batches of adjacent tensors."""

    format = "dcp"

    def __init__(self, folder: Path) -> None:
        from scarctl.formats.dcp import DcpFolder
        from scarctl.state.torch_dtypes import name_of

        with os_errors(folder):
            self._folder = DcpFolder(folder)
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec("", name_of(item.properties.dtype, name), tuple(item.size))
            for name, item in self._folder.items.items()
        }
        self.where, self.problems = str(folder), list[str]()
        self._path = folder
        self._names = list(self.specs)
        self._number = {name: i for i, name in enumerate(self._names)}
        self._kept: dict[str, Bytes] = {}

    def read(self, name: str, start: int, stop: int) -> Bytes:
        """See `Source`."""
        if name not in self._kept:
            names, size = [name], self.specs[name].nbytes
            for other in self._names[self._number[name] + 1 :]:
                size += self.specs[other].nbytes
                if size > _AHEAD:
                    break
                names.append(other)
            self._kept = {}
            with os_errors(self._path):
                loaded = self._folder.load(names)
            self._kept = {key: tensor_rows(t, self.specs[key]).reshape(-1) for key, t in loaded.items()}
        return self._kept[name][start:stop]


class IndexSource:
    """The tensors of several safetensors files with an index. A few of the files are open at a time."""

    format = "index"

    def __init__(self, index: Index) -> None:
        """Read the header of every file. Raises Corruption for a missing file or tensor."""
        self.where, self.problems = str(index.path), list[str]()
        self._index = index
        self._open: OrderedDict[str, FileSource] = OrderedDict()
        specs = {}
        for file, names in index.by_file().items():
            shard = self._shard(file)
            for name in names:
                if name not in shard.specs:
                    raise index.corrupt(f"{file} has no tensor {name!r}")
                specs[name] = shard.specs[name]
        self.specs: Mapping[str, TensorSpec] = dict(sorted(specs.items()))

    def read(self, name: str, start: int, stop: int) -> Bytes:
        """See `Source`."""
        return self._shard(self._index.files[name]).read(name, start, stop)

    def _shard(self, file: str) -> FileSource:
        if file not in self._open:
            self._open[file] = FileSource(self._index.open_shard(file))
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(file)
        return self._open[file]
