"""Write state files atomically: patch rows of an existing file, or create a new one from restored rows.

Everything is written to a temporary file in the target's folder, which is finally renamed over the target. So a reader
of the target sees either the complete old content or the complete new one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import ScarError, UsageError
from scarctl.formats.state_file import Stamp, StateFile, os_errors, stamp_of, tensor_rows
from scarctl.state.layout import TensorSpec
from scarctl.store.header import MAX_HEADER, place_header
from scarctl.util.arrays import Bytes

if TYPE_CHECKING:
    import torch

Rows = slice | NDArray[np.int64]
TORCH_SUFFIXES = (".pt", ".pth")


class StateWriter(Protocol):
    """A state file being written. If the context ends without `commit`, the target is unchanged."""

    def write(self, name: str, rows: Rows, data: Bytes) -> None:
        """Write data, uint8 of shape (n, bytes per row), into n rows (ascending, or a slice) of a tensor.

        The width of `data` defines a row. It may be a fraction of the tensor's row; row numbers then count fractions.
        """

    def commit(self) -> None:
        """Make the written rows durable and visible under the target's name."""

    def __enter__(self) -> StateWriter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def patch_state(state: StateFile) -> StateWriter:
    """Return a writer that starts from the file's content. Raises UsageError for a format that cannot be patched."""
    if state.format == "safetensors":
        return _PatchSafetensors(state)
    if state.format == "torch":
        return _PatchTorch(state)
    raise UsageError(
        f"{state.path} is a folder of torch.distributed.checkpoint, which cannot be patched in place",
        hint="use --output and load the restored rows into the job",
    )


def new_state(path: Path, specs: Mapping[str, TensorSpec]) -> StateWriter:
    """Return a writer of a new file with the tensors `specs`, torch or safetensors by the name's ending.

    Every row of every tensor must be written before `commit`. An existing file is replaced.
    """
    if path.suffix.lower() in TORCH_SUFFIXES:
        return _NewTorch(path, specs)
    return _NewSafetensors(path, specs)


class _Replacement:
    """A temporary file in the folder of `path` that takes its place on commit."""

    def __init__(self, path: Path, stamp: Stamp | None = None) -> None:
        with os_errors(path):
            # Links are followed: the target is replaced, and the link stays.
            self.path = Path(os.path.realpath(path))
            before = _identity(self.path)
            if before is not None and not stat.S_ISREG(before.st_mode):
                raise UsageError(f"{path} is not a regular file", hint="give the name of a file")
            self._stamp = stamp or stamp_of(before)
            self._temporary = self.path.with_name(f".{self.path.name[:200]}.{secrets.token_hex(6)}.tmp")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self.file: IO[bytes] = os.fdopen(os.open(self._temporary, flags, 0o666), "r+b", buffering=0)
            if before is not None:
                os.fchmod(self.file.fileno(), stat.S_IMODE(before.st_mode))
                # Only root may change a file's owner; any other user owns the new file already.
                with contextlib.suppress(PermissionError):
                    os.fchown(self.file.fileno(), before.st_uid, before.st_gid)

    def write(self, name: str, rows: Rows, data: Bytes) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Write the rest of the temporary file."""

    def commit(self) -> None:
        with os_errors(self.path):
            self.finish()
            os.fsync(self.file.fileno())
            if stamp_of(_identity(self.path)) != self._stamp:
                raise ScarError(
                    f"{self.path} changed while it was being patched: it was not replaced",
                    hint="stop the process that writes to it, then recover again",
                    kind="file-changed",
                )
            os.replace(self._temporary, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def __enter__(self) -> _Replacement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)


class _PatchSafetensors(_Replacement):
    def __init__(self, state: StateFile) -> None:
        super().__init__(state.path, state.stamp)
        self._state = state
        try:
            with os_errors(state.path), self.path.open("rb") as source:
                shutil.copyfileobj(source, self.file, 16 << 20)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def write(self, name: str, rows: Rows, data: Bytes) -> None:
        with os_errors(self.path):
            _pwrite_rows(self.file, self._state.offsets[name], rows, data)


class _PatchTorch(_Replacement):
    """A torch file whose loaded tensors are a private mapping: only patched pages take memory."""

    def __init__(self, state: StateFile) -> None:
        super().__init__(state.path, state.stamp)
        self._state = state

    def write(self, name: str, rows: Rows, data: Bytes) -> None:
        _put_rows(self._state.tensor(name), self._state.specs[name], rows, data)

    def finish(self) -> None:
        torch_save(self._state.content, self.file)


class _NewSafetensors(_Replacement):
    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        super().__init__(path)
        # Wide values come first, so that every tensor begins at a multiple of its item size.
        order = sorted(specs.items(), key=lambda item: (-_item_bytes(item[1]), item[0]))
        named = ((name, spec.dtype, spec.shape) for name, spec in order)
        header, head = place_header(named, {"format": "pt"})
        if header.length > MAX_HEADER:
            self.__exit__(None, None, None)
            raise UsageError(
                f"the restored rows form {len(specs)} separate pieces, more than a safetensors file can name",
                hint="use --into, or recover fewer groups or shards at a time",
            )
        self._offsets = {name: entry.start for name, entry in header.tensors.items()}
        try:
            with os_errors(self.path):
                _pwrite(self.file, np.frombuffer(head, dtype=np.uint8), 0)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def write(self, name: str, rows: Rows, data: Bytes) -> None:
        with os_errors(self.path):
            _pwrite_rows(self.file, self._offsets[name], rows, data)


class _NewTorch(_Replacement):
    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        super().__init__(path)
        import torch

        from scarctl.state.torch_dtypes import torch_of

        self._specs = specs
        self._tensors = {n: torch.empty(s.shape, dtype=torch_of(s.dtype)) for n, s in specs.items()}

    def write(self, name: str, rows: Rows, data: Bytes) -> None:
        _put_rows(self._tensors[name], self._specs[name], rows, data)

    def finish(self) -> None:
        torch_save(self._tensors, self.file)


def torch_save(content: Any, file: IO[bytes]) -> None:
    """Call torch.save, but raise the operating system's own error: torch replaces it by one about its archive."""
    import torch

    recorder = _Recorder(file)
    try:
        torch.save(content, cast("IO[bytes]", recorder))
    except Exception:
        if recorder.error is not None:
            raise recorder.error from None
        raise


class _Recorder:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            done = 0
            while done < view.nbytes:
                done += self._file.write(view[done:])
        except OSError as error:
            self.error = error
            raise
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()


def _put_rows(tensor: torch.Tensor, spec: TensorSpec, rows: Rows, data: Bytes) -> None:
    """Copy rows into a tensor with any strides."""
    import torch

    if not data.size:
        return
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        tensor_rows(tensor, spec).reshape(-1, data.shape[1])[rows] = data
        return
    if data.shape[1] != spec.row_bytes:
        per = data.shape[1] // tensor.element_size()
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        flat = torch.from_numpy((numbers[:, None] * per + np.arange(per)).reshape(-1))
        found = torch.from_numpy(np.array(data).reshape(-1)).view(tensor.dtype)
        with torch.no_grad():
            tensor[torch.unravel_index(flat, tensor.shape)] = found
        return
    values = torch.from_numpy(np.array(data).reshape(-1)).view(tensor.dtype).view(len(data), *spec.shape[1:])
    with torch.no_grad():
        tensor[rows if isinstance(rows, slice) else torch.from_numpy(rows)] = values


def _pwrite_rows(file: IO[bytes], offset: int, rows: Rows, data: Bytes) -> None:
    """Write rows of a tensor that begins at byte `offset`; adjacent rows take one call."""
    count, row_bytes = data.shape
    if not data.size:
        return
    if isinstance(rows, slice):
        _pwrite(file, data, offset + rows.start * row_bytes)
        return
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    for i, j in zip([0, *breaks.tolist()], [*breaks.tolist(), count], strict=True):
        _pwrite(file, data[i:j], offset + int(rows[i]) * row_bytes)


def _pwrite(file: IO[bytes], data: Bytes, offset: int) -> None:
    view = memoryview(np.ascontiguousarray(data)).cast("B")
    done = 0
    while done < view.nbytes:
        done += os.pwrite(file.fileno(), view[done:], offset + done)


def _item_bytes(spec: TensorSpec) -> int:
    return TensorSpec("", spec.dtype, ()).nbytes


def _identity(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
