"""Test `scarctl diff`: stores and files of every kind, exit codes, hostile names, many tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Model, Run
from tests.cli.test_verify import segment

WITHOUT_TORCH = """
import sys
from scarctl.cli.main import cli
for words in sys.argv[1:]:
    try:
        cli.main(words.split())
    except SystemExit as end:
        assert "torch" not in sys.modules
        assert end.code == 0, end.code
"""


def test_a_store_is_compared_with_the_file_that_it_was_saved_from(run: Run, saved: Model) -> None:
    done = run("diff", "ckpt", saved.path)
    assert done.stdout.startswith("ckpt and ") or "are equal: 10 tensors" in done.stdout
    saved.train("layers.3.w")
    found = run("diff", "ckpt", saved.path, "--json", code=4).document
    assert (found["equal"], found["different"], found["values"], found["tensors"]) == (False, 1, 1, 10)
    (one,) = found["differences"]
    assert (one["name"], one["changed_values"], one["max_abs"]) == ("layers.3.w", 128, pytest.approx(1.0))
    text = run("diff", "ckpt", saved.path, code=4).stdout
    assert "1 of 10 tensors differ: 1 with other values" in text
    assert "layers.3.w" in text
    assert run("diff", "ckpt", saved.path, "--ignore", "layers.3.*").stdout.endswith(", 1 ignored\n")
    run("diff", "ckpt", saved.path, "--atol", 1.001)
    assert "no name is in both" not in text
    save_file({"module.w": torch.zeros(2)}, "other.safetensors")
    assert "no name is in both: `scarctl export" in run("diff", "ckpt", "other.safetensors", code=4).stdout


def test_states_of_a_store_by_name_and_by_step(run: Run, saved: Model) -> None:
    run("snapshot", "create", "first", saved.path, "--store", "ckpt", "--step", 10)
    first = load_file(saved.path)
    saved.train()
    run("snapshot", "create", "77", saved.path, "--store", "ckpt", "--step", 20)
    save_file(first, "first.safetensors")
    run("diff", "ckpt@first", "first.safetensors")
    run("diff", "ckpt@10", "ckpt@first")
    run("diff", "ckpt@77", "ckpt@20")
    assert run("diff", "ckpt@first", "ckpt@20", "--json", code=4).document["values"] == 10
    assert run("inspect", "ckpt@first", "--json").document["count"] == 10
    error = run("diff", "ckpt@15", "ckpt", "--json", code=16).error
    assert "no sealed state of step 15" in error["message"]
    assert "10" in error["hint"]
    assert "nothere" in run("diff", "ckpt@nothere", "ckpt", "--json", code=2).error["message"]
    save_file(first, "ckpt@first")
    assert run("diff", "ckpt@first", "ckpt", "--json", code=4).document["a"]["format"] == "safetensors", (
        "a path that exists is taken as it is"
    )


def test_a_damaged_copy_is_replaced_and_said_so(run: Run, saved: Model) -> None:
    before = load_file(saved.path)
    run("checkpoint", saved.train(), "--store", "ckpt", "--step", 1, "--fraction", 1)
    save_file(before, "before.safetensors")
    path = segment(0)
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    path.write_bytes(data)
    done = run("diff", "ckpt", saved.path, code=4)
    assert "checksum" in done.stderr
    for kept in (saved.path, "before.safetensors"):
        assert run("diff", "ckpt", kept, "--json", code=4).document["values"] >= 1
    assert run("diff", "ckpt", "ckpt", code=3).stderr.count("checksum") >= 1


def test_neither_stores_nor_safetensors_load_torch(saved: Model, tmp_path: Path) -> None:
    tensors = {"b": torch.ones(4).bfloat16(), "f": torch.ones(4).to(torch.float8_e5m2)}
    for name in ("a", "b"):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    commands = [
        "diff ckpt state.safetensors",
        "diff a.safetensors b.safetensors --rtol 0.1",
        "inspect a.safetensors --values",
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *commands],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_document(run: Run) -> None:
    save_file({"w": torch.tensor([1.0, 2.0]), "x": torch.ones(1)}, "a.safetensors")
    torch.save({"w": torch.tensor([1.0, float("nan")])}, "b.pt")
    found = run("diff", "a.safetensors", "b.pt", "--json", code=4).document
    assert found["a"] == {"checkpoint": "a.safetensors", "format": "safetensors", "tensors": 2}
    assert (found["nan_appeared"], found["inf_appeared"], found["only_in_a"], found["only_in_b"]) == (
        1,
        0,
        1,
        0,
    )
    first, second = found["differences"]
    assert first == {
        "name": "w", "difference": "values", "a": {"dtype": "F32", "shape": [2]}, "b": {"dtype": "F32", "shape": [2]},
        "changed_values": 1, "relative": 0.0, "norm": 1.0, "norm_of_change": 0.0, "max_abs": 0.0,
        "nan_appeared": 1, "inf_appeared": 0,
    }  # fmt: skip
    assert (second["name"], second["b"], second["relative"]) == ("x", None, None)


def test_hostile_names_stay_on_their_line(run: Run) -> None:
    name = "w\x1b]0;evil\x07\n\u202eA is equal"
    save_file({name: torch.ones(2), "n" * 5000: torch.ones(1)}, "a.safetensors")
    save_file({name: torch.zeros(2), "n" * 5000: torch.zeros(1)}, "b.safetensors")
    for arguments, code in (
        (["diff", "a.safetensors", "b.safetensors"], 4),
        (["inspect", "a.safetensors"], 0),
        (["verify", "a.safetensors"], 0),
    ):
        text = run(*arguments, code=code).stdout
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert max(map(len, text.splitlines())) < 300
    assert (
        run("diff", "a.safetensors", "b.safetensors", "--json", code=4).document["differences"][1]["name"]
        == name
    )
