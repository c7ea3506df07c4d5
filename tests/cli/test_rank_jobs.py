"""Test commands on stores that real jobs of two ranks have written, or are writing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run, examples
from tests.support.waiting import wait_until


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
