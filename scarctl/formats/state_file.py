"""Read the tensors of state files that any training loop has written.

Three formats are known, recognized by content:

- safetensors: mapped and read by byte offsets; neither torch nor safetensors is imported.
- torch (`.pt`): `torch.load(weights_only=True, mmap=True)`; the tensors of nested dicts and lists are named
  by their path, joined with dots.
- DCP, a folder written by `torch.distributed.checkpoint`: only its tensors are read.

A tensor's bytes are presented as rows: uint8 of shape (rows, bytes per row), little endian as in the file.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scarctl.errors import AccessDenied, Corruption, Unavailable, UsageError
from scarctl.formats.foreign import KNOWN, foreign, foreign_archive, foreign_folder
from scarctl.state.layout import TensorSpec
from scarctl.store.header import MAX_HEADER, header_length, parse_header
from scarctl.util.arrays import Bytes
from scarctl.util.pickle_size import torch_fault, torch_pickles_fault
from scarctl.util.zip_size import MAX_DIRECTORY, directory_bytes

if TYPE_CHECKING:
    import torch

Stamp = tuple[int, int, int, int]

_ZIP_MAGIC = b"PK\x03\x04"
# Older versions of torch.save wrote no zip archive, but a pickle: protocol 2, then a magic number as a long.
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LEGACY_PICKLES = 4
"""After the magic number: the version, the system's properties, the saved object, the storages' keys."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """An opened state file. Its tensors are ordered by name, so that two files can be compared."""

    path: Path
    format: str
    """"safetensors", "torch" or "dcp"."""
    specs: Mapping[str, TensorSpec]
    stamp: Stamp | None = None
    """Identity of the opened file, which must be unchanged when the file is replaced. None for a folder."""
    offsets: Mapping[str, int] = field(default_factory=dict)
    """Safetensors: offset of each tensor's first byte in the file."""
    content: Any = None
    """Torch: the saved object, including values that are not tensors."""
    _bytes: Mapping[str, Bytes] = field(default_factory=dict, repr=False)
    _tensors: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())

    def rows(self, name: str) -> Bytes:
        """Return the bytes of a tensor: uint8 of shape (rows, bytes per row). Do not write to them."""
        spec = self.specs[name]
        if self.format == "safetensors":
            return self._bytes[name].reshape(spec.rows, spec.row_bytes)
        return tensor_rows(self._tensors[name], spec)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, which may share memory with the mapped file. Do not write to it."""
        if self.format != "safetensors":
            return self._tensors[name]
        import torch

        from scarctl.state.torch_dtypes import torch_of

        spec, data = self.specs[name], self._bytes[name]
        dtype = torch_of(spec.dtype)
        if not data.size:
            return torch.empty(spec.shape, dtype=dtype)
        if data.ctypes.data % dtype.itemsize:
            data = data.copy()
        return torch.from_numpy(data).view(dtype).view(spec.shape)

    def groups(self) -> list[tuple[str, str, tuple[TensorSpec, ...]]]:
        """Return the groups for `build_layout`: every tensor is a group of its own under its own name."""
        return [(name, "parameter", (spec,)) for name, spec in self.specs.items()]


def open_state(path: Path, *, may_be_empty: bool = False) -> StateFile:
    """Open a state file of any known format. A file without tensors is refused unless `may_be_empty`.

    Raises UsageError when the file is missing, has no known format, or holds tensors that a layout cannot;
    Corruption when it is cut short or contradicts itself; AccessDenied; Unavailable.
    """
    with os_errors(path):
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _open_folder(path)
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path} is not a regular file", hint=KNOWN)
        with path.open("rb") as file:
            start = file.read(64)
    if start.startswith((_ZIP_MAGIC, _LEGACY_MAGIC)):
        state = _open_torch(path, zipped=start.startswith(_ZIP_MAGIC))
    elif _looks_like_safetensors(start):
        state = _open_safetensors(path)
    else:
        raise foreign(path, start)
    if not state.specs and not may_be_empty:
        raise UsageError(f"{path} holds no tensors", hint=KNOWN, kind="foreign-state-file")
    return state


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Convert an OSError about `path` into the scarctl error that says what to do next."""
    try:
        yield
    except FileNotFoundError as error:
        absent = Path(error.filename or path)
        what = str(absent) if absent.parent.is_dir() else f"folder {absent.parent}"
        raise UsageError(f"{what} does not exist", hint="check the path", kind="no-file") from error
    except OSError as error:
        what = f"{error.filename or path}: {error.strerror or error}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise AccessDenied(what, hint="check the permissions of the file and its folder") from error
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP):
            raise UsageError(what, hint="check the path") from error
        raise Unavailable(what, hint="free space or check the disk, then try again") from error


def stamp_of(status: os.stat_result | None) -> Stamp | None:
    """Return values that change with a file's content: device, inode, bytes, time of modification in ns."""
    return None if status is None else (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def tensor_rows(tensor: torch.Tensor, spec: TensorSpec) -> Bytes:
    """Return a host tensor's bytes as rows, uint8 (rows, bytes per row). Shares memory if the tensor is contiguous."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().reshape(spec.rows, spec.row_bytes)


# ---- safetensors


def _looks_like_safetensors(start: bytes) -> bool:
    return len(start) > 8 and start[8:9] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= MAX_HEADER


def _open_safetensors(path: Path) -> StateFile:
    with os_errors(path), path.open("rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        try:
            start = file.read(header_length(file.read(8), size, path) - 8)
            header = parse_header((len(start)).to_bytes(8, "little") + start, size, path)
        except Corruption as error:
            raise _cut_short(path, error.message.removeprefix(f"{path}: ")) from error
        # Copy on write, because torch requires writable memory but no write may reach the file.
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
    entries = sorted(header.tensors.items())
    return StateFile(
        path,
        "safetensors",
        stamp=stamp_of(status),
        specs={name: TensorSpec("", entry.dtype, entry.shape) for name, entry in entries},
        offsets={name: entry.start for name, entry in entries},
        _bytes={name: data[entry.start : entry.stop] for name, entry in entries},
    )


# ---- torch


def _open_torch(path: Path, *, zipped: bool) -> StateFile:
    with os_errors(path):
        stamp = stamp_of(path.stat())
    data_bytes = None
    if zipped:
        _check_archive(path)
    else:
        data_bytes = _check_legacy(path)
    content = _load(path, mapped=zipped)
    tensors = dict(sorted(flatten(content, path).items()))
    if data_bytes is not None:
        # A storage is made as large as it claims, before its values are read, if they are read at all.
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
        if sum(storages.values()) > data_bytes:
            raise _cut_short(path, f"its tensors claim more than the {data_bytes} bytes of data that it has")
    specs = {name: _spec(name, tensor, path) for name, tensor in tensors.items()}
    return StateFile(path, "torch", specs, stamp, content=content, _tensors=tensors)


def _check_archive(path: Path) -> None:
    """Distinguish a cut-off archive from one that torch did not write; torch's own message does not."""
    with os_errors(path), path.open("rb") as file:
        if directory_bytes(file) > MAX_DIRECTORY:
            raise _cut_short(path, f"the directory of its archive has more than {MAX_DIRECTORY} bytes")
    reason = None
    try:
        with os_errors(path), zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            packed = any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist())
            for info in () if packed else archive.infolist():
                if info.filename.rpartition("/")[2] == "data.pkl":
                    if info.file_size > MAX_HEADER:
                        reason = f"{info.filename} has more than {MAX_HEADER} bytes"
                    reason = reason or torch_fault(_stored(archive, info), len(names))
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise _cut_short(path, "its archive has no directory at the end") from error
    if reason:
        raise _cut_short(path, reason)
    if names and all(name.endswith(".npy") for name in names):
        raise foreign_archive(path, names)
    if packed:  # a few compressed bytes can expand to any number
        raise UsageError(
            f"{path} is a compressed archive, which torch.save never writes",
            hint=KNOWN,
            kind="foreign-state-file",
        )
    if not any(name == "data.pkl" or name.endswith("/data.pkl") for name in names):
        raise foreign_archive(path, names)


def _stored(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return a file of an archive that is not compressed. torch can leave its checksum out, which zipfile refuses."""
    if info.CRC or archive.fp is None:
        return archive.read(info)
    archive.fp.seek(info.header_offset)
    head = archive.fp.read(30)
    if len(head) < 30:
        raise zipfile.BadZipFile("a file begins after the archive's end")
    archive.fp.seek(
        int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little"), os.SEEK_CUR
    )
    return archive.fp.read(info.file_size)


def _check_legacy(path: Path) -> int:
    """Refuse a file whose pickles would make too much; return how many bytes of data follow them.

    An archive of tar may begin like such a file, and torch looks for one first.
    """
    with os_errors(path), path.open("rb") as file:
        with contextlib.suppress(tarfile.HeaderError):
            tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), tarfile.ENCODING, "surrogateescape")
            raise UsageError(f"{path} is a tar archive", hint=KNOWN, kind="foreign-state-file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reason, end = torch_pickles_fault(data, len(_LEGACY_MAGIC), _LEGACY_PICKLES, MAX_HEADER)
            size = len(data)
    if reason:
        raise _cut_short(path, reason)
    return max(0, size - end)


def _load(path: Path, *, mapped: bool) -> Any:
    import pickle

    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} holds more than tensors and plain values: {_first_line(error)}",
            hint="save a state_dict(), not the object itself: scarctl never unpickles objects",
            kind="foreign-state-file",
        ) from error
    except OSError as error:
        with os_errors(path):
            raise error
    except Exception as error:  # torch's parsers raise errors of any type for unreadable content
        raise _cut_short(path, _first_line(error)) from error


def flatten(content: Any, path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of nested dicts, lists and tuples by their path, joined with dots.

    Raises UsageError when two tensors have the same name, or when a structure contains itself.
    """
    import torch

    found: dict[str, torch.Tensor] = {}
    kinds = (torch.Tensor, Mapping, list, tuple)

    def visit(value: Any, name: str, above: tuple[int, ...]) -> None:
        if isinstance(value, torch.Tensor):
            if name in found or not name:
                reason = f"two tensors are named {name!r}" if name else "it is a bare tensor without a name"
                raise UsageError(f"{path}: {reason}", hint="save a dict of tensors")
            found[name] = value
        elif isinstance(value, Mapping | list | tuple):
            if id(value) in above or len(above) > 64:
                raise UsageError(
                    f"{path}: {name!r} contains itself or is nested too deeply", hint="save a dict of tensors"
                )
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, item in items:
                if isinstance(item, kinds):
                    visit(item, f"{name}.{key}" if name else str(key), (*above, id(value)))

    visit(content, "", ())
    return found


def _spec(name: str, tensor: torch.Tensor, path: Path) -> TensorSpec:
    import torch

    from scarctl.state.torch_dtypes import name_of

    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        raise UsageError(
            f"{path}: tensor {name!r} is not a plain dense tensor",
            hint="convert it with .to_dense() before saving",
        )
    dtype = name_of(tensor.dtype, name)
    # An expanded tensor takes a few bytes in the file and any size in memory.
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UsageError(
            f"{path}: tensor {name!r} is expanded", hint="call .contiguous() on it before saving"
        )
    return TensorSpec("", dtype, tuple(tensor.shape))


# ---- torch.distributed.checkpoint


def _open_folder(path: Path) -> StateFile:
    if not (path / ".metadata").exists():
        raise foreign_folder(path)
    from scarctl.formats.dcp import load_tensors

    with os_errors(path):
        tensors = load_tensors(path)
    specs = {name: _spec(name, tensor, path) for name, tensor in tensors.items()}
    if not specs:
        raise UsageError(f"{path} holds no tensors", hint=KNOWN, kind="foreign-state-file")
    return StateFile(path, "dcp", specs, _tensors=tensors)


def _cut_short(path: Path, reason: str) -> Corruption:
    return Corruption(
        f"{path} is damaged or was not written to its end: {reason}",
        hint="write it again; no value was read from it",
    )


def _first_line(error: BaseException) -> str:
    # torch advises to trust a file that weights_only refuses: that advice is cut off.
    lines = str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
