"""Test whole jobs of several ranks: they save together, and continue after every kind of failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scarctl.store import Store
from tests.distributed.jobs import load
from tests.distributed.launch import launch
from tests.distributed.launch import torchrun as run_under_torchrun

TRAIN = "tests.distributed.jobs:train"


def same(a: Path, b: Path) -> bool:
    """Return whether two files of `train` hold the same values, bit by bit."""
    first, second = load(a), load(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def torchrun(
    kind: str, world: int, folder: Path, steps: int, options: list[dict[str, Any]], *, restarts: int = 1
) -> list[dict[str, Any]]:
    """Run a job of `train` under torchrun, which restarts it when a rank dies; return every rank's last report."""
    arguments = (kind, str(folder), str(steps), json.dumps(options))
    run_under_torchrun("tests.distributed.job", *arguments, world=world, restarts=restarts)
    reports = [(folder / f"report-{rank}.jsonl").read_text().splitlines()[-1] for rank in range(world)]
    return [json.loads(report) for report in reports]


@pytest.fixture
def uninterrupted(tmp_path: Path) -> Any:
    """Return by kind the end of an undisturbed job of two ranks."""

    def run(kind: str, steps: int) -> Path:
        (tmp_path / "calm").mkdir()
        launch(TRAIN, 2, kind, str(tmp_path / "calm"), steps, {"keep": str(tmp_path / "calm.pt")})
        return tmp_path / "calm.pt"

    return run


def test_a_job_goes_on_exactly_and_others_that_divide_it_in_another_way_take_over_its_whole_state(
    tmp_path: Path, uninterrupted: Any
) -> None:
    folder = str(tmp_path)
    launch(TRAIN, 2, "fsdp", folder, 12)
    found = launch(TRAIN, 2, "fsdp", folder, 17, {"keep": f"{folder}/end.pt"})
    assert [(report["step"], report["consistent"], report["errors"]) for report in found] == [
        (12, True, 0)
    ] * 2
    assert same(tmp_path / "end.pt", uninterrupted("fsdp", 17))

    found = launch(TRAIN, 2, "ddp", folder, 17, {"resumed": f"{folder}/moved.pt"})
    assert [(report["step"], report["errors"]) for report in found] == [(17, 0)] * 2
    assert is_whole_because("saved by 2 ranks that divided the state otherwise", found)
    assert same(tmp_path / "moved.pt", tmp_path / "end.pt")
    found = launch(TRAIN, 1, "plain", folder, 17, {"resumed": f"{folder}/alone.pt"})
    assert found[0]["step"] == 17
    assert is_whole_because("saved by 2 ranks and continued by one process", found)
    assert same(tmp_path / "alone.pt", tmp_path / "end.pt")


def is_whole_because(why: str, found: list[dict[str, Any]]) -> bool:
    """Return whether a job has resumed a state that it calls mixed, for this reason."""
    said = any("mixed: " in line and why in line for line in found[0]["warned"])
    return said and all(
        any(why in reason for reason in report["reasons"]) and not report["consistent"] for report in found
    )


def test_losing_a_rank_loses_only_what_it_owned(tmp_path: Path) -> None:
    # Copies that wait for the store at 10 are not saved then, and those that wait at 13 are lost with their
    # rank.
    first = {"drained_at": [4, 9, 10], "die": 1, "die_at": 13}
    found = torchrun("fsdp", 2, tmp_path, 20, [first, {"resumed": str(tmp_path / "resumed.pt")}])
    assert {report["step"] for report in found} == {13}
    assert not any(report["consistent"] for report in found)
    assert found[0]["ranks"]["lost"] == [1]
    (said,) = [line for line in found[0]["warned"] if line.startswith("resumed ")]
    assert "at step 13, mixed, partitions of steps" in said
    assert "; lost 1 of 2 ranks (1), whose state is of their last checkpoints: predicted rework in" in said
    assert found[0]["ranks"]["steps"] == [13, 10]
    assert found[0]["ranks"]["rollback_steps"] == 12, "the only sealed state is that of the first step"
    # Its memory shows nothing of the iterations since: it would be wrong to call them small.
    assert found[0]["ranks"]["perturbation"] == {"value": None, "kind": "unknown"}


def test_all_are_killed_while_some_have_a_newer_checkpoint(tmp_path: Path, uninterrupted: Any) -> None:
    with pytest.raises(AssertionError, match="-9"):
        launch(TRAIN, 2, "fsdp", str(tmp_path), 20, {"die": "all", "die_in": ["after flip", "before flip"]})
    found = launch(TRAIN, 2, "fsdp", str(tmp_path), 14, {"keep": f"{tmp_path}/end.pt"})
    assert [(report["step"], report["consistent"]) for report in found] == [(5, True)] * 2
    assert found[0]["ranks"]["lost"] == []
    assert same(tmp_path / "end.pt", uninterrupted("fsdp", 14))


@pytest.mark.long
def test_death_in_a_checkpoint_then_while_resuming_then_again(tmp_path: Path) -> None:
    options = [
        {"die": 0, "die_in": "checkpoint"},
        {"die": 1, "die_in": "resume"},
        {"die": 2, "die_in": "spread"},
        {"die": 2, "die_at": 17},
        {},
    ]
    found = torchrun("fsdp", 3, tmp_path, 20, options, restarts=4)
    assert {report["step"] for report in found} == {17}
    assert found[0]["ranks"]["lost"] == [2]
    assert {report["errors"] for report in found} == {0}


@pytest.mark.long
def test_fewer_ranks_take_over_what_survivors_have_in_memory(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="-9"):
        launch(TRAIN, 3, "fsdp", str(tmp_path), 20, {"die": 2, "die_at": 13})
    found = launch(TRAIN, 2, "fsdp", str(tmp_path), 20)
    assert {report["step"] for report in found} == {13}
    assert found[0]["ranks"]["lost"] == [2]
    assert not (list((tmp_path / "arena").glob("scarctl-*/*"))), "all of it is in the store"


@pytest.mark.long
def test_a_snapshot_is_of_all_ranks_and_can_be_gone_back_to(tmp_path: Path) -> None:
    folder = str(tmp_path)
    launch(TRAIN, 2, "fsdp", folder, 8, {"snapshot_at": 8, "keep": f"{folder}/kept.pt"})
    launch(TRAIN, 2, "fsdp", folder, 14)
    found = launch(TRAIN, 2, "fsdp", folder, 8, {"snapshot": "kept", "resumed": f"{folder}/back.pt"})
    assert [(report["step"], report["consistent"]) for report in found] == [(8, True)] * 2
    assert same(tmp_path / "back.pt", tmp_path / "kept.pt")
    launch(TRAIN, 2, "fsdp", folder, 12)
    found = launch(TRAIN, 3, "fsdp", folder, 8, {"snapshot": "kept", "resumed": f"{folder}/moved.pt"})
    assert [(report["step"], report["whole"], report["consistent"]) for report in found] == [
        (8, True, False)
    ] * 3
    assert same(tmp_path / "moved.pt", tmp_path / "kept.pt")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"settings": {"fraction": 0.5}}, "usage: rank 1 has another fraction"),
        ({"absent": True}, "rank-missing: not all 2 ranks joined within 3 s: rank 1 is missing"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused_on_all_of_them(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    found = launch("tests.distributed.jobs:refused", 2, "fsdp", str(tmp_path), changes, timeout=100)
    assert found[0].startswith(says), found
    assert changes.get("absent") or found[1] != "not refused"
    assert not (tmp_path / "store" / "lanes").exists() or not Store.open(tmp_path / "store").shards()


@pytest.mark.long
def test_one_process_continues_exactly_what_one_process_has_saved(tmp_path: Path) -> None:
    folder = str(tmp_path)
    launch(TRAIN, 1, "plain", folder, 5)
    alone = launch(TRAIN, 1, "plain", folder, 9, {"keep": f"{folder}/end.pt"})
    assert (alone[0]["step"], alone[0]["consistent"]) == (5, True)
    found = launch(TRAIN, 2, "ddp", folder, 9, {"resumed": f"{folder}/moved.pt"})
    assert is_whole_because("saved by one process and continued by 2 ranks", found)
    assert same(tmp_path / "moved.pt", tmp_path / "end.pt")
    back = launch(TRAIN, 1, "plain", folder, 12)
    assert not back[0]["consistent"]
    again = launch(TRAIN, 1, "plain", folder, 13)
    assert (again[0]["step"], again[0]["consistent"]) == (12, True), "in a store of ranks, too"
