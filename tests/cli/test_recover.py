"""Test `scarctl recover` into a state file, a new file, or a stopped run's arena, and what it refuses."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scarctl.arena.arena import Arena
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.state.version import pack
from scarctl.store import Store, open_writer
from tests.cli.conftest import Done, Model, Run, assert_sound
from tests.support.logs import records
from tests.support.ranks import arena_of, current_layout


def recover(run: Run, *arguments: object, code: int = 0) -> Done:
    return run("recover", "--store", "ckpt", "--json", *arguments, code=code)


def layout() -> Layout:
    return current_layout(Store.open("ckpt"))


def lost_rows(*shards: int) -> dict[str, np.ndarray]:
    """Return a bool mask of every tensor's rows that belong to these shards."""
    of = layout()
    masks = {group.name: np.zeros(group.rows, dtype=bool) for group in of.groups}
    ids = np.flatnonzero(np.isin(of.shards(4, 0), shards))
    for g, start, stop in zip(of.group_of(ids), *of.row_ranges(ids), strict=True):
        masks[of.groups[int(g)].name][start:stop] = True
    return masks


def put(tensor: torch.Tensor, mask: np.ndarray, value: torch.Tensor | float) -> torch.Tensor:
    """Return a copy of `tensor` with the rows of `mask` taken from `value`."""
    result = tensor.clone().reshape(len(mask), -1)
    rows = torch.from_numpy(mask)
    result[rows] = value if isinstance(value, float) else value.reshape(len(mask), -1)[rows]
    return result.reshape(tensor.shape)


def read(path: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(path, weights_only=True)) if path.suffix == ".pt" else dict(load_file(path))


class TestIntoAFile:
    @pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
    def test_only_the_lost_rows_change(self, run: Run, saved: Model, tmp_path: Path, suffix: str) -> None:
        start = dict(saved.tensors)
        saved.train()
        survivors = Model(tmp_path / f"survivors{suffix}", dict(saved.tensors))
        masks = lost_rows(1, 3)
        survivors.save(
            **{name: put(tensor, masks[name], float("nan")) for name, tensor in saved.tensors.items()}
        )
        survivors.path.chmod(0o640)
        done = recover(run, "--lost", "1,3", "--into", survivors.path).document
        assert (done["command"], done["mode"]) == ("recover", "partial")
        assert (done["consistent"], done["degraded"], done["dry_run"]) == (False, False, False)
        assert (
            done["lost_partitions"]
            == done["restored_partitions"]
            == sum(s["partitions"] for s in done["shards"])
        )
        assert done["tiers"] == {"store": done["lost_partitions"]}
        assert done["output"] == str(survivors.path)
        assert done["perturbation"] == {"value": None, "kind": "unknown"}
        after = read(survivors.path)
        for name, tensor in saved.tensors.items():
            assert torch.equal(after[name], put(tensor, masks[name], start[name]))
        assert stat.S_IMODE(survivors.path.stat().st_mode) == 0o640

    def test_the_perturbation_is_measured_where_values_are_finite(self, run: Run, saved: Model) -> None:
        saved.train("emb", by=2.0)
        done = recover(run, "--lost", "emb", "--into", saved.path).document
        assert done["perturbation"]["kind"] == "measured"
        assert done["perturbation"]["value"] == pytest.approx(2.0 * np.sqrt(40 * 8), rel=1e-5)
        assert done["bytes"] == 40 * 8 * 4

    def test_what_does_not_fit_is_refused_and_left_alone(self, run: Run, saved: Model) -> None:
        for change in ({"emb": torch.zeros(3, 8)}, {"emb": torch.zeros(40, 8, dtype=torch.bfloat16)}):
            saved.save(**change)
            before = saved.path.read_bytes()
            assert (
                recover(run, "--lost", "emb", "--into", saved.path, code=2).error["kind"] == "layout-mismatch"
            )
            assert saved.path.read_bytes() == before
            recover(run, "--lost", "layers.*", "--into", saved.path)


class TestToAFile:
    @pytest.mark.parametrize("name", ["out.safetensors", "out.100"])
    def test_everything_is_the_state_itself(self, run: Run, saved: Model, name: str) -> None:
        Path(name).write_bytes(b"older")
        done = recover(run, "--lost", "all", "--output", name).document
        assert (done["consistent"], done["step"], done["output"]) == (True, 0, name)
        after = read(Path(name))
        assert set(after) == set(saved.tensors)
        assert all(torch.equal(after[key], tensor) for key, tensor in saved.tensors.items())

    def test_parts_are_named_by_their_rows(self, run: Run, saved: Model) -> None:
        recover(run, "--lost", "layers.1.w", "--lost", "emb[8:24],emb[39:40]", "--output", "out.safetensors")
        after = read(Path("out.safetensors"))
        assert set(after) == {"layers.1.w", "emb[8:24]", "emb[32:40]"}
        assert torch.equal(after["emb[8:24]"], saved.tensors["emb"][8:24])
        assert torch.equal(after["layers.1.w"], saved.tensors["layers.1.w"])


class TestRollback:
    @pytest.fixture
    def mixed(self, run: Run, saved: Model) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the values of step 5, in a store sealed at step 5 and partly saved at step 6."""
        saved.train()
        run("checkpoint", saved.path, "--store", "ckpt", "--step", 5, "--policy", "full")
        sealed = dict(saved.tensors)
        saved.train()
        run("checkpoint", saved.path, "--store", "ckpt", "--step", 6)
        return sealed  # type: ignore[return-value]

    def test_a_new_file_leaves_the_store_alone(self, run: Run, mixed: dict[str, torch.Tensor]) -> None:
        done = recover(run, "--lost", "2", "--mode", "rollback", "--output", "out.pt").document
        assert (done["mode"], done["consistent"], done["step"]) == ("rollback", True, 5)
        assert done["lost_partitions"] < done["restored_partitions"] == layout().partitions
        after = read(Path("out.pt"))
        assert all(torch.equal(after[name], tensor) for name, tensor in mixed.items())
        assert run("inspect", "--store", "ckpt", "--json").document["step"] == 6


def test_a_dry_run_prints_the_plan_and_changes_nothing(run: Run, saved: Model, tmp_path: Path) -> None:
    before = saved.path.read_bytes()
    saved.train()
    trained = saved.path.read_bytes()
    done = recover(run, "--lost", "all", "--into", saved.path, "--dry-run").document
    assert (done["dry_run"], done["seconds"]) == (True, None)
    assert saved.path.read_bytes() == trained != before
    recover(run, "--lost", "all", "--output", "out.pt", "--dry-run")
    assert not Path("out.pt").exists()
    saved.save(emb=torch.zeros(1, 8))
    recover(run, "--lost", "all", "--into", saved.path, "--dry-run", code=2)


@pytest.mark.leaves_arena
class TestArena:
    @pytest.fixture
    def arena(self, saved: Model, run: Run, arena_dir: Path) -> Iterator[Arena]:
        """Yield the arena of a stopped run: all of step 3, one partition torn."""
        store = Store.open("ckpt")
        arena = arena_of(store, arena_dir)
        everything = np.arange(layout().partitions)
        arena.slot.end(everything, pack(1, 3), 1)
        arena.adopt_moment(1)
        arena.slot.stamp(1, pack(1, 3), "")
        arena.reach(4)
        arena.distance[:] = 1.5
        arena.slot.begin(everything[:1])
        yield arena
        arena.close()

    def test_the_lost_partitions_come_from_the_store(self, run: Run, saved: Model, arena: Arena) -> None:
        arena.close()
        done = recover(run, "--lost", "emb").document
        ids = layout().match("emb")
        assert (done["output"], done["tiers"]) == (None, {"store": len(ids)})
        assert done["perturbation"] == {"value": pytest.approx(1.5 * np.sqrt(len(ids))), "kind": "estimated"}
        assert arena.intact().all()
        assert (arena.version[ids] == arena.durable[ids]).all()
        assert arena.rows(0, 0).tobytes() == saved.tensors["emb"].numpy().tobytes()
        assert (arena.rows(1, 0) == 0).all()
        assert arena.pending().sum() == layout().partitions - len(ids)

    def test_a_rollback_forgets_what_memory_had_of_the_time_after(
        self, run: Run, saved: Model, arena: Arena, arena_dir: Path
    ) -> None:
        arena.close()
        recover(run, "--lost", "all", "--mode", "rollback")
        assert arena.intact().all()
        assert not arena.pending().any()
        assert arena.rows(0, 0).tobytes() == saved.tensors["emb"].numpy().tobytes()
        recover(run, "--lost", "all", "--mode", "rollback", "--into", saved.path)
        assert not [path for path in arena_dir.rglob("*") if path.is_file()]
        assert_sound()


def test_optimizer_slots_that_the_file_does_not_have_are_left_out(run: Run, tmp_path: Path) -> None:
    of = build_layout([("w", "parameter", (TensorSpec("", "F32", (4,)), TensorSpec("exp_avg", "F32", (4,))))])
    store = Store.create("ckpt")
    arena = Arena.anonymous(of)
    arena.rows(0, 0)[:] = np.arange(4, dtype="<f4").view(np.uint8).reshape(4, 4)
    with open_writer(store, layout=of) as writer:
        writer.commit(np.array([0]), arena.slot.source, step=1, sealed=True)
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    done = recover(run, "--lost", "all", "--into", "model.safetensors")
    assert "w/exp_avg" in done.stderr
    assert read(tmp_path / "model.safetensors")["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    recover(run, "--lost", "all", "--output", "out.safetensors")
    assert set(read(Path("out.safetensors"))) == {"w", "w/exp_avg"}


def test_rows_without_values_whose_slot_has_some(run: Run, tmp_path: Path) -> None:
    specs = (TensorSpec("", "F32", (4, 0)), TensorSpec("m", "F32", (4, 2)))
    of = build_layout([("w", "parameter", specs)], rows={"*": 1})
    store = Store.create("ckpt")
    arena = Arena.anonymous(of)
    arena.rows(0, 1)[:] = np.arange(8, dtype="<f4").view(np.uint8).reshape(4, 8)
    with open_writer(store, layout=of) as writer:
        writer.commit(np.arange(4), arena.slot.source, step=1, sealed=True)
    save_file({"w": torch.zeros(4, 0), "w/m": torch.zeros(4, 2)}, tmp_path / "state.safetensors")
    recover(run, "--lost", "w[1:3]", "--into", "state.safetensors")
    assert read(tmp_path / "state.safetensors")["w/m"].flatten().tolist() == [0, 0, 2, 3, 4, 5, 0, 0]
    recover(run, "--lost", "w[1:3]", "--output", "out.safetensors")
    found = read(Path("out.safetensors"))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "w[1:3]": (2, 0),
        "w/m[1:3]": (2, 2),
    }
    assert found["w/m[1:3]"].flatten().tolist() == [2, 3, 4, 5]


def test_a_shard_that_cannot_be_read_comes_before_its_cost(run: Run, saved: Model) -> None:
    saved.train()
    run("checkpoint", saved.path, "--store", "ckpt", "--step", 7)
    *earlier, _ = records("ckpt")
    for path in earlier:
        path.write_bytes(b"{}")
    arguments = ("recover", "--store", "ckpt", "--lost", "all", "--output", "out.safetensors", "--json")
    for more in ((), ("--max-rework", 0), ("--max-rework", 0, "--mode", "auto")):
        assert run(*arguments, *more, code=13).error["exit_code"] == 13
    assert not Path("out.safetensors").exists()
