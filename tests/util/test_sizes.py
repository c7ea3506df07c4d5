"""Test counting before parsing: exactly as much as the parser would find, and genuine files are accepted."""

from __future__ import annotations

import json
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from scarctl.util import json_size
from scarctl.util.json_size import too_much
from scarctl.util.pickle_size import pickle_fault, torch_fault, torch_pickles_fault
from scarctl.util.zip_size import MAX_DIRECTORY, directory_bytes

texts = st.text(alphabet='a\\"[{,]}', max_size=8)
trees = st.recursive(
    texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=20,
)


def counts(tree: object) -> tuple[int, int]:
    """Return the numbers of containers and of commas outside of texts."""
    if isinstance(tree, str):
        return 0, 0
    items = list(tree.values()) if isinstance(tree, dict) else list(tree)  # type: ignore[call-overload]
    below = [counts(item) for item in items]
    return 1 + sum(c for c, _ in below), max(0, len(items) - 1) + sum(v for _, v in below)


@given(trees, st.integers(1, 9))
def test_what_stands_in_texts_does_not_count(tree: object, piece: int) -> None:
    text, (containers, values) = json.dumps(tree), counts(tree)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "_PIECE", piece)
        assert too_much(text, containers=containers, values=values) is None
        if containers:
            assert "lists and objects" in str(too_much(text, containers=containers - 1, values=values))
        if values:
            assert "values" in str(too_much(text, containers=containers, values=values - 1))


def test_metadata_that_a_checkpoint_has(tmp_path: Path) -> None:
    state = {"model": {f"layers.{k}.weight": torch.zeros(4, 4) for k in range(300)}, "optimizer": {"lr": 0.1}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    assert pickle_fault((tmp_path / ".metadata").read_bytes()) is None


@pytest.mark.parametrize(
    "content",
    [
        b"]" * 1_000_000,
        b"N" * 1_000_000,
        b"N" + b"\x85" * 1_000_000,
        b"\x8c\x01a" * 400_000,
        b"(" * 1_000_000,
    ],
)
def test_metadata_that_make_too_much(content: bytes) -> None:
    assert pickle_fault(b"\x80\x04" + content + b".") is not None


def test_metadata_with_a_memo_of_any_size() -> None:
    assert "opcode 0x72" in str(pickle_fault(b"\x80\x04]r\xff\xff\xff\x7f."))


def test_the_pickle_of_a_pt_file(tmp_path: Path) -> None:
    plain = {
        "values": [None, True, 1, 2.0, "a", (1, 2)] * 5000,
        "tensors": {str(k): torch.zeros(2) for k in range(50)},
    }
    torch.save(plain, tmp_path / "state.pt")
    with zipfile.ZipFile(tmp_path / "state.pt") as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        assert torch_fault(archive.read(name)) is None
    assert torch_fault(b"\x80\x02" + b"]" * 2_000_000 + b".") is not None
    assert torch_fault(b"\x80\x02" + b"N" * 2_000_000 + b".") is not None
    assert torch_fault(b"\x80\x02" + b"N" * 2_000_000 + b".", 20_000) is None
    assert torch_fault(b"\x80\x02" + b")R" * 300_000 + b".") is not None
    assert torch_fault(b"\x80\x02N") is not None
    assert torch_pickles_fault(b"..\x80\x02N.\x80\x02K\x01.data", 2, 2, 100) == (None, 11)
    assert torch_pickles_fault(b"N." + b"N" * 100 + b".", 0, 2, 50)[0] is not None


def test_the_directory_of_an_archive(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "state.pt")
    with (tmp_path / "state.pt").open("rb") as file:
        assert 0 < directory_bytes(file) < MAX_DIRECTORY
