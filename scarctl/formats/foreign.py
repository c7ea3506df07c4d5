"""Name the kind of a file that is not a state file, and what to do with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scarctl.errors import UsageError

KNOWN = "give a safetensors file, a .pt file with tensors only, or a folder of torch.distributed.checkpoint"
_CONVERT = "convert it: safetensors.numpy.save_file({}, 'state.safetensors')"
_KINDS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x93NUMPY", "an array of numpy (.npy)", _CONVERT.format("{'name': numpy.load('FILE')}")),
    (
        b"version https://git-lfs",
        "a pointer of Git LFS, not the file that it stands for",
        "run `git lfs pull`",
    ),
    (b"\x89HDF", "an HDF5 file", KNOWN),
    (b"GGUF", "a GGUF file", KNOWN),
    (b"\x1f\x8b", "compressed with gzip", "unpack it first"),
    (b"\x80", "a pickle", "save its tensors with torch.save or safetensors: scarctl never unpickles objects"),
)
_PAGES = (b"<!doctype", b"<html", b"<?xml", b"<head")
_WRITTEN = ("", "safetensors", "pt", "pth")
"""Endings of the state files that scarctl writes."""


def foreign(path: Path, start: bytes) -> UsageError:
    """Return the error for a file that begins with `start`, and has no known format."""
    if not start:
        return _error(f"{path} is empty", KNOWN)
    for magic, kind, hint in _KINDS:
        if start.startswith(magic):
            return _error(f"{path} is {kind}", hint.replace("FILE", str(path)))
    if start.lstrip().lower().startswith(_PAGES):
        return _error(f"{path} is a web page", "perhaps a download that failed: fetch it again")
    return _error(f"{path} has no known format of state files", KNOWN)


def foreign_archive(path: Path, names: Sequence[str]) -> UsageError:
    """Return the error for a zip archive of these names, which torch did not write."""
    if names and all(name.endswith(".npy") for name in names):
        return _error(
            f"{path} is an archive of numpy arrays (.npz)",
            _CONVERT.format(f"dict(numpy.load({str(path)!r}))"),
        )
    return _error(f"{path} is an archive that torch.save did not write", KNOWN)


def foreign_folder(path: Path) -> UsageError:
    """Return the error for a folder that torch.distributed.checkpoint did not write."""
    if (path / "scarctl.json").exists():
        return _error(
            f"{path} is a store, not a state file", "name it with --store, or write it with `scarctl export`"
        )
    hint = f"{KNOWN}; an unfinished save has no .metadata"
    return _error(f"{path} is a folder without a .metadata file", hint)


def check_new(path: Path) -> None:
    """Raise UsageError if the name of a new file promises a format that is not written. A number promises none."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in _WRITTEN and not ending.isdigit():
        raise UsageError(
            f"{path}: scarctl writes no .{ending} files", hint="give a name that ends in .safetensors or .pt"
        )


def _error(message: str, hint: str) -> UsageError:
    return UsageError(message, hint=hint, kind="foreign-state-file")
