"""Test recovering what ranks have lost: into files, whole or in pieces, into arenas, and back to a sealed state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scarctl.store import complete_sets
from tests.cli.conftest import ROLLBACK, Run
from tests.support.ranks import RankStore, read, same, tensors


def with_rank(
    state: dict[str, torch.Tensor], source: dict[str, torch.Tensor], rank: int
) -> dict[str, torch.Tensor]:
    """Return the state with the part that one of four ranks owns taken from another state."""
    made = {name: tensor.clone() for name, tensor in state.items()}
    for name in made:
        if name.startswith("table"):
            made[name][12 * rank : 12 * rank + 12] = source[name][12 * rank : 12 * rank + 12]
        if name.startswith("wide"):
            made[name][:, 3 * rank : 3 * rank + 3] = source[name][:, 3 * rank : 3 * rank + 3]
        if name == f"norm@{rank}" or (rank == 0 and name in ("small", "scalar")):
            made[name] = source[name].clone()
    return made


@pytest.mark.parametrize(("suffix", "spec"), [("safetensors", "rank:2"), ("pt", "2")])
def test_a_lost_rank_into_a_whole_file(
    run: Run, ranks: RankStore, tmp_path: Path, suffix: str, spec: str
) -> None:
    state, saved = tensors(11, 4), tensors(5, 4)
    path = tmp_path / f"state.{suffix}"
    if suffix == "pt":
        torch.save(state, path)
    else:
        save_file(state, path)
    planned = run(
        "recover", "--store", "ckpt", "--lost", spec, "--into", path, "--dry-run", "--json"
    ).document
    assert same(read(path), state)
    done = run("recover", "--store", "ckpt", "--lost", spec, "--into", path, "--json").document
    assert same(read(path), with_rank(state, saved, 2))
    assert done["ranks"] == planned["ranks"] == {"world": 4, "lost": [2]}
    assert (done["step"], done["consistent"], done["degraded"]) == (5, False, False)
    assert done["bytes"] == planned["bytes"] == ranks.layouts[2].nbytes
    assert done["tiers"] == {"store": ranks.layouts[2].partitions}
    assert [(line["rank"], line["shard"], line["age"]) for line in done["shards"]] == [(2, 2, 2)]
    new = with_rank(state, saved, 2)
    change = sum(float((new[name] - state[name]).square().sum()) for name in ("table", "wide", "norm@2"))
    assert done["perturbation"] == {"value": pytest.approx(change**0.5, rel=1e-5), "kind": "measured"}


def test_a_file_without_slots_or_with_columns_out_of_order(
    run: Run, ranks: RankStore, tmp_path: Path
) -> None:
    state, saved = tensors(11, 4), tensors(5, 4)
    bare = {name: tensor for name, tensor in state.items() if "/" not in name}
    bare["wide"] = state["wide"].t().contiguous().t()  # not contiguous
    torch.save(bare, tmp_path / "state.pt")
    done = run("recover", "--store", "ckpt", "--lost", "rank:2", "--into", "state.pt")
    assert "holds no optimizer slots" in done.stderr
    wanted = {name: tensor for name, tensor in with_rank(state, saved, 2).items() if "/" not in name}
    assert same(read(tmp_path / "state.pt"), wanted)


def test_pieces_of_whole_tensors(run: Run, ranks: RankStore, tmp_path: Path) -> None:
    saved = tensors(5, 4)
    run("recover", "--store", "ckpt", "--lost", "rank:2", "--output", "lost.safetensors")
    found = read(tmp_path / "lost.safetensors")
    wanted = {f"table{s}[24:36]": saved[f"table{s}"][24:36] for s in ("", "/exp_avg", "/exp_avg_sq")}
    wanted |= {f"wide{s}[0:6,6:9]": saved[f"wide{s}"][:, 6:9].contiguous() for s in ("", "/exp_avg")}
    assert same(found, {**wanted, "norm@2": saved["norm@2"]})
    # Adjacent rows are shown together, whichever rank has them.
    run("recover", "--store", "ckpt", "--lost", "table[20:30]", "--lost", "wide", "--output", "two.pt")
    found = read(tmp_path / "two.pt")
    assert sorted(found) == [
        "table/exp_avg[17:34]",
        "table/exp_avg_sq[17:34]",
        "table[17:34]",
        "wide",
        "wide/exp_avg",
    ]
    assert torch.equal(found["table[17:34]"][7:], saved["table"][24:34])


def test_a_rollback_of_all_ranks(run: Run, ranks: RankStore, tmp_path: Path) -> None:
    run(
        "recover", "--store", "ckpt", "--lost", "rank:1", "--mode", "rollback", "--output", "back.safetensors"
    )
    assert same(read(tmp_path / "back.safetensors"), tensors(5, 4))
    save_file(tensors(11, 4), tmp_path / "state.safetensors")
    done = run(*ROLLBACK, "--into", "state.safetensors", "--json").document
    assert (done["consistent"], done["step"], done["tiers"]) == (True, 5, {"store": 30})
    assert same(read(tmp_path / "state.safetensors"), tensors(5, 4))
    # The store was rolled back too, in every rank.
    assert run("export", "--store", "ckpt", "out", "--json").document["consistent"]
    back = RankStore(tmp_path / "ckpt", 4)
    back.save(6)
    back.close()
    assert [one.step for one in complete_sets(back.store)] == [6, 5, 3]


def test_into_the_arenas_of_the_stopped_ranks(run: Run, ranks: RankStore, tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        ranks.arena(tmp_path, rank, 9).close()
    arguments = ("recover", "--store", "ckpt", "--arena-dir", tmp_path, "--json")
    error = run(*arguments, "--lost", "rank:2", code=2).error
    assert (error["kind"], "rank 2" in error["message"]) == ("no-arena", True)
    ranks.arena(tmp_path, 2, 9).close()
    done = run(*arguments, "--lost", "rank:2").document
    assert (done["output"], done["step"], done["consistent"]) == (None, 5, False)
    # Restored into a file, they come from memory again.
    save_file(tensors(11, 4), tmp_path / "state.safetensors")
    done = run(*arguments, "--lost", "rank:1,2", "--into", "state.safetensors").document
    assert done["tiers"] == {"memory": 14}
    wanted = with_rank(with_rank(tensors(11, 4), tensors(5, 4), 2), tensors(9, 4), 1)
    assert same(read(tmp_path / "state.safetensors"), wanted)
    done = run(*arguments, "--lost", "all", "--mode", "rollback").document
    assert (done["step"], done["consistent"], done["restored_partitions"]) == (5, True, 30)


def test_a_job_that_is_alive_is_not_disturbed(run: Run, tmp_path: Path) -> None:
    made = RankStore(tmp_path / "ckpt", 2)
    made.save(3)
    made.arena(tmp_path, 0, 4).close()
    made.arena(tmp_path, 1, 4).close()
    save_file(tensors(3, 2), tmp_path / "state.safetensors")
    arguments = ("recover", "--store", "ckpt", "--arena-dir", tmp_path, "--lost", "rank:0")
    run(*arguments, code=11)
    run(*arguments, "--mode", "rollback", "--into", "state.safetensors", code=11)
    run(*arguments, "--into", "state.safetensors")
    made.save(5)
    made.close()
