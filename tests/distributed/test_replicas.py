"""Test a host that dies with its daemon and its memory: the job continues from copies on another host.

Two folders of arenas are two hosts, each with a daemon; they talk over the loopback interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scarctl.arena.folder import host_folder
from tests.daemon.trainer import stop
from tests.distributed.jobs import load
from tests.distributed.launch import launch

TRAIN = "tests.distributed.hosted:train"
HOMES, ELSEWHERE = ["east", "west"], ["north", "west"]
STOPPED = {"homes": HOMES, "store_stops_at": 7, "lost": [0]}
"""The store has nothing after step 7."""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of the hosts, and stop their daemons at the end."""
    monkeypatch.delenv("SCARCTL_DAEMON")
    yield tmp_path
    for home in ("east", "west", "north"):
        stop(host_folder(str(tmp_path / home)))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return by kind the end of an undisturbed job."""

    def train(kind: str) -> Any:
        folder = tmp_path_factory.mktemp("calm")
        job = {"homes": HOMES, "keep": f"{folder}/end.pt", "settings": {"peers": 0}}
        launch(TRAIN, 2, kind, str(folder), 17, job)
        for home in HOMES:
            stop(host_folder(str(folder / home)))
        return load(folder / "end.pt")

    return train


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_all_die_and_one_host_is_lost(hosts: Path, calm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {**STOPPED, "flush_at": 13, "copied_at": 13, "all_die_at": 13}
    with pytest.raises(AssertionError, match="ended with -9"):
        launch(TRAIN, 2, "fsdp", str(hosts), 20, job)
    assert not (hosts / "east").exists()
    end = str(hosts / "end.pt")
    found = launch(TRAIN, 2, "fsdp", str(hosts), 17, {"homes": ELSEWHERE, "keep": end})
    assert [(report["step"], report["consistent"], report["errors"]) for report in found] == [
        (13, True, 0)
    ] * 2
    assert [set(report["tiers"]) for report in found] == [{"peer"}, {"memory"}]
    assert same(load(Path(end)), calm("fsdp"))


@pytest.mark.long
def test_another_number_of_ranks_takes_over_what_copies_have(hosts: Path) -> None:
    """East's memory is lost, and West has both: its own, and the copy. The store has none of it."""
    job = {**STOPPED, "flush_at": 13, "copied_at": 13, "all_die_at": 13}
    with pytest.raises(AssertionError, match="ended with -9"):
        launch(TRAIN, 2, "fsdp", str(hosts), 20, job)
    found = launch(TRAIN, 3, "fsdp", str(hosts), 14, {"homes": ["north", "west", "west"]})
    assert [(report["step"], report["whole"], report["consistent"]) for report in found] == [
        (13, True, False)
    ] * 3


@pytest.mark.long
def test_a_survivor_brings_the_copy_of_a_lost_host_to_the_newest_step(hosts: Path, calm: Any) -> None:
    job = {**STOPPED, "copied_at": 11, "dies_at": 13}
    with pytest.raises(AssertionError, match="ended with -9"):
        launch(TRAIN, 2, "ddp", str(hosts), 20, job)
    end = str(hosts / "end.pt")
    found = launch(TRAIN, 2, "ddp", str(hosts), 17, {"homes": ELSEWHERE, "keep": end})
    assert [(report["step"], report["errors"]) for report in found] == [(13, 0)] * 2
    assert same(load(Path(end)), calm("ddp"))


@pytest.mark.long
def test_a_state_that_all_ranks_have_is_exact_if_the_lost_host_had_saved_this_step(hosts: Path) -> None:
    """What no other rank has of the dead rank, its random numbers, is in the copy."""
    job = {**STOPPED, "settings": {"peer_ack": "all"}, "wait_at": 13, "dies_at": 13}
    with pytest.raises(AssertionError, match="ended with -9"):
        launch(TRAIN, 2, "ddp", str(hosts), 20, job)
    found = launch(TRAIN, 2, "ddp", str(hosts), 17, {"homes": ELSEWHERE})
    assert [(report["step"], report["consistent"]) for report in found] == [(13, True)] * 2


@pytest.mark.long
def test_nothing_listens_unless_asked_for(hosts: Path) -> None:
    launch(TRAIN, 2, "fsdp", str(hosts), 6, {"homes": HOMES, "settings": {"peers": 0}})
    for home in HOMES:
        log = host_folder(str(hosts / home)) / "daemon.log"
        assert "listens at" not in log.read_text()
