"""Read the tensors of a folder that `torch.distributed.checkpoint` wrote, without trusting it.

The folder's metadata are a pickle. They are read by an unpickler that allows only the metadata's own classes. The
library's own reader then loads the tensors with `weights_only=True`. Other values are skipped, because the library
would unpickle them without limits.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import stat
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from scarctl.errors import Corruption
from scarctl.util.pickle_size import pickle_fault

MAX_METADATA_BYTES = 256 << 20

_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "BytesStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
        if hasattr(metadata, name)
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
}


class _MetadataUnpickler(pickle.Unpickler):
    """Allows the classes of a checkpoint's metadata and torch's dtypes, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata needs")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside the file")


class _Reader(filesystem.FileSystemReader):
    """The library's reader, with metadata that are already read and checked."""

    def __init__(self, folder: Path, known: metadata.Metadata) -> None:
        super().__init__(folder)
        self._known = known

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self._known


class DcpFolder:
    """The tensors of a checkpoint folder. Their values are loaded on request."""

    def __init__(self, folder: Path) -> None:
        """Read and check the metadata.

        Raises Corruption when the folder is damaged, or when its metadata name a class that no checkpoint needs.
        """
        self._folder = folder
        self._known = read_metadata(folder)
        with _faults(folder):
            self.items = tensors_of(self._known)
            """Description of every tensor, ordered by name."""
            _check(folder, self._known, self.items)

    def load(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Load tensors into host memory. Raises Corruption when the folder is damaged."""
        with _faults(self._folder), warnings.catch_warnings():
            # The warning says that no process group exists, which is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            items = {name: self.items[name] for name in names}
            found = {
                name: torch.zeros(item.size, dtype=item.properties.dtype) for name, item in items.items()
            }
            reader = _Reader(self._folder, self._known)
            state_dict_loader.load(dict(found), storage_reader=reader, no_dist=True)
        return found


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Load all tensors of a checkpoint folder by name, in host memory, ordered by name. Raises Corruption."""
    opened = DcpFolder(folder)
    return opened.load(opened.items)


def tensors_of(known: metadata.Metadata) -> dict[str, metadata.TensorStorageMetadata]:
    """Return the description of every tensor in the metadata, ordered by name."""
    return {
        name: item
        for name, item in sorted(known.state_dict_metadata.items())
        if isinstance(item, metadata.TensorStorageMetadata)
    }


@contextmanager
def _faults(folder: Path) -> Iterator[None]:
    """Turn whatever the library raises for unreadable content into Corruption."""
    try:
        yield
    except (Corruption, MemoryError):
        raise
    except (Exception, CheckpointException) as error:  # CheckpointException does not derive from Exception
        raise _damaged(folder, _reason(error)) from error


def read_metadata(folder: Path) -> metadata.Metadata:
    """Read a folder's metadata without trusting them. Raises Corruption."""
    # Opening never waits for the other end of a pipe, and nothing is read before its size is known.
    with open(folder / ".metadata", "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _damaged(folder, ".metadata is not a regular file")
        if status.st_size > MAX_METADATA_BYTES:
            raise _damaged(folder, f".metadata is larger than {MAX_METADATA_BYTES} bytes")
        data = file.read(status.st_size)
    if reason := pickle_fault(data):
        raise _damaged(folder, f".metadata cannot be read: {reason}")
    try:
        known = _MetadataUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise _damaged(folder, f".metadata cannot be read: {_reason(error)}") from error
    if not isinstance(known, metadata.Metadata) or not isinstance(
        getattr(known, "state_dict_metadata", None), dict
    ):
        raise _damaged(folder, ".metadata does not describe a checkpoint")
    if getattr(known, "storage_meta", None) is None:
        known.storage_meta = metadata.StorageMeta()
    return known


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _check(folder: Path, known: metadata.Metadata, wanted: dict[str, metadata.TensorStorageMetadata]) -> None:
    """Refuse metadata that reaches out of the folder, allocates without bound, or leaves values unread."""
    on_disk = 0
    for info in known.storage_data.values():
        name = info.relative_path
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise _damaged(folder, f"its metadata name the file {name!r}")
    for name in {info.relative_path for info in known.storage_data.values()}:
        file = folder / name
        if not file.is_file():
            raise _damaged(folder, f"{name} is missing")
        on_disk += file.stat().st_size
    plain = not any(getattr(info, "transform_descriptors", None) for info in known.storage_data.values())
    claimed = 0
    for name, item in wanted.items():
        claimed += math.prod(item.size) * item.properties.dtype.itemsize
        if sum(math.prod(chunk.sizes) for chunk in item.chunks) != math.prod(item.size):
            raise _damaged(folder, f"the pieces of {name!r} do not add up to the whole tensor")
    if plain and claimed > on_disk:
        raise _damaged(folder, f"its metadata claim {claimed} bytes of tensors, but its files have {on_disk}")


def _reason(error: BaseException) -> str:
    """Return the first informative line: the library's own exception only says which rank failed."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        first = next(iter(failures.values()))
        error = first[0] if isinstance(first, tuple) else first
    # torch advises to trust a file that weights_only refuses: that advice is cut off.
    lines = str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _damaged(folder: Path, reason: str) -> Corruption:
    return Corruption(f"{folder} is damaged: {reason}", hint="save it again; no value was read from it")
