"""Read the index of a checkpoint in several safetensors files, as Hugging Face writes it.

`model.safetensors.index.json` has a `weight_map`: the file of every tensor, in the same folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scarctl.errors import Corruption, UsageError
from scarctl.formats.state_file import StateFile, open_state, os_errors
from scarctl.store.format import parse_json
from scarctl.store.header import MAX_HEADER

INDEX = "model.safetensors.index.json"
INDEX_ENDING = ".safetensors.index.json"
WHOLE = "model.safetensors"
"""The file of a checkpoint that has only one."""
_HINT = "write or download the checkpoint again; no value was read from it"


@dataclass(frozen=True, slots=True)
class Index:
    """A parsed index."""

    path: Path
    files: Mapping[str, str]
    """File name of every tensor."""
    total_size: int | None
    """Bytes of all tensors, as the index claims; None without a claim."""

    def by_file(self) -> dict[str, list[str]]:
        """Return the tensors of every file, ordered by file."""
        found: dict[str, list[str]] = {}
        for name, file in self.files.items():
            found.setdefault(file, []).append(name)
        return dict(sorted(found.items()))

    def open_shard(self, file: str) -> StateFile:
        """Open one of the files. Raises Corruption when it is missing or damaged, AccessDenied, Unavailable."""
        try:
            state = open_state(self.path.parent / file, may_be_empty=True)
        except UsageError as error:
            raise self.corrupt(error.message) from error
        if state.format != "safetensors":
            raise self.corrupt(f"{file} is not a safetensors file")
        return state

    def corrupt(self, reason: str) -> Corruption:
        """Return the error of an index that does not fit its files."""
        return Corruption(f"{self.path}: {reason}", hint=_HINT)


def index_in(folder: Path) -> Path | None:
    """Return the index in a folder, or its only safetensors file, or None. Raises UsageError if it may be several."""
    names = sorted(path.name for path in folder.iterdir())
    indexes = [name for name in names if name.endswith(INDEX_ENDING)]
    # Libraries prefer the whole file to an index, or the other way round.
    found = [*indexes, *(name for name in names if name == WHOLE)]
    found = found or [name for name in names if name.endswith(".safetensors")]
    if len(found) > 1:
        raise UsageError(
            f"{folder} has {len(found)} possible files: {', '.join(found[:5])}",
            hint="name one of them",
            kind="foreign-state-file",
        )
    return folder / found[0] if found else None


def read_index(path: Path) -> Index:
    """Read an index without trusting it: its files are in its own folder.

    Raises UsageError, Corruption, AccessDenied, Unavailable.
    """
    with os_errors(path):
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a regular file", hint="give the index of a checkpoint")
        with path.open("rb") as file:
            data = file.read(MAX_HEADER + 1)
    if len(data) > MAX_HEADER:
        raise Corruption(f"{path}: the index has more than {MAX_HEADER} bytes", hint=_HINT)
    obj = parse_json(data, path)
    files = obj.get("weight_map") if isinstance(obj, dict) else None
    if not isinstance(files, dict):
        raise Corruption(f"{path}: the index has no weight_map", hint=_HINT)
    for file in files.values():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise Corruption(f"{path}: it names the file {str(file)[:200]!r}", hint=_HINT)
    metadata = obj.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some tools write it as a float.
    whole = (
        isinstance(total, int | float) and not isinstance(total, bool) and total == int(min(total, 1 << 62))
    )
    return Index(path, files, int(total) if whole and total is not None else None)
