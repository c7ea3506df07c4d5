"""Test random episodes of replicas: a few hold, and defects put in on purpose are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.slot import Slot
from scarctl.peers import replica as replicas
from scarctl.peers.frames import Kind
from tests.adversarial import episodes
from tests.adversarial.episodes import Violation

pytestmark = pytest.mark.leaves_arena
FEW, MANY = 40, 400


def play(folder: Path, count: int) -> dict[str, int]:
    total: dict[str, int] = {}
    for seed in range(count):
        for name, times in episodes.run(folder / str(seed), seed).items():
            total[name] = total.get(name, 0) + times
    return total


def test_nothing_is_torn_abandoned_or_lost(tmp_path: Path) -> None:
    total = play(tmp_path, FEW)
    wanted = {
        "cut in a round",
        "peer killed in a batch",
        "hosts lost",
        "starts elsewhere",
        "flushed to a peer",
    }
    assert wanted <= total.keys()


def torn_copies_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slot, "begin", lambda *_: None)


def without_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "require_newest", lambda *_: None)


def early_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the follower send its mark before the rows."""
    original = episodes.Follower.round
    late = (Kind.BATCH, Kind.FIELDS)

    def rows_last(self: Any) -> Any:
        frames = [[bytes(memoryview(part)) for part in frame] for frame in original(self)]
        yield from sorted(frames, key=lambda frame: frame[0][0] in late)

    monkeypatch.setattr(episodes.Follower, "round", rows_last)


DEFECTS = [torn_copies_count, without_fences, early_marks]


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_shows(defect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    with pytest.raises(Violation):
        play(tmp_path, MANY)
