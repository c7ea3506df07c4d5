"""Test commands on stores that several ranks have written, each to its own shard, also while they train."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from scarctl.store import complete_sets, create_snapshot
from tests.cli.conftest import Run, examples
from tests.support.ranks import RankStore, read, same, tensors
from tests.support.waiting import wait_until

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
    # Rows are counted in whole tensors.
    assert "table[24:29]" in [line["name"] for line in done["partitions"] if line["shard"] == 2]
    text = run("inspect", "--store", "ckpt", "--arena-dir", tmp_path).stdout
    assert "4 ranks, since epoch 1" in text
    assert "1 of 1 alive" in text


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


# -- killed meanwhile --------------------------------------------------------------------------------------------


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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_running_job_is_asked(run: Run, tmp_path: Path) -> None:
    from threading import Thread

    from tests.distributed.launch import launch

    folder = str(tmp_path)
    job = Thread(
        target=launch, args=("tests.cli.rank_job:until", 2, "ddp", folder, 90.0), kwargs={"timeout": 120}
    )
    job.start()
    try:
        wait_until((tmp_path / "started").exists)
        place = ("--store", "store", "--arena-dir", tmp_path / "arena")
        status = run("daemon", "status", "--arena-dir", tmp_path / "arena", "--json").document
        assert sorted((line["rank"], line["shard"]) for line in status["runs"]) == [(0, 0), (1, 1)]
        done = run("live", "checkpoint", *place, "--json").document
        assert (done["world"], [line["rank"] for line in done["ranks"]]) == (2, [0, 1])
        done = run("snapshot", "create", "best", *place, "--json").document
        assert done["consistent"]
        lines = run("inspect", *place, "--json").document["ranks"]
        assert [line["alive"] for line in lines] == [True, True]
        (example,) = (words for words in examples(run, "live recover") if "rank:1" in words)
        back = run(*example[:2], *place, *example[4:], "--json").document
        assert [line["restored_partitions"] > 0 for line in back["by_rank"]] == [False, True]
        run("recover", *place, "--lost", "rank:1", code=11)
    finally:
        (tmp_path / "stop").touch()
        job.join()
    exported = run("export", "--store", "store", "out", "--snapshot", "best", "--json").document
    assert (exported["consistent"], exported["step"]) == (True, done["step"])
