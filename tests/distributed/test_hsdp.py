"""Test FSDP2 on a mesh of two dimensions (HSDP): every shard has two holders, which own half of its rows each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import launch
from tests.distributed.test_sessions import TRAIN, same, torchrun

# test_owned_adapter has this mesh, test_sessions the failures.
pytestmark = pytest.mark.long
RANKS = 4
"""Ranks 0 and 2 hold one shard, ranks 1 and 3 the other."""


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the end of an undisturbed job."""
    folder = tmp_path_factory.mktemp("calm")
    launch(TRAIN, RANKS, "hsdp", str(folder), 17, {"keep": str(folder / "end.pt")})
    return folder / "end.pt"


def test_a_job_goes_on_exactly_and_another_number_of_ranks_takes_it_over(tmp_path: Path, calm: Path) -> None:
    folder = str(tmp_path)
    launch(TRAIN, RANKS, "hsdp", folder, 12)
    found = launch(TRAIN, RANKS, "hsdp", folder, 17, {"keep": f"{folder}/end.pt"})
    assert [(report["step"], report["consistent"], report["errors"]) for report in found] == [
        (12, True, 0)
    ] * RANKS
    assert same(tmp_path / "end.pt", calm)
    found = launch(TRAIN, 2, "fsdp", folder, 17, {"resumed": f"{folder}/moved.pt"})
    assert [(report["step"], report["whole"], report["consistent"]) for report in found] == [
        (17, True, False)
    ] * 2
    assert same(tmp_path / "moved.pt", calm)


def killed(ranks: list[int], folder: Path, kind: str = "hsdp") -> dict[str, Any]:
    """Kill ranks with -9 at the end of step 13. Return what resuming says in the job that torchrun starts again."""
    first = {"drained_at": [4, 9, 10], "die": ranks, "die_at": 13, "settings": {"daemon": None}}
    found = torchrun(kind, RANKS, folder, 17, [first, {"keep": str(folder / "end.pt")}])
    assert {report["step"] for report in found} == {13}
    said: dict[str, Any] = found[0]["ranks"]
    return said


def test_a_killed_rank_loses_no_parameter_because_another_rank_holds_its_shard(
    tmp_path: Path, calm: Path
) -> None:
    said = killed([1], tmp_path)
    assert same(tmp_path / "end.pt", calm)
    # No other rank has its statistics of batch norm.
    assert (said["lost"], said["perturbation"]["value"], said["rework"]["iterations"]) == ([1], 0.0, 0.0)


def test_a_killed_rank_without_buffers_loses_nothing(tmp_path: Path) -> None:
    assert killed([1], tmp_path, "hsdp without buffers")["lost"] == []


def test_a_shard_whose_holders_all_die_goes_back_and_the_other_continues(tmp_path: Path, calm: Path) -> None:
    said = killed([1, 3], tmp_path)
    assert (said["lost"], said["steps"]) == ([1, 3], [13, 10, 13, 10])
    assert said["perturbation"]["value"] > 0
    assert not same(tmp_path / "end.pt", calm)


def test_recovering_a_rank_of_a_running_job_restores_what_it_owned_on_both_holders(tmp_path: Path) -> None:
    found = launch(TRAIN, RANKS, "hsdp", str(tmp_path), 13, {"recover": "rank:1"})
    assert [report["recovered"] > 0 for report in found] == [False, True, False, False]
    assert [report["errors"] for report in found] == [0] * RANKS
    assert found[0]["parts"] == found[2]["parts"]
    assert found[1]["parts"] == found[3]["parts"]
