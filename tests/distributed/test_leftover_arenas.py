"""Test a job with another division that perhaps still runs: only until the new ranks begin."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from scarctl.distributed.leftover_arenas import fence
from scarctl.errors import Contention, Fenced
from scarctl.store import complete_sets
from tests.distributed.launch import launch
from tests.support.ranks import RankStore


def elsewhere() -> Any:
    """Run where no lock keeps a second writer out, as with a job on another host."""
    return f"memory://{uuid4().hex}"


def test_a_job_that_still_runs_elsewhere_is_fenced() -> None:
    job = RankStore(elsewhere(), 2).save(3)
    before = [sealed.step for sealed in complete_sets(job.store.again())]
    fence(job.store.again())
    assert [sealed.step for sealed in complete_sets(job.store.again())] == before == [3]
    for rank in range(2):
        with pytest.raises(Fenced):
            job.save(4, [rank])
    job.close()


def test_only_who_saves_the_newest_state_is_fenced() -> None:
    first = RankStore(url := elsewhere(), 2).save(3)
    second = RankStore(url, 3).save(5)
    newest = [first.store.again().log(shard).newest() for shard in first.topology.shards]
    fence(second.store.again())
    assert [first.store.again().log(shard).newest() for shard in first.topology.shards] == newest
    with pytest.raises(Fenced):
        second.save(6, [2])
    first.close()
    second.close()


def test_a_job_that_runs_here_is_not_disturbed(tmp_path: Path) -> None:
    job = RankStore(tmp_path / "store", 2)
    with pytest.raises(Contention):
        fence(job.store.again())
    job.save(3)
    job.close()


@pytest.mark.long
def test_a_lost_log_is_told_of(tmp_path: Path) -> None:
    folder = str(tmp_path)
    launch("tests.distributed.jobs:train", 2, "fsdp", folder, 6)
    launch("tests.distributed.jobs:train", 1, "plain", folder, 9)
    launch("tests.distributed.jobs:train", 2, "fsdp", folder, 12)
    shards = sorted((tmp_path / "store" / "lanes").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(shards[-1])
    found = launch("tests.distributed.jobs:train", 2, "fsdp", folder, 12)
    assert [report["step"] for report in found] == [9, 9], "what was saved before, and is whole"
    assert any("has no commit of ranks 1" in message for message in found[0]["warned"])
