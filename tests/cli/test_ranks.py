"""Commands on a store that several ranks have written, each to its own shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scarctl.store import complete_sets, create_snapshot
from tests.cli.conftest import Run
from tests.support.ranks import RankStore, tensors

RANK_KEYS = {
    "rank",
    "shard",
    "partitions",
    "bytes",
    "oldest_step",
    "newest_step",
    "never_saved",
    "perturbation",
    "share",
    "expected_perturbation",
    "rework",
    "staleness",
    "durable_step",
    "head_step",
    "pid",
    "alive",
    "pending_partitions",
    "errors",
    "replica_of",
    "copies",
}


@pytest.fixture
def ranks(tmp_path: Path) -> RankStore:
    """Four ranks, sealed at step 3 and 5; three of them have saved parts at step 7."""
    made = RankStore(tmp_path / "ckpt", 4)
    made.save(3)
    made.save(5)
    made.save(7, [0, 1, 3], every=2)
    return made.close()


def read(path: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(path, weights_only=True)) if path.suffix == ".pt" else dict(load_file(path))


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


def with_rank(
    state: dict[str, torch.Tensor], source: dict[str, torch.Tensor], rank: int
) -> dict[str, torch.Tensor]:
    """The state with what one of four ranks owns taken from another."""
    made = {name: tensor.clone() for name, tensor in state.items()}
    for name in made:
        if name.startswith("table"):
            made[name][12 * rank : 12 * rank + 12] = source[name][12 * rank : 12 * rank + 12]
        if name.startswith("wide"):
            made[name][:, 3 * rank : 3 * rank + 3] = source[name][:, 3 * rank : 3 * rank + 3]
        if name == f"norm@{rank}" or (rank == 0 and name in ("small", "scalar")):
            made[name] = source[name].clone()
    return made


# -- inspect -----------------------------------------------------------------------------------------------------


def test_inspect_has_a_line_for_every_rank(run: Run, ranks: RankStore, tmp_path: Path) -> None:
    ranks.arena(tmp_path, 1, 9).close()
    done = run("inspect", "--store", "ckpt", "--arena-dir", tmp_path, "--json").document
    assert done["topology"] == {
        "world": 4,
        "members": False,
        "epoch": 1,
        "shards": [0, 1, 2, 3],
        "created": ranks.topology.created,
        "note": None,
    }
    lines = done["ranks"]
    assert all(set(line) == RANK_KEYS for line in lines)
    assert [(line["rank"], line["shard"], line["durable_step"]) for line in lines] == [
        (0, 0, 7),
        (1, 1, 7),
        (2, 2, 5),
        (3, 3, 7),
    ]
    assert [(line["alive"], line["head_step"]) for line in lines] == [
        (None, None),
        (True, 9),
        (None, None),
        (None, None),
    ]
    assert lines[2]["staleness"] == 4
    assert (
        sum(line["bytes"] for line in lines) == done["total_bytes"] == sum(of.nbytes for of in ranks.layouts)
    )
    assert done["step"] == 9
    # Rows are those of whole tensors.
    assert "table[24:29]" in [line["name"] for line in done["partitions"] if line["shard"] == 2]
    text = run("inspect", "--store", "ckpt", "--arena-dir", tmp_path).stdout
    assert "4 ranks, since epoch 1" in text
    assert "1 of 1 alive" in text


def test_watch_ends_when_no_rank_is_alive(run: Run, ranks: RankStore) -> None:
    assert "no run is alive" in run("inspect", "--store", "ckpt", "--watch").stderr


def test_ranks_that_have_saved_nothing_whole_yet(run: Run, tmp_path: Path) -> None:
    made = RankStore(tmp_path / "ckpt", 2)
    made.save(1, [0])
    made.close()
    done = run("inspect", "--store", "ckpt", "--json").document
    assert [line["never_saved"] > 0 for line in done["ranks"]] == [False, True]
    assert "the store has no whole state of all ranks" in done["topology"]["note"]
    error = run("export", "--store", "ckpt", "out", "--json", code=16).error
    assert error["kind"] == "nothing-saved"
    run("plan", "--from", "ckpt", "--bandwidth", "1GB", "--mtbf", "1d", "--step-time", 1, code=2)


# -- killed in between -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [True, False], ids=["a rank has saved", "nobody has saved"])
def test_killed_right_after_a_resharding(run: Run, ranks: RankStore, tmp_path: Path, begun: bool) -> None:
    three = RankStore(tmp_path / "ckpt", 3, topology_only=not begun)
    if begun:
        three.save(8, [0])
        three.close()
    done = run("export", "--store", "ckpt", "out")
    assert "the 3 ranks of epoch 2 have not saved a whole state yet" in done.stderr
    assert "norm@3" in read(tmp_path / "out/model.safetensors")
    done = run("inspect", "--store", "ckpt", "--json")
    assert (done.document["topology"]["world"], done.document["step"]) == (4, 7)
    assert "the state of the 4 ranks of epoch 1" in done.document["topology"]["note"]
    done = run("recover", "--store", "ckpt", "--lost", "rank:3", "--output", "lost.pt", "--json")
    assert done.document["ranks"] == {"world": 4, "lost": [3]}
    run("verify", "--store", "ckpt")
    run("prune", "--store", "ckpt", "--yes")
    run("export", "--store", "ckpt", "again")


def test_killed_when_ranks_take_over_from_one_process(run: Run, tmp_path: Path) -> None:
    values = {"w": torch.arange(64.0).reshape(16, 4)}
    save_file(values, tmp_path / "state.safetensors")
    run(
        "checkpoint",
        "state.safetensors",
        "--store",
        "ckpt",
        "--step",
        2,
        "--shards",
        2,
        "--partition-bytes",
        32,
    )
    three = RankStore(tmp_path / "ckpt", 3)
    three.save(4, [1])
    three.close()
    done = run("export", "--store", "ckpt", "out.pt", "--format", "pt")
    assert "this is the state of one process" in done.stderr
    assert same(read(tmp_path / "out.pt"), values)
    done = run("inspect", "--store", "ckpt", "--json")
    assert (done.document["step"], len(done.document["shards"])) == (2, 2)
    run("recover", "--store", "ckpt", "--lost", "0", "--into", "state.safetensors")
    assert same(read(tmp_path / "state.safetensors"), values)
    run("recover", "--store", "ckpt", "--lost", "all", "--mode", "rollback", "--output", "back.pt")
    assert same(read(tmp_path / "back.pt"), values)


def test_a_damaged_topology(run: Run, ranks: RankStore, tmp_path: Path) -> None:
    path = tmp_path / "ckpt/topology/00000001.json"
    path.write_bytes(path.read_bytes()[:-20])
    for command in (
        ("inspect",),
        ("export", "out"),
        ("recover", "--lost", "rank:1", "--output", "x.pt"),
        ("prune", "--yes"),
        ("live", "checkpoint"),
    ):
        error = run(*command, "--store", "ckpt", "--json", code=13).error
        assert "00000001.json" in error["message"]
        assert "may be deleted" in error["hint"]
    done = run("verify", "--store", "ckpt", "--json", code=13).document
    assert [problem["file"] for problem in done["problems"]] == [str(path)]


# -- recover -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("spec", ["rank:2", "2"])
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
    assert (done["step"], done["exact"], done["degraded"]) == (5, False, False)
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
    # What is adjacent goes together, whoever has it.
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


@pytest.mark.parametrize(
    ("spec", "restored"),
    [
        ("small,scalar", [2, 0, 0, 0]),
        ("rank:1,3", [0, 7, 0, 7]),
        ("shard:1,3", [0, 7, 0, 7]),
        ("norm@2,rank:0", [9, 0, 1, 0]),
        ("table[10:13],1", [1, 7, 0, 0]),
    ],
)
def test_ways_to_name_what_is_lost(
    run: Run, ranks: RankStore, tmp_path: Path, spec: str, restored: list[int]
) -> None:
    done = run("recover", "--store", "ckpt", "--lost", spec, "--output", "x.pt", "--json").document
    assert {line["rank"]: line["partitions"] for line in done["shards"]} == {
        rank: count for rank, count in enumerate(restored) if count
    }


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("rank:4", "ranks are 0..3"),
        ("shard:9", "shards are 0..3"),
        ("7", "ranks are 0..3"),
        ("tabel", "'table'"),
        ("table[48:50]", ""),
        (",", "ranks"),
    ],
)
def test_what_does_not_exist(run: Run, ranks: RankStore, spec: str, said: str) -> None:
    error = run("recover", "--store", "ckpt", "--lost", spec, "--output", "x.pt", "--json", code=2).error
    assert said in error["hint"]


def test_a_rollback_of_all_ranks(run: Run, ranks: RankStore, tmp_path: Path) -> None:
    run(
        "recover", "--store", "ckpt", "--lost", "rank:1", "--mode", "rollback", "--output", "back.safetensors"
    )
    assert same(read(tmp_path / "back.safetensors"), tensors(5, 4))
    save_file(tensors(11, 4), tmp_path / "state.safetensors")
    done = run(
        "recover",
        "--store",
        "ckpt",
        "--lost",
        "all",
        "--mode",
        "rollback",
        "--into",
        "state.safetensors",
        "--json",
    ).document
    assert (done["exact"], done["step"], done["tiers"]) == (True, 5, {"store": 30})
    assert same(read(tmp_path / "state.safetensors"), tensors(5, 4))
    # The store has gone back too, every rank of it.
    assert run("export", "--store", "ckpt", "out", "--json").document["exact"]
    back = RankStore(tmp_path / "ckpt", 4)
    back.save(6)
    back.close()
    assert [one.step for one in complete_sets(back.store)] == [6, 5, 3]


def test_a_rollback_takes_the_next_older_state_where_a_rank_has_damage(
    run: Run, ranks: RankStore, tmp_path: Path
) -> None:
    row = ranks.source(1, 5)(0, 0, 5, 6).tobytes()  # not saved again at step 7
    for path in (tmp_path / "ckpt/shards/1/seg").iterdir():
        data = bytearray(path.read_bytes())
        if row in data:
            data[data.index(row)] ^= 1
            path.write_bytes(data)
    done = run(
        "recover",
        "--store",
        "ckpt",
        "--lost",
        "all",
        "--mode",
        "rollback",
        "--output",
        "x.pt",
        "--json",
        code=3,
    ).document
    assert (done["step"], done["exact"], done["degraded"]) == (3, True, True)
    assert same(read(tmp_path / "x.pt"), tensors(3, 4))
    done = run(
        "recover", "--store", "ckpt", "--lost", "rank:1", "--output", "y.pt", "--json", code=3
    ).document
    assert (done["degraded"], done["exact"]) == (True, False)
    assert any("checksum" in problem for problem in done["problems"])
    run("verify", "--store", "ckpt", code=13)


def test_into_the_arenas_of_the_stopped_ranks(run: Run, ranks: RankStore, tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        ranks.arena(tmp_path, rank, 9).close()
    arguments = ("recover", "--store", "ckpt", "--arena-dir", tmp_path, "--json")
    error = run(*arguments, "--lost", "rank:2", code=2).error
    assert (error["kind"], "rank 2" in error["message"]) == ("no-arena", True)
    ranks.arena(tmp_path, 2, 9).close()
    done = run(*arguments, "--lost", "rank:2").document
    assert (done["output"], done["step"], done["exact"]) == (None, 5, False)
    # Into a file it comes from memory again.
    save_file(tensors(11, 4), tmp_path / "state.safetensors")
    done = run(*arguments, "--lost", "rank:1,2", "--into", "state.safetensors").document
    assert done["tiers"] == {"memory": 14}
    wanted = with_rank(with_rank(tensors(11, 4), tensors(5, 4), 2), tensors(9, 4), 1)
    assert same(read(tmp_path / "state.safetensors"), wanted)
    done = run(*arguments, "--lost", "all", "--mode", "rollback").document
    assert (done["step"], done["exact"], done["restored_partitions"]) == (5, True, 30)


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


# -- snapshots, other numbers of ranks -----------------------------------------------------------------------------


def test_snapshots_over_ranks(run: Run, ranks: RankStore, tmp_path: Path) -> None:
    create_snapshot(ranks.store, "best", complete_sets(ranks.store)[1])
    three = RankStore(tmp_path / "ckpt", 3)
    three.save(8)
    three.close()
    run("export", "--store", "ckpt", "best", "--snapshot", "best")
    assert same(read(tmp_path / "best/model.safetensors"), tensors(3, 4))
    run("export", "--store", "ckpt", "now.pt", "--format", "pt")
    assert same(read(tmp_path / "now.pt"), tensors(8, 3))
    back = ("recover", "--store", "ckpt", "--lost", "all", "--mode", "rollback", "--snapshot", "best")
    run(*back, "--output", "back.pt")
    assert same(read(tmp_path / "back.pt"), tensors(3, 4))
    save_file(tensors(11, 4), tmp_path / "state.safetensors")
    error = run(*back, "--into", "state.safetensors", "--json", code=2).error
    assert error["kind"] == "snapshot-of-other-ranks"
    document = run("prune", "--store", "ckpt", "--yes", "--json").document
    assert document["retired_shards"] == []
    run("export", "--store", "ckpt", "best2", "--snapshot", "best")
    document = run("snapshot", "delete", "best", "--store", "ckpt", "--yes", "--json").document
    assert document["retired_shards"] == [0, 1, 2, 3]
    done = run("inspect", "--store", "ckpt", "--json").document
    assert [line["retired"] for line in done["other_shards"]] == [True] * 4
    assert "retired shards: 0, 1, 2, 3" in run("inspect", "--store", "ckpt").stdout
    run("verify", "--store", "ckpt")
    run("export", "--store", "ckpt", "last.pt", "--format", "pt")
    assert same(read(tmp_path / "last.pt"), tensors(8, 3))


@pytest.mark.parametrize("form", ["safetensors", "pt", "dcp"])
def test_export_in_every_format(run: Run, ranks: RankStore, tmp_path: Path, form: str) -> None:
    create_snapshot(ranks.store, "five", complete_sets(ranks.store)[0])
    done = run(
        "export",
        "--store",
        "ckpt",
        "out.pt",
        "--snapshot",
        "five",
        "--format",
        form,
        *(["--max-shard-size", "2KB"] if form != "pt" else []),
        "--json",
    ).document
    assert (done["exact"], done["step"], done["bytes"]) == (True, 5, sum(of.nbytes for of in ranks.layouts))
    if form == "safetensors":
        found: dict[str, Any] = {}
        for path in (tmp_path / "out.pt").glob("*.safetensors"):
            found |= read(path)
        assert len(done["files"]) > 2
    elif form == "pt":
        found = read(tmp_path / "out.pt")
    else:
        from scarctl.formats.dcp import load_tensors

        found = dict(load_tensors(tmp_path / "out.pt"))
    assert same(found, tensors(5, 4))


# -- what one process may not do, what needs a session ----------------------------------------------------------------


def test_one_process_cannot_save_to_it(run: Run, ranks: RankStore, tmp_path: Path) -> None:
    save_file(tensors(11, 4), tmp_path / "state.safetensors")
    for words in (("checkpoint",), ("checkpoint", "--dry-run"), ("snapshot", "create", "best")):
        arguments = (*words, "state.safetensors", "--store", "ckpt", "--step", 20, "--json")
        error = run(*arguments, code=2).error
        assert error["kind"] == "store-of-ranks"
        assert "written by 4 ranks" in error["message"]
    for words in (("live", "checkpoint"), ("snapshot", "create", "best")):
        error = run(*words, "--store", "ckpt", "--arena-dir", tmp_path, "--json", code=2).error
        assert error["kind"] == "no-session"


def test_plan_and_doctor(run: Run, ranks: RankStore) -> None:
    arguments = ("plan", "--from", "ckpt", "--bandwidth", "1GB", "--mtbf", "1d", "--step-time", 1, "--json")
    done = run(*arguments).document
    assert (done["job"]["shards"], done["history"]["partitions"]) == (4, 30)
    assert done["job"]["state_bytes"] == sum(of.nbytes for of in ranks.layouts)
    run("doctor", "--store", "ckpt", "--rounds", 1)
    run("verify", "--store", "ckpt")
