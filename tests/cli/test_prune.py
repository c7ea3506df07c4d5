"""Test `scarctl prune`, `scarctl snapshot`, snapshots in `recover` and `inspect`, and `scarctl export`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file

from scarctl.cli.main import cli
from scarctl.store import Store, create_snapshot, open_writer, sealed_sets, verify
from tests.cli.conftest import ROLLBACK, Model, Run, fresh
from tests.support.ranks import current_layout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a model beside a store with two snapshots, another sealed state, and later partial checkpoints."""
    folder = tmp_path_factory.mktemp("grown")
    model = fresh(folder / "state.safetensors")

    def save(step: int, *words: object) -> None:
        arguments = [*words, model.path, "--store", folder / "ckpt", "--step", step]
        result = CliRunner().invoke(cli, list(map(str, arguments)))
        assert result.exit_code == 0, result.output

    for step, name in ((0, None), (10, "first"), (20, "second"), (30, None)):
        words = ("snapshot", "create", name) if name else ("checkpoint", "--policy", "full")
        save(step, *words, *(() if step else ("--shards", 2)))
        model.train()
    for step in range(31, 36):
        save(step, "checkpoint")
        model.train("emb")
    return model


@pytest.fixture
def grown(run: Run, made: Model, tmp_path: Path) -> Model:
    """Return a copy of the model and its store, in the working folder."""
    shutil.copytree(made.path.parent / "ckpt", tmp_path / "ckpt")
    return Model(Path(shutil.copy(made.path, tmp_path)), made.tensors)


def whole(run: Run, tmp_path: Path, *options: str) -> dict[str, torch.Tensor]:
    path = tmp_path / "whole.safetensors"
    run(*ROLLBACK, "--output", path, *options)
    return load_file(path)


def expected(step: int, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Return the model after `step // 10` rounds of training."""
    model = fresh(tmp_path / "other.safetensors")
    for _ in range(step // 10):
        model.train()
    return model.tensors


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_snapshot_is_restored_exactly(run: Run, grown: Model, tmp_path: Path) -> None:
    for name, step in (("first", 10), ("second", 20)):
        assert same(whole(run, tmp_path, "--snapshot", name), expected(step, tmp_path))
    run("prune", "--store", "ckpt", "--yes")
    for name, step in (("first", 10), ("second", 20)):
        assert same(whole(run, tmp_path, "--snapshot", name), expected(step, tmp_path))
    assert same(whole(run, tmp_path), expected(30, tmp_path))
    error = run("recover", "--store", "ckpt", "--lost", "all", "--snapshot", "first", "--json", code=2).error
    assert "rollback" in error["message"]
    error = run(*ROLLBACK, "--snapshot", "x", "--output", "x.pt", "--json", code=2).error
    assert (error["kind"], "first, second" in error["hint"]) == ("no-snapshot", True)


def test_rolling_back_to_a_snapshot_below_the_boundary_goes_on_from_there(
    run: Run, grown: Model, tmp_path: Path
) -> None:
    run("prune", "--store", "ckpt", "--yes")
    run(*ROLLBACK, "--snapshot", "first", "--into", grown.path)
    assert same(load_file(grown.path), expected(10, tmp_path))
    run("checkpoint", grown.path, "--store", "ckpt", "--step", 11)
    run("prune", "--store", "ckpt", "--keep", "second", "--yes")
    assert same(whole(run, tmp_path, "--snapshot", "second"), expected(20, tmp_path))
    store = Store.open("ckpt")
    assert verify(store, read_data=True).problems == []


def test_prune_shows_asks_and_deletes(run: Run, grown: Model, tmp_path: Path) -> None:
    before = sorted(p for p in Path("ckpt").rglob("*") if p.is_file())
    plan = run("prune", "--store", "ckpt", "--dry-run", "--json").document
    assert plan["files"] > 10
    assert (plan["kept_sealed_steps"], plan["dropped_sealed_steps"]) == ([30], [0])
    assert {s["name"] for s in plan["kept_snapshots"]} == {"first", "second"}
    assert run("prune", "--store", "ckpt", "--json", code=2).error["kind"] == "usage"
    assert sorted(p for p in Path("ckpt").rglob("*") if p.is_file()) == before
    shown = run("prune", "--store", "ckpt", "--keep", "sec*", "--dry-run").stdout
    assert "snapshot first, of step 10, would be deleted" in shown
    assert "given up: steps 10, 0\n" in shown
    done = run("prune", "--store", "ckpt", "--keep", "sec*", "--yes", "--json").document
    assert [s["name"] for s in done["deleted_snapshots"]] == ["first"]
    assert done["freed_bytes"] > 0
    listed = run("inspect", "--store", "ckpt", "--json").document["snapshots"]
    assert [(s["name"], s["step"]) for s in listed] == [("second", 20)]
    assert "snapshots: second (step 20)" in run("inspect", "--store", "ckpt").stdout
    shown = run("snapshot", "delete", "second", "--store", "ckpt", "--yes").stdout
    assert "snapshot second, of step 20, was deleted\n" in shown
    error = run("snapshot", "delete", "second", "--store", "ckpt", "--json", code=2).error
    assert error["kind"] == "no-snapshot"
    report = verify(Store.open("ckpt"), read_data=True)
    assert (report.problems, report.orphans) == ([], [])
    assert same(whole(run, tmp_path), expected(30, tmp_path))


def test_prune_keeps_sealed_states_by_number_and_by_steps(run: Run, tmp_path: Path) -> None:
    model = fresh(tmp_path / "state.safetensors")
    # So small a store is not collected yet, so all of them exist.
    for step in range(0, 60, 10):
        run("checkpoint", model.path, "--store", "ckpt", "--step", step, "--policy", "full")
        model.train()
    plan = run(
        "prune", "--store", "ckpt", "--keep-last", 2, "--keep-every", 20, "--dry-run", "--json"
    ).document
    kept, dropped = plan["kept_sealed_steps"], plan["dropped_sealed_steps"]
    assert sorted(kept + dropped) == [0, 10, 20, 30, 40, 50]
    assert {40, 50} <= set(kept)
    run("prune", "--store", "ckpt", "--keep-last", 3, "--yes")
    sets = sealed_sets([Store.open("ckpt").state(0)])
    assert [s.step for s in sets] == [50, 40, 30]
    run("prune", "--store", "ckpt", "--keep-last", 0, "--yes", code=2)


def test_beside_a_live_writer_only_left_overs_go(run: Run, grown: Model) -> None:
    store = Store.open("ckpt")
    layout = current_layout(store)
    orphan = Path("ckpt/lanes/0/seg/00000001-" + "a" * 32 + ".safetensors")
    with open_writer(store, layout=layout) as writer:
        young = Path(f"ckpt/lanes/0/seg/{writer.epoch:08d}-" + "b" * 32 + ".safetensors")
        orphan.write_bytes(b"left by a crash")
        young.write_bytes(b"an upload under way")
        before = {p for p in Path("ckpt/lanes").rglob("*") if p.is_file()}
        done = run("snapshot", "delete", "first", "--store", "ckpt", "--yes", "--json")
        assert "collects old copies automatically" in done.stderr
        assert done.document["live_writer"]
        assert done.document["dropped_sealed_steps"] == []
        assert {p for p in Path("ckpt/lanes").rglob("*") if p.is_file()} == before - {orphan}
        assert not Path("ckpt/snapshots/first.json").exists()
        sets = sealed_sets([writer.state])
        create_snapshot(store, "now", sets[0])
    young.unlink()
    assert verify(store, read_data=True).problems == []


def test_export_safetensors_with_an_index(run: Run, grown: Model, tmp_path: Path) -> None:
    done = run(
        "export", "--store", "ckpt", "out", "--snapshot", "second", "--max-shard-size", "1KB", "--json"
    ).document
    assert (done["consistent"], done["step"]) == (True, 20)
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    found = {}
    for name in set(index["weight_map"].values()):
        with safe_open(Path("out") / name, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert same(found, expected(20, tmp_path))
    assert set(index["weight_map"]) == set(found)
    assert len(set(index["weight_map"].values())) > 1
    run("export", "--store", "ckpt", "one")
    assert [p.name for p in Path("one").iterdir()] == ["model.safetensors"]
    assert run("export", "--store", "ckpt", "one", "--json", code=2).error["kind"] == "usage"
    error = run("export", "--store", "ckpt", "nowhere/one", "--json", code=2).error
    assert error["message"] == f"folder {tmp_path / 'nowhere'} does not exist"
    assert not list(tmp_path.glob(".*tmp"))
