"""Test `scarctl inspect FILE` and `scarctl verify FILE` on checkpoints that are not stores."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Model, Run
from tests.formats.test_source import save_dcp, save_index


def tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.ones(4).bfloat16(),
        "s": torch.tensor(7),
        "e": torch.zeros(0),
    }


MAKERS: dict[str, Callable[[Path], object]] = {
    "safetensors": lambda path: save_file(tensors(), path),
    "torch": lambda path: torch.save(tensors(), path),
    "dcp": lambda path: save_dcp(tensors(), path),
    "index": lambda path: save_index(tensors(), path),
}


def reasons(run: Run, path: str | Path, *options: str) -> list[str]:
    """Return the reasons of all problems, of which there is at least one."""
    found = run("verify", path, "--json", *options, code=13).document
    assert not found["intact"]
    text = run("verify", path, *options, code=13).stdout
    assert f": {len(found['problems'])} problem" in text
    return [problem["reason"] for problem in found["problems"]]


@pytest.mark.parametrize("form", MAKERS)
def test_a_checkpoint_of_every_format(run: Run, form: str) -> None:
    MAKERS[form](Path("x"))
    found = run("inspect", "x", "--json").document
    assert (found["format"], found["count"], found["values"], found["bytes"]) == (form, 4, 11, 40)
    assert found["dtypes"]["F32"] == {"tensors": 2, "bytes": 24}
    assert found["tensors"][0] == {"name": "a", "dtype": "F32", "shape": [2, 3], "bytes": 24}
    measured = run("inspect", "x", "--json", "--values", "--limit", 1).document
    assert measured["tensors"][0]["norm"] == pytest.approx(math.sqrt(55))
    assert measured["omitted"] == 3
    text = run("inspect", "x", "--values").stdout
    assert "4 tensors, 11 values, 40 B" in text
    done = run("verify", "x", "--json").document
    assert (done["intact"], done["format"], done["tensors"], done["read_data"]) == (True, form, 4, True)
    assert "intact, data not read" in run("verify", "x", "--no-read-data").stdout


def test_values_that_are_not_finite_are_counted(run: Run) -> None:
    save_file({"w": torch.tensor([math.nan, math.inf, -math.inf, 1.0]), "v": torch.ones(1)}, "w.safetensors")
    found = run("verify", "w.safetensors", "--json").document
    assert (found["nan"], found["inf"]) == (1, 2)
    assert found["not_finite"] == [{"name": "w", "nan": 1, "inf": 2}]
    assert "w: 1 NaN, 2 infinite" in run("verify", "w.safetensors").stdout
    assert reasons(run, "w.safetensors", "--finite") == ["1 NaN, 2 infinite"]


def test_a_safetensors_file_that_contradicts_itself(run: Run) -> None:
    save_file(tensors(), "x")
    data = Path("x").read_bytes()
    Path("x").write_bytes(data[:-1])
    assert "end at byte" in reasons(run, "x")[0]
    Path("x").write_bytes(data + b"\0")
    assert "end at byte" in reasons(run, "x")[0]
    for entries, reason in (
        ({"a": [0, 8], "b": [4, 12]}, "overlap"),
        ({"a": [0, 8], "b": [12, 20]}, "hole"),
        ({"a": [0, 4], "b": [4, 12]}, "does not fit"),
    ):
        header = json.dumps(
            {n: {"dtype": "F32", "shape": [2], "data_offsets": o} for n, o in entries.items()}
        ).encode()
        Path("x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(20))
        assert reason in reasons(run, "x")[0]


def test_a_flipped_byte_in_an_archive(run: Run) -> None:
    torch.save({"w": torch.arange(1000.0)}, "w.pt")
    data = bytearray(Path("w.pt").read_bytes())
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 4] ^= 1
    Path("w.pt").write_bytes(data)
    assert "CRC" in reasons(run, "w.pt")[0]
    assert torch.load("w.pt", weights_only=True)["w"][1] != 1.0, "torch reads it without a word"
    Path("w.pt").write_bytes(data[: len(data) // 2])
    assert "directory" in reasons(run, "w.pt")[0]


def test_an_archive_without_checksums_is_intact(run: Run) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, "w.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert all(info.CRC == 0 for info in zipfile.ZipFile("w.pt").infolist())
    assert run("verify", "w.pt").stdout.endswith(": intact\n")


def test_an_index_that_does_not_fit_its_files(run: Run) -> None:
    index = save_index(tensors(), Path("x"))
    obj = json.loads(index.read_text())
    files = sorted(set(obj["weight_map"].values()))
    obj["weight_map"]["a"] = files[1]  # the difference is in the first
    obj["weight_map"]["missing"] = files[2]
    del obj["weight_map"]["b"]
    index.write_text(json.dumps(obj))
    save_file({}, "x/model-00004-of-00004.safetensors")
    found = reasons(run, "x")
    assert sum("does not have the tensor" in reason for reason in found) == 2
    assert f"the index places it in {files[1]}" in found
    assert "the index does not name this tensor" in found
    assert "the index does not name this file, which belongs to another save" in found
    Path("x", files[0]).unlink()
    assert any("does not exist" in reason for reason in reasons(run, index))
    run("inspect", "x", code=13)
    obj["metadata"]["total_size"] = 7
    obj["weight_map"] = {}
    index.write_text(json.dumps(obj))
    assert "it claims 7 bytes of tensors, the files have 0" in reasons(run, "x")


def test_a_shard_of_another_kind(run: Run) -> None:
    index = save_index({"w": torch.ones(2)}, Path("x"), shards=1)
    torch.save({"w": torch.ones(2)}, "x/model.bin")
    index.write_text(json.dumps({"weight_map": {"w": "model.bin"}}))
    assert "model.bin is not a safetensors file" in reasons(run, index)


def test_a_folder_of_dcp_and_its_files(run: Run) -> None:
    folder = save_dcp(tensors(), Path("x"))
    (file,) = folder.glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert any("but the file has" in reason for reason in reasons(run, "x"))
    file.write_bytes(data)
    (folder / "__9_0.distcp").write_bytes(b"")
    assert reasons(run, "x") == ["the metadata do not name this file, which belongs to another save"]
    (folder / "__9_0.distcp").unlink()
    run("verify", "x/.metadata")
    file.unlink()
    assert "this file is missing" in reasons(run, "x")[0]
    damaged = bytearray(data)
    damaged[:2000] = bytes(2000)
    file.write_bytes(damaged)
    assert reasons(run, "x")


def test_a_store_may_be_named_like_a_file(run: Run, saved: Model) -> None:
    shown = [run("inspect", *words).stdout for words in (["ckpt"], ["--store", "ckpt"])]
    assert len({re.sub(r"[\d.]+ \w+ old", "N s old", text) for text in shown}) == 1
    assert run("verify", "ckpt", "--json").document["records"] == 2


def test_a_file_comes_before_the_store_of_the_environment(
    run: Run, saved: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCARCTL_STORE", "ckpt")
    assert run("inspect", saved.path, "--json").document["format"] == "safetensors"
    assert run("verify", "--json").document["records"] == 2
