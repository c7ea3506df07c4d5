"""Export the running checkpoint, or a snapshot, to other formats: safetensors, torch's `.pt`, or a DCP folder.

Tensors are written file by file, a few MiB of partitions at a time. The output never appears incomplete: a file or a
folder is written under a temporary name next to it, synced, and renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scarctl.errors import UsageError
from scarctl.formats.hf_index import INDEX, WHOLE
from scarctl.formats.state_file import os_errors
from scarctl.formats.state_writer import TORCH_SUFFIXES, Rows, StateWriter, new_state, torch_save
from scarctl.ops.assemble import check_complete, content
from scarctl.ops.sinks import FileSink, counting
from scarctl.ops.weights import Weights, weights_of
from scarctl.recovery.label import DOUBTFUL
from scarctl.recovery.shared_plan import execute_shared, plan_lost, plans_back
from scarctl.recovery.shares import named_snapshot, open_shares
from scarctl.state.label import Label, Labelled
from scarctl.state.layout import TensorSpec
from scarctl.store import Store
from scarctl.store.header import header_length, parse_header
from scarctl.util.arrays import Bytes
from scarctl.util.document import INLINE, Document

FORMATS = ("safetensors", "pt", "dcp")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSettings:
    """Source and output of an export."""

    store: str
    """Folder of the store, or its address."""
    output: Path
    """The file or folder to write. It must not exist yet."""
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """Options of a remote store's file system. They may be secret."""
    snapshot: str | None = None
    """The snapshot to export; None: the newest copy of every partition."""
    format: str | None = None
    """Format of the output: safetensors, pt or dcp. None: pt for `.pt` and `.pth`, otherwise safetensors."""
    max_shard_bytes: int = 5 * 10**9
    """Most bytes of tensors per file, for safetensors and dcp. A tensor is never split."""
    weights: bool = False
    """Write only the model's own `state_dict()`: no optimizer state, and tied tensors under each of their names."""

    @property
    def form(self) -> str:
        """The format, chosen by the output's name if it is not given."""
        return self.format or ("pt" if self.output.suffix.lower() in TORCH_SUFFIXES else "safetensors")

    @property
    def one_file(self) -> bool:
        """Whether the output is one file, not a folder: a `.pt` file, or a name that ends with `.safetensors`."""
        return self.form == "pt" or (
            self.form == "safetensors" and self.output.suffix.lower() == ".safetensors"
        )

    def __post_init__(self) -> None:
        if self.form not in FORMATS:
            raise UsageError(f"unknown format {self.format!r}", hint=f"use one of {', '.join(FORMATS)}")
        if self.max_shard_bytes < 1:
            raise UsageError(f"max_shard_bytes is {self.max_shard_bytes}, not a positive number")


@dataclass(frozen=True, slots=True)
class Exported(Document, Labelled):
    """Report of an export."""

    output: str
    files: tuple[str, ...]
    tensors: int
    bytes: int
    label: Label = field(metadata=INLINE)
    """The state's label."""
    step: int | None
    """Step of all copies; None if they are of several."""
    degraded: bool
    problems: tuple[str, ...]
    format: str
    snapshot: str | None
    weights: bool
    encoded_partitions: int
    """Exported from encoded copies, which have fewer bits."""


def export(settings: ExportSettings, *, progress: Callable[[int, int], None] | None = None) -> Exported:
    """Write a state for other tools. Verifies every copy. Takes no lock and changes nothing in the store.

    progress: called with bytes done and bytes in total.

    Raises UsageError (the output exists, no such snapshot), NoStore, NoIntactCopy, Corruption, AccessDenied,
    Unavailable. After an error there is no output.
    """
    store = Store.open(settings.store, storage_options=settings.storage_options)
    target = Path(os.path.abspath(settings.output))
    snapshot = named_snapshot(store, settings.snapshot)
    state = open_shares(store, snapshot)
    ids = state.everything()
    check_complete(state.layouts)
    nothing = [None] * len(state.shares)
    of_now = snapshot is None
    plan = plan_lost(state, ids, nothing) if of_now else next(plans_back(state, nothing, 0, snapshot))
    everything, targets = content(state.layouts, ids)
    of_model = weights_of(plan, everything) if settings.weights else Weights(everything, {}, ())
    specs = dict(of_model.specs)
    if settings.form == "safetensors":  # the others can hold one tensor under several names
        specs |= {alias: specs[name] for alias, name in of_model.tied.items()}
    if os.path.lexists(target):
        raise UsageError(f"{settings.output} already exists", hint="use another name, or delete it")
    inner = {"pt": "state.pt", "safetensors": WHOLE}[settings.form] if settings.one_file else None
    with _made_whole(target, inner) as folder:
        parts = [list(specs)] if settings.one_file else _split(specs, settings.max_shard_bytes)
        with _files(folder, specs, parts) as writers:
            switch, left_out = _Switch(writers, of_model.tied), frozenset(everything.keys() - specs.keys())
            sinks = [
                FileSink(of, target, switch, left_out)
                for of, target in zip(state.layouts, targets, strict=True)
            ]
            report = execute_shared(plan, nothing, counting(sinks, state.nbytes, progress))
        files = _formatted(folder, parts, specs, of_model.tied, settings)
    done = report.plan
    label = done.label.because(DOUBTFUL) if done.degraded and done.consistent else done.label
    return Exported(
        output=str(settings.output),
        files=tuple(files),
        tensors=len(of_model.specs) + len(of_model.tied),
        bytes=sum(spec.nbytes for spec in specs.values()),
        label=replace(label, declared=None),
        step=done.step,
        degraded=done.degraded,
        problems=(*of_model.problems, *state.hidden, *report.problems),
        format=settings.form,
        snapshot=settings.snapshot,
        weights=settings.weights,
        encoded_partitions=sum(part.encoded for _, part in done.each()),
    )


class _Switch:
    """Writes each tensor to its file, and copies under its other names to theirs."""

    def __init__(self, writers: Mapping[str, StateWriter], tied: Mapping[str, str]) -> None:
        self._writers = writers
        self._others: dict[str, list[str]] = {}
        for alias, name in tied.items():
            if alias in writers:
                self._others.setdefault(name, []).append(alias)

    def write(self, name: str, rows: Rows, data: Bytes) -> None:
        """See `StateWriter`."""
        for one in (name, *self._others.get(name, ())):
            self._writers[one].write(one, rows, data)


def _names(parts: Sequence[object]) -> list[str]:
    """Return the names of the safetensors files."""
    if len(parts) == 1:
        return [WHOLE]
    return [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]


@contextmanager
def _files(
    folder: Path, specs: Mapping[str, TensorSpec], parts: Sequence[Sequence[str]]
) -> Iterator[dict[str, StateWriter]]:
    """Yield the writer of every tensor's file. The files appear if the block ends without an error."""
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(new_state(folder / name, {key: specs[key] for key in part}))
            for name, part in zip(_names(parts), parts, strict=True)
        ]
        yield {key: file for file, part in zip(files, parts, strict=True) for key in part}
        for file in files:
            file.commit()


def _formatted(
    folder: Path,
    parts: Sequence[Sequence[str]],
    specs: Mapping[str, TensorSpec],
    tied: Mapping[str, str],
    settings: ExportSettings,
) -> list[str]:
    """Convert safetensors files to the requested format. Return the names of the files."""
    names = _names(parts)
    if settings.form == "dcp":
        _to_dcp(folder, names, tied)
        return sorted(path.name for path in folder.iterdir())
    if settings.form == "pt":
        _to_torch(folder, names, tied)
    if settings.one_file:
        return [settings.output.name]
    if len(parts) > 1:
        weights = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
            "weight_map": dict(sorted(weights.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        names.append(INDEX)
    return names


def _split(specs: Mapping[str, TensorSpec], limit: int) -> list[list[str]]:
    """Return the names of tensors by file, in order. Each file has at most `limit` bytes, or one tensor."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if parts[-1] and size + spec.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += spec.nbytes
    return parts


def _mapped(folder: Path, names: Sequence[str], tied: Mapping[str, str]) -> dict[str, Any]:
    """Map the tensors of safetensors files, so that memory holds only used pages.

    Each tensor has its own storage, except `tied` ones: other names, each with the name in the files.
    """
    import torch

    from scarctl.state.torch_dtypes import torch_of

    found: dict[str, Any] = {}
    for name in names:
        path = folder / name
        raw = np.memmap(path, np.uint8, mode="c")
        length = header_length(raw[:8].tobytes(), raw.size, path)
        for key, entry in parse_header(raw[:length].tobytes(), raw.size, path).tensors.items():
            data = torch.from_numpy(np.asarray(raw[entry.start : entry.stop]))
            found[key] = data.view(torch_of(entry.dtype)).view(entry.shape)
    return found | {alias: found[name] for alias, name in tied.items()}


def _to_torch(folder: Path, names: Sequence[str], tied: Mapping[str, str]) -> None:
    """Write `state.pt` from the safetensors files in a folder."""
    with (folder / "state.pt").open("xb") as file:
        torch_save(_mapped(folder, names, tied), file)


def _to_dcp(folder: Path, names: Sequence[str], tied: Mapping[str, str]) -> None:
    """Write a DCP checkpoint from the safetensors files in a folder, and remove them."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    made = folder / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is a single process
        save(
            _mapped(folder, names, tied), storage_writer=FileSystemWriter(made, sync_files=True), no_dist=True
        )
    for name in names:
        os.unlink(folder / name)
    for path in made.iterdir():
        os.rename(path, folder / path.name)
    made.rmdir()


@contextmanager
def _made_whole(target: Path, inner: str | None) -> Iterator[Path]:
    """Yield a temporary folder next to `target`. If the block succeeds, rename it, or its file `inner`, to `target`."""
    with os_errors(target):
        temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}.tmp")
        os.mkdir(temporary)
    try:
        with os_errors(target):
            yield temporary
            made = temporary if inner is None else temporary / inner
            for path in [*temporary.iterdir(), temporary]:
                _sync(path)
            if os.path.lexists(target):
                raise UsageError(f"{target} was created meanwhile", hint="use another name, or delete it")
            os.rename(made, target)
            _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
