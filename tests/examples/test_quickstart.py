"""Test that the demo loses a host, and that what it prints is what its runs did."""

from __future__ import annotations

import gzip
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("usual_saver")

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the module, with the training that it imports as `train`."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("train", "demo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("demo")
    yield module
    for name in ("train", "demo"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_is_lost_and_every_run_goes_on_as_it_says(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "demo.svg"
    command = [sys.executable, str(FOLDER / "demo.py"), "--quick", "--picture", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^([#o.]) .+? +([\d.]+) +([\d.]+) +(\d+)  (.+)$", done.stdout, re.MULTILINE)
    went_on = {mark: int(step) for mark, _, _, step, _ in rows}
    # It is killed after 50 iterations; the newest of the full checkpoints, one every 20, is of iteration 40.
    assert went_on["o"] == 40
    assert went_on["#"] >= 50
    assert went_on["."] > 45, "memory is a moment old"
    sources = dict(
        re.findall(r"^([#o.]) host 2 got back \d+ partitions from (\w+):", done.stdout, re.MULTILINE)
    )
    assert sources == {"#": "store", "o": "store", ".": "memory"}
    assert f"The picture: {picture}." in done.stdout
    assert picture.read_text().count("<polyline") == 3


def events(losses: dict[int, float], attempt: int, at: float) -> list[dict[str, Any]]:
    return [
        {"at": at + step / 10, "attempt": attempt, "rank": 0, "step": step, "loss": loss}
        for step, loss in losses.items()
    ]


def run(demo: Any, mark: str, resumed: int, after: dict[int, float]) -> Any:
    made = demo.Run("a run", mark, "red", memory_lost=True, options={})
    shard = {"tiers": {"store": 3}, "oldest_step": 10, "newest_step": 15}
    start = {"at": 9.0, "attempt": 1, "rank": demo.LOST, "step": resumed, "loss": None, "shards": [shard]}
    made.events = [*events({10: 3.0, 20: 2.0}, 0, 5.0), start, *events(after, 1, 9.0)]
    return made


def test_costs_count_iterations_until_the_loss_is_back(demo: Any) -> None:
    better, worse = run(demo, "#", 20, {25: 2.5, 30: 1.9}), run(demo, "o", 10, {15: 2.8, 20: 2.1})
    _, first, second, *sources = demo.costs([better, worse]).splitlines()
    # An iteration took 1/20 of the second until the last loss before the kill.
    assert first.split()[3:] == ["2.000", "2.500", "20", "10", "iterations", "(0.5", "s)"]
    assert second.endswith("10  more than this run has")
    assert sources == [f"{mark} host 2 got back 3 partitions from store: 0.2 to 0.5 s old" for mark in "#o"]


def test_movielens_is_read_and_words_are_everywhere(demo: Any, tmp_path: Path) -> None:
    words = demo.train.load(tmp_path)
    assert "Python's library" in str(words)
    (tmp_path / "movielens-small").mkdir()
    ratings = "userId,movieId,rating,timestamp\r\n7,31,2.5,1\r\n7,10,3.0,2\r\n9,10,1.0,3\r\n"
    (tmp_path / "movielens-small" / "ratings.csv.gz").write_bytes(gzip.compress(ratings.encode()))
    found = demo.train.load(tmp_path)
    # The most frequent name is the first one of its side: user 7, movie 10.
    assert (found.left.tolist(), found.right.tolist(), found.names) == ([0, 0, 1], [3, 2, 2], 4)
    for pairs in (words, found):
        assert pairs.left.max() < pairs.right.min()
        batch = demo.train.draw(pairs, np.random.default_rng(0), 8)
        assert batch.shape == (16 + demo.train.WRONG,)
        assert float(demo.train.Model(pairs.names)(batch).detach()) > 0
