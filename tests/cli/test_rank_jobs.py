"""Test commands on stores that real jobs of two ranks have written, or are writing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from scarctl.store import Store
from tests.cli.conftest import Run, examples
from tests.support.ranks import read
from tests.support.waiting import wait_until


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_job_of_two_ranks(run: Run, tmp_path: Path) -> None:
    from tests.distributed.jobs import load
    from tests.distributed.launch import launch

    folder = str(tmp_path)
    launch("tests.distributed.jobs:train", 2, "fsdp", folder, 12, {"keep": f"{folder}/kept"}, timeout=120)
    done = run("export", "--store", "store", "out.pt", "--format", "pt", "--json").document
    assert (done["consistent"], done["step"]) == (True, 12)
    found, kept = read(tmp_path / "out.pt"), load(tmp_path / "kept")
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    assert {name.partition("@")[0] for name in found} - kept.keys() == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    lines = run("inspect", "--store", "store", "--arena-dir", "arena", "--json").document["ranks"]
    assert [line["durable_step"] for line in lines] == [12, 12]
    torch.save({name: torch.zeros_like(kept[name]) for name in kept}, tmp_path / "zeros.pt")
    run("recover", "--store", "store", "--lost", "table.weight,dense.*", "--into", "zeros.pt")
    patched = read(tmp_path / "zeros.pt")
    assert torch.equal(patched["table.weight"], kept["table.weight"])
    assert torch.equal(patched["dense.weight/exp_avg"], kept["dense.weight/exp_avg"])
    assert not np.any(patched["out.weight"].numpy())
    run("verify", "--store", "store")
    run("prune", "--store", "store", "--yes")
    assert Store.open(tmp_path / "store").shards() == [0, 1]


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
