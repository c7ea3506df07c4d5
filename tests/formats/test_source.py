"""Test any checkpoint as named tensors: the same bytes in every format, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scarctl.errors import Corruption, UsageError
from scarctl.formats import source as module
from scarctl.formats.source import Source, blocks, open_source
from scarctl.state.layout import TensorSpec
from tests.formats.zoo import save_dcp, zoo


def named() -> dict[str, torch.Tensor]:
    """Return a tensor of every kind, one of them with a hostile name."""
    return zoo() | {"\x1b]0;evil\x07\nname": torch.arange(5)}


def save_index(tensors: dict[str, torch.Tensor], folder: Path, shards: int = 3) -> Path:
    """Write tensors as Hugging Face does. Return the index."""
    folder.mkdir()
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    parts: list[dict[str, torch.Tensor]] = [{} for _ in files]
    for i, (name, tensor) in enumerate(tensors.items()):
        parts[i % shards][name] = tensor
    for file, part in zip(files, parts, strict=True):
        save_file(part, folder / file)
    weights = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weights}))
    return index


@pytest.fixture(params=["torch", "dcp", "index"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    if request.param == "torch":
        torch.save(named(), tmp_path / "state")
        return open_source(tmp_path / "state")
    if request.param == "dcp":
        return open_source(save_dcp(named(), tmp_path / "state"))
    save_index(named(), tmp_path / "state")
    return open_source(tmp_path / "state")


def test_all_bytes_of_every_format(opened: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AHEAD", 200)
    monkeypatch.setattr(module, "_OPEN_SHARDS", 1)
    tensors = named()
    assert list(opened.specs) == sorted(tensors)
    for name, tensor in tensors.items():
        spec = opened.specs[name]
        assert spec.shape == tuple(tensor.shape)
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(opened.read(name, 0, spec.nbytes), data)
        middle = spec.nbytes // 2
        assert np.array_equal(opened.read(name, middle, spec.nbytes), data[middle:])


def test_blocks_are_whole_values() -> None:
    spec = TensorSpec("", "F32", (10, 3))
    assert list(blocks(spec, 50)) == [(0, 12), (12, 24), (24, 30)]
    assert list(blocks(TensorSpec("", "F64", ()), 1)) == [(0, 1)]
    assert list(blocks(TensorSpec("", "F32", (0, 3)))) == []


def test_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "none.safetensors")
    torch.save({"step": 3}, tmp_path / "none.pt")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert [dict(open_source(tmp_path / n).specs) for n in ("none.safetensors", "none.pt", "none")] == [
        {}
    ] * 3


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text("{}")
    assert open_source(tmp_path / "model").where.endswith("model.safetensors")


def test_nothing_is_guessed(tmp_path: Path) -> None:
    index = save_index({"w": torch.ones(2)}, tmp_path / "both", shards=1)
    save_dcp({"v": torch.ones(2)}, tmp_path / "other")
    for path in (tmp_path / "other").iterdir():
        path.rename(tmp_path / "both" / path.name)
    with pytest.raises(UsageError, match=r"has model\.safetensors\.index\.json too"):
        open_source(tmp_path / "both")
    assert list(open_source(index).specs) == ["w"]
    assert list(open_source(tmp_path / "both" / ".metadata").specs) == ["v"]
    save_file({}, tmp_path / "both" / "model.safetensors")
    with pytest.raises(UsageError, match="2 possible files"):
        open_source(tmp_path / "both")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError, match="a folder without a checkpoint"):
        open_source(tmp_path / "nothing")


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "..", "", "a\0b", 7, None, ["x"]])
def test_an_index_names_files_of_its_own_folder(tmp_path: Path, file: object) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    index = save_index({"w": torch.ones(2)}, tmp_path / "model")
    index.write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(Corruption, match="it names the file"):
        open_source(index)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', "{" * 100_000, '{"weight_map": {}, "weight_map": {}}']
)
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(Corruption):
        open_source(path)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    index = save_index({"w": torch.ones(2)}, tmp_path / "model", shards=1)
    (tmp_path / "model" / "model-00001-of-00001.safetensors").unlink()
    os.mkfifo(tmp_path / "model" / "model-00001-of-00001.safetensors")
    for path, error in (
        (tmp_path / "pipe", UsageError),
        (tmp_path / "model.safetensors.index.json", UsageError),
        (index, Corruption),
    ):
        with pytest.raises(error, match="not a regular file"):
            open_source(path)


def test_a_duplicate_name_is_refused(tmp_path: Path) -> None:
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    header = f'{{"w":{entry},"w":{entry}}}'.encode()
    (tmp_path / "twice.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(Corruption, match="duplicate key"):
        open_source(tmp_path / "twice.safetensors")
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "twice.pt")
    with pytest.raises(UsageError, match="two tensors are named"):
        open_source(tmp_path / "twice.pt")
