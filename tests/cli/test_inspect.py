"""Test `scarctl inspect`: the document, the listing, and its tables on terminals of several widths."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from scarctl.cli.inspect_view import plain
from scarctl.ops.survey import survey
from scarctl.store import Store
from tests.cli.conftest import Model, Run
from tests.support.ranks import RankStore, arena_of, current_layout


def test_the_document(run: Run, saved: Model) -> None:
    saved.train("layers.5.w")
    run("checkpoint", saved.path, "--store", "ckpt", "--step", 6, "--fraction", "0.05")
    done = run("inspect", "--store", "ckpt", "--json").document
    assert not done.keys() & {"topology", "ranks", "other_shards"}, "one process has saved"
    assert (done["command"], done["step"], done["run"]) == ("inspect", 6, None)
    assert all(isinstance(value, int) for value in done["store"].values())
    assert done["store"]["live_bytes"] == done["total_bytes"]
    assert [line["shard"] for line in done["shards"]] == [0, 1, 2, 3]
    assert sum(line["bytes"] for line in done["shards"]) == done["total_bytes"]
    assert len(done["partitions"]) == done["total_partitions"]
    first = done["partitions"][0]
    assert (first["name"], first["group"], first["start"], first["stop"]) == ("emb[0:8]", "emb", 0, 8)
    assert (first["bytes"], first["distance"]) == (256, None)
    assert {line["staleness"] for line in done["partitions"]} == {0, 6}
    assert all(line["staleness"] == 6 - line["saved_step"] for line in done["partitions"])


def test_a_listing_off_a_terminal(run: Run, saved: Model) -> None:
    text = run("inspect", "--store", "ckpt").stdout
    assert text.isascii()
    assert "\x1b" not in text
    for word in ("shards", "stalest", "emb[0:8]", "change if lost"):
        assert word in text


@pytest.mark.leaves_arena
def test_what_the_run_on_this_host_knows(run: Run, saved: Model, arena_dir: Path) -> None:
    store = Store.open("ckpt")
    layout, arena = current_layout(store), arena_of(store, arena_dir)
    arena.reach(40)
    arena.note_errors(2)
    arena.count_failed_save()
    arena.distance[:] = 0.5
    arena.distance[3] = float("nan")
    # The run is alive: it has the lock.
    done = run("inspect", "--store", "ckpt", "--json").document
    assert done["run"]["alive"]
    assert (done["run"]["errors"], done["run"]["failed_saves"], done["step"]) == (2, 1, 40)
    assert done["partitions"][0]["staleness"] == 40
    assert done["partitions"][0]["distance"] == 0.5
    assert done["partitions"][3]["distance"] is None
    kinds = {line["shard"]: line["perturbation"] for line in done["shards"]}
    unknown = int(layout.shards(4, 0)[3])
    assert kinds.pop(unknown) == {"value": None, "kind": "unknown"}
    for shard, perturbation in kinds.items():
        count = int((layout.shards(4, 0) == shard).sum())
        assert perturbation == {"value": pytest.approx(0.5 * np.sqrt(count)), "kind": "estimated"}
    stalest = done["stalest_layers"]
    assert [layer["oldest_changed"] for layer in stalest] == [40] * len(stalest)
    assert sum(layer["partitions"] for layer in stalest) == done["total_partitions"]
    text = run("inspect", "--store", "ckpt").stdout
    assert "most changed" in text
    assert "stalest parameters" in text
    assert "3 errors" in text
    arena.close()
    (arena.folder / "arena").write_bytes(b"garbage")
    spoiled = run("inspect", "--store", "ckpt", "--json")
    assert spoiled.document["run"] is None
    assert "warning" in spoiled.stderr


def test_a_narrow_terminal_leaves_columns_out_instead_of_breaking_numbers(tmp_path: Path) -> None:
    made = RankStore(tmp_path / "ckpt", 2)
    made.save(3)
    made.close()
    lines = [line.rstrip() for line in plain(survey(made.store, None), 80).splitlines()]
    (title,) = (line for line in lines if line.startswith("ranks ("))
    assert title == "ranks (a wider terminal shows: bytes, head, durable, partitions)"
    at = lines.index(title)
    assert re.split(r" {2,}", lines[at + 1])[-2:] == ["change if lost", "rework"]
    assert "not on this host" in lines[at + 2]
    assert "not on this host" in lines[at + 3]
