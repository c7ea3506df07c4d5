"""Test files that are not state files: the error names the kind of each, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.errors import UsageError
from scarctl.formats.foreign import check_new, foreign, foreign_archive, foreign_folder


@pytest.mark.parametrize(
    ("start", "says", "advises"),
    [
        (b"", "is empty", "safetensors"),
        (b"\x93NUMPY\x01\x00", "array of numpy (.npy)", "numpy.load('model.bin')"),
        (b"version https://git-lfs.github.com/spec/v1", "pointer of Git LFS", "git lfs pull"),
        (b"\x89HDF\r\n", "HDF5", "safetensors"),
        (b"GGUF\x03", "GGUF", "safetensors"),
        (b"\x1f\x8b\x08", "gzip", "unpack"),
        (b"\x80\x04\x95", "a pickle", "never unpickles"),
        (b" \n<!DOCTYPE html>", "web page", "fetch it again"),
        (b"hello", "no known format", "safetensors"),
    ],
)
def test_a_file_is_named_for_its_first_bytes(start: bytes, says: str, advises: str) -> None:
    error = foreign(Path("model.bin"), start)
    assert (error.kind, error.exit_code) == ("foreign-state-file", 2)
    assert says in error.message
    assert advises in str(error.hint)


def test_an_archive_of_arrays_is_none_of_torch() -> None:
    error = foreign_archive(Path("a.npz"), ["w.npy", "b.npy"])
    assert ".npz" in error.message
    assert "dict(numpy.load('a.npz'))" in str(error.hint)
    for names in ([], ["w.npy", "data.pkl"]):
        assert "torch.save did not write" in foreign_archive(Path("a.zip"), names).message


def test_a_store_is_no_state_file(tmp_path: Path) -> None:
    assert ".metadata" in foreign_folder(tmp_path).message
    (tmp_path / "scarctl.json").touch()
    assert "is a store" in foreign_folder(tmp_path).message


@pytest.mark.parametrize("name", ["a.npz", "a.H5", "a.gguf", "a.json", "a.tar", "a.txt", "a.bin", "a.ckpt"])
def test_a_new_file_promises_no_format_that_is_not_written(name: str) -> None:
    with pytest.raises(UsageError, match="scarctl writes no"):
        check_new(Path(name))
    for good in ("a.safetensors", "a.PT", "a.pth", "run-1.5", "run"):
        check_new(Path(good))
