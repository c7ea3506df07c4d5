"""Test whole jobs of several ranks: they save together, and continue after every kind of failure."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from scarctl.store import Store
from tests.distributed.jobs import load
from tests.distributed.launch import environment, launch
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


@pytest.mark.parametrize(
    ("kind", "others"), [pytest.param("ddp", ["fsdp", 3], marks=pytest.mark.long), ("fsdp", ["ddp", 2])]
)
def test_a_job_goes_on_exactly_and_others_that_divide_it_in_another_way_take_over_its_whole_state(
    kind: str, others: tuple[str, int], tmp_path: Path, uninterrupted: Any
) -> None:
    folder = str(tmp_path)
    launch(TRAIN, 2, kind, folder, 12)
    found = launch(TRAIN, 2, kind, folder, 17, {"keep": f"{folder}/end.pt"})
    assert [(report["step"], report["consistent"], report["errors"]) for report in found] == [
        (12, True, 0)
    ] * 2
    assert same(tmp_path / "end.pt", uninterrupted(kind, 17))

    other, world = others
    found = launch(TRAIN, world, other, folder, 17, {"resumed": f"{folder}/moved.pt"})
    assert [(report["step"], report["errors"]) for report in found] == [(17, 0)] * world
    why = "continued by 3 ranks" if world == 3 else "saved by 2 ranks that divided the state otherwise"
    assert is_whole_because(why, found)
    assert same(tmp_path / "moved.pt", tmp_path / "end.pt")
    found = launch(TRAIN, 1, "plain", folder, 17, {"resumed": f"{folder}/alone.pt"})
    assert found[0]["step"] == 17
    assert is_whole_because(f"saved by {world} ranks and continued by one process", found)
    assert same(tmp_path / "alone.pt", tmp_path / "end.pt")


def is_whole_because(why: str, found: list[dict[str, Any]]) -> bool:
    """Return whether a job has resumed a state that it calls mixed, for this reason."""
    said = any("mixed: " in line and why in line for line in found[0]["warned"])
    return said and all(
        any(why in reason for reason in report["reasons"])
        and (report["consistent"], report["ranks"]["consistent"]) == (False, False)
        for report in found
    )


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


def test_losing_a_rank_loses_only_what_it_owned(tmp_path: Path) -> None:
    # Copies that wait for the store at 10 are not saved then, and those that wait at 13 are lost with their
    # rank.
    first = {"drained_at": [4, 9, 10], "die": 1, "die_at": 13}
    found = torchrun("fsdp", 2, tmp_path, 20, [first, {"resumed": str(tmp_path / "resumed.pt")}])
    assert {report["step"] for report in found} == {13}
    assert not any(report["consistent"] for report in found)
    assert found[0]["ranks"]["lost"] == [1]
    assert found[0]["ranks"]["steps"] == [13, 10]
    assert found[0]["ranks"]["rollback_steps"] == 12, "the only sealed state is that of the first step"
    # Its memory shows nothing of the iterations since: it would be wrong to call them small.
    assert found[0]["ranks"]["perturbation"] == {"value": None, "kind": "unknown"}


@pytest.mark.long
def test_what_others_hold_too_is_not_lost_with_its_owner(tmp_path: Path, uninterrupted: Any) -> None:
    options = [{"die": 1, "die_at": 13, "settings": {"daemon": None}}, {"keep": str(tmp_path / "end.pt")}]
    found = torchrun("ddp", 2, tmp_path, 17, options)
    # The dead rank's random numbers of that step are unknown; this loop draws none.
    assert [(report["step"], report["consistent"]) for report in found] == [(13, False)] * 2
    assert found[0]["ranks"]["lost"] == []
    assert same(tmp_path / "end.pt", uninterrupted("ddp", 17))


@pytest.mark.long
def test_copies_go_on_alike_when_a_rank_loses_what_only_it_has(tmp_path: Path) -> None:
    found = torchrun("experts", 2, tmp_path, 20, [{"die": 1, "die_at": 13}, {}])
    assert found[0]["ranks"]["lost"] == [1]
    assert {report["step"] for report in found} == {13}
    assert found[0]["shared"] == found[1]["shared"]
    assert found[0]["rate"] == found[1]["rate"]


@pytest.mark.long
def test_a_job_that_could_not_begin_can_be_started_again(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="No such file or directory"):
        launch(TRAIN, 2, "fsdp", str(tmp_path), 5, {"settings": {"arena_dir": f"{tmp_path}/none/x"}})
    found = launch(TRAIN, 2, "fsdp", str(tmp_path), 5)
    assert {report["head"] for report in found} == {5}


@pytest.mark.long
def test_ranks_keep_one_interval_that_the_slowest_sets(tmp_path: Path) -> None:
    found = launch(
        TRAIN, 2, "fsdp", str(tmp_path), 120, {"settings": {"interval": "auto", "overhead": 1.0}, "slow": 1}
    )
    assert found[0]["saved_at"] == found[1]["saved_at"]
    assert len(found[0]["saved_at"]) > 3
    assert found[0]["interval"] == found[1]["interval"]
    assert found[0]["proposed"] < found[0]["interval"], "alone it would save more often"
    assert {report["errors"] for report in found} == {0}


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
def test_a_rank_that_owns_nothing_goes_on_with_the_others(tmp_path: Path) -> None:
    folder = str(tmp_path)
    launch(TRAIN, 2, "one tensor", folder, 7)
    found = launch(TRAIN, 2, "one tensor", folder, 9)
    assert [(report["step"], report["consistent"]) for report in found] == [(7, True)] * 2
    with pytest.raises(AssertionError, match="-9"):
        launch(TRAIN, 2, "one tensor", folder, 20, {"die": "all", "die_at": 19, "mode": "rollback"})
    found = launch(TRAIN, 2, "one tensor", folder, 20)
    assert {report["step"] for report in found} <= {10, 15}, (
        "what its owner saved last, not what the other sealed"
    )
    assert found[0]["ranks"]["lost"] == []


@pytest.mark.long
def test_death_before_anything_was_saved(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        launch(TRAIN, 2, "ddp", str(tmp_path), 5, {"die": 1, "die_in": "begin"})
    assert Store.open(tmp_path / "store").blobs.names("topology")
    found = launch(TRAIN, 2, "ddp", str(tmp_path), 5)
    assert [(report["step"], report["head"], report["errors"]) for report in found] == [(0, 5, 0)] * 2


@pytest.mark.long
def test_all_ranks_dead_and_one_host_gone(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="-9"):
        launch(TRAIN, 2, "fsdp", str(tmp_path), 20, {"drained_at": [7], "die": "all", "die_at": 13})
    store = Store.open(tmp_path / "store")
    shutil.rmtree(next((tmp_path / "arena").iterdir()) / f"{store.of_shard(1).run_id}")
    found = launch(TRAIN, 2, "fsdp", str(tmp_path), 20)
    steps = {report["step"] for report in found}
    assert steps in ({1}, {5}, {10}), "nobody has what came after the last checkpoint that rank 1 got durable"
    assert not found[0]["consistent"]


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


@pytest.mark.long
def test_a_rollback_goes_to_what_all_ranks_can_read(tmp_path: Path) -> None:
    folder = str(tmp_path)
    # A snapshot, because a quick collector deletes states older than the newest sealed one.
    launch(TRAIN, 2, "fsdp", folder, 8, {"snapshot_at": 8, "keep": f"{folder}/kept.pt"})
    launch(TRAIN, 2, "fsdp", folder, 14)
    log = Store.open(tmp_path / "store").log(1)
    segment = next(r.segment for r in map(log.record, reversed(log.numbers())) if r.segment is not None)
    path = tmp_path / "store" / "shards" / "1" / "seg" / segment.name
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, len(data), 64):
        data[at] ^= 1
    path.write_bytes(data)
    found = launch(TRAIN, 2, "fsdp", folder, 8, {"mode": "rollback", "resumed": f"{folder}/back.pt"})
    assert [(report["step"], report["consistent"]) for report in found] == [(8, True)] * 2
    assert same(tmp_path / "back.pt", tmp_path / "kept.pt")


@pytest.mark.long
def test_recovering_a_rank_of_a_running_job_changes_that_rank_alone(tmp_path: Path) -> None:
    found = launch(TRAIN, 2, "fsdp", str(tmp_path), 13, {"recover": "rank:1"})
    assert found[0]["recovered"] == 0
    assert found[1]["recovered"] > 0
    found = launch(TRAIN, 2, "ddp", f"{tmp_path}", 13, {"recover": "all", "recover_mode": "rollback"})
    assert {report["head"] for report in found} == {13}, "that is where it resumed, sealed"


LOSSES: dict[str, tuple[Any, list[int]]] = {
    "a name with a comma": ("a,b", [4, 4]),
    "two names": ("b, a", [8, 8]),
    "a list of names": (["a", "a,b"], [8, 8]),
    "rows of the first half": ("a[0:256],a,b[200:256]", [5, 0]),
    "a pattern": ("?", [8, 8]),
    "a number": ("1", [0, 12]),
    "a rank": ("rank:0,1", [12, 12]),
    "its shard": ("shard:1", [0, 12]),
    "a rank and a name": (["rank:0", "b"], [12, 4]),
    "all": ("all", [12, 12]),
}
"""What is lost, and the number of partitions of each of two ranks."""


@pytest.mark.long
def test_what_is_lost_is_named_alike_among_ranks_and_alone(tmp_path: Path) -> None:
    lose = "tests.distributed.jobs:lose"
    losses = [lost for lost, _ in LOSSES.values()]
    (tmp_path / "two").mkdir()
    found = launch(lose, 2, str(tmp_path / "two"), [*losses, "a,nope", "2", "rank:2"])
    assert dict(zip(LOSSES, zip(*found, strict=True), strict=False)) == {
        name: tuple(counts) for name, (_, counts) in LOSSES.items()
    }
    for one in found:
        unknown, *numbers = one[len(LOSSES) :]
        assert "'nope' matches no group" in unknown[0]
        assert [hint for _, hint in numbers] == ["ranks are 0..1"] * 2
    (tmp_path / "one").mkdir()
    of_all = {name: sum(counts) for name, (_, counts) in LOSSES.items()}
    numbers: dict[str, Any] = {"a number": 0, "a rank": "rank:0", "its shard": "shard:0"}
    of_all |= dict.fromkeys([*numbers, "a rank and a name"], 24)  # one process is rank 0, and has one shard
    losses = [numbers.get(name, lost) for name, (lost, _) in LOSSES.items()]
    (alone,) = launch(lose, 1, str(tmp_path / "one"), [*losses, "a,nope", "1", "rank:1"])
    assert dict(zip(LOSSES, alone, strict=False)) == of_all
    hints = [hint for _, hint in alone[len(LOSSES) :]]
    assert hints == ["known names are 'a', 'b', 'a,b'", "the only shard is 0", "the only rank is 0"]


@pytest.mark.long
def test_all_ranks_predict_the_same_cost_of_a_loss(tmp_path: Path) -> None:
    descend, folder = "tests.distributed.jobs:descend", str(tmp_path)
    # An odd number: without a checkpoint at the last step no copy is as new as the live values. The store has
    # each checkpoint before the next, so the ages do not depend on the machine's speed.
    options = {"refused": 0.1, "drained": True, "recover": {"mode": "auto", "max_rework": 20}}
    found = launch(descend, 2, folder, 51, options)
    for one in found:
        report = one["report"]
        assert report["mode"] == "partial"
        assert report["rework"]["iterations"] == pytest.approx(report["truth"], abs=0.5)
        assert report["rework"]["high"] >= report["truth"] - 0.1
        assert report["rollback_steps"] == 50
        assert report["rework"] == found[0]["report"]["rework"]
        assert one["refused"] == "too-much-rework"
    command = [sys.executable, "-m", "scarctl", "inspect", "--store", f"{folder}/store", "--json"]
    seen = json.loads(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout)
    assert seen["convergence"]["c"] == pytest.approx(0.95, abs=5e-3)
    assert seen["convergence"]["points"] >= 8
    with pytest.raises(AssertionError, match="-9"):
        launch(descend, 2, folder, 5, {"die": 1})
    found = launch(descend, 2, folder, 1, {})
    assert found[0]["ranks"]["rework"]["iterations"] is not None
    assert 0 <= found[0]["ranks"]["rework"]["iterations"] < 20


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"settings": {"fraction": 0.5}}, "usage: rank 1 has another fraction"),
        pytest.param({"model": {"width": 41}}, "usage: ", marks=pytest.mark.long),
        pytest.param(
            {"settings": {"interval": 7}}, "usage: rank 1 has another interval", marks=pytest.mark.long
        ),
        pytest.param(
            {"settings": {"tracker": "exact"}}, "usage: rank 1 has another tracker", marks=pytest.mark.long
        ),
        pytest.param({"store": "elsewhere"}, "usage: rank 1 has another store", marks=pytest.mark.long),
        ({"absent": True}, "rank-missing: not all 2 ranks joined within 3 s: rank 1 is missing"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused_on_all_of_them(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    if "store" in changes:
        changes = {"store": str(tmp_path / "elsewhere")}
        (tmp_path / "elsewhere").mkdir()
    found = launch("tests.distributed.jobs:refused", 2, "fsdp", str(tmp_path), changes, timeout=100)
    assert found[0].startswith(says), found
    assert changes.get("absent") or found[1] != "not refused"
    assert not (tmp_path / "store" / "shards").exists() or not Store.open(tmp_path / "store").shards()


@pytest.mark.long
def test_a_running_job_does_what_it_is_asked_for_on_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    env = {
        **environment(0, 2, 0),
        "SCARCTL_STORE": f"{tmp_path}/store",
        "SCARCTL_ARENA_DIR": f"{tmp_path}/arena",
    }

    def ask(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "scarctl", *arguments, "--json"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    options = {"settings": {"daemon": True}, "until": str(tmp_path / "enough")}
    with ThreadPoolExecutor() as pool:
        job = pool.submit(launch, TRAIN, 2, "fsdp", str(tmp_path), 1 << 20, options, timeout=100)
        # A request may arrive before the session can do anything.
        while not job.done() and "ranks" not in ask("live", "checkpoint", "--full"):
            time.sleep(0.2)
        refused = ask("live", "recover", "--lost", "rank:1", "--max-rework", "0")
        recovered = ask("live", "recover", "--lost", "rank:1")
        unknown = ask("live", "recover", "--lost", "nowhere")
        snapshot = ask("snapshot", "create", "now")
        (tmp_path / "enough").touch()
        ends = job.result()
    assert [rank["restored_partitions"] > 0 for rank in recovered["by_rank"]] == [False, True]
    assert unknown["error"]["kind"] == "usage"
    assert refused["error"]["kind"] == "too-much-rework"
    assert recovered["rework"].keys() == {"iterations", "low", "high", "basis", "reason"}
    assert snapshot["consistent"]
    assert {rank["step"] for rank in snapshot["ranks"]} == {snapshot["step"]}
    assert len({end["head"] for end in ends}) == 1
    assert {end["errors"] for end in ends} == {0}
