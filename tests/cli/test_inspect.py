"""`scarctl inspect`: the document, the listing, and what a terminal shows."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from scarctl.cli.inspect import Survey, survey
from scarctl.cli.screen import draw, heatmap
from scarctl.daemon.arena import Arena
from scarctl.daemon.folder import arena_folder
from scarctl.history import History
from scarctl.layout import TensorSpec, build_layout
from scarctl.prediction import Outlook, rework_of_loss
from scarctl.store import Store
from tests.cli.conftest import Model, Run

KEYS = {
    "schema_version",
    "command",
    "step",
    "saved_at",
    "saved_seconds_ago",
    "age_is_lower_bound",
    "total_partitions",
    "total_bytes",
    "shards",
    "partitions",
    "store",
    "run",
    "snapshots",
    "caveats",
    "convergence",
}
SHARD_KEYS = {
    "shard",
    "partitions",
    "bytes",
    "oldest_step",
    "newest_step",
    "never_saved",
    "perturbation",
    "share",
    "expected_perturbation",
    "rework",
}
PARTITION_KEYS = {"name", "group", "start", "stop", "shard", "bytes", "saved_step", "staleness", "distance"}
STORE_KEYS = {"bytes", "live_bytes", "segments", "records"}
RUN_KEYS = {"pid", "alive", "head_step", "pending_partitions", "lag_steps", "errors"}


def test_the_document(run: Run, saved: Model) -> None:
    saved.train("layers.5.w")
    run("checkpoint", saved.path, "--store", "ckpt", "--step", 6, "--fraction", "0.05")
    done = run("inspect", "--store", "ckpt", "--json").document
    assert set(done) == KEYS
    assert (done["command"], done["step"], done["run"]) == ("inspect", 6, None)
    assert set(done["store"]) == STORE_KEYS
    assert all(isinstance(value, int) for value in done["store"].values())
    assert done["store"]["live_bytes"] == done["total_bytes"]
    assert [line["shard"] for line in done["shards"]] == [0, 1, 2, 3]
    assert all(set(line) == SHARD_KEYS for line in done["shards"])
    assert sum(line["bytes"] for line in done["shards"]) == done["total_bytes"]
    assert len(done["partitions"]) == done["total_partitions"]
    assert all(set(line) == PARTITION_KEYS for line in done["partitions"])
    first = done["partitions"][0]
    assert (first["name"], first["group"], first["start"], first["stop"]) == ("emb[0:8]", "emb", 0, 8)
    assert (first["bytes"], first["distance"]) == (256, None)
    assert {line["staleness"] for line in done["partitions"]} == {0, 6}
    assert all(line["staleness"] == 6 - line["saved_step"] for line in done["partitions"])


@pytest.mark.parametrize(
    ("limit", "count"), [("0", 0), ("3", 3), ("all", None), ("ALL", None), ("99999", None)]
)
def test_the_limit(run: Run, saved: Model, limit: str, count: int | None) -> None:
    done = run("inspect", "--store", "ckpt", "--json", "--limit", limit).document
    assert len(done["partitions"]) == (done["total_partitions"] if count is None else count)


def test_an_empty_store(run: Run) -> None:
    Store.create("ckpt")
    done = run("inspect", "--store", "ckpt", "--json").document
    assert set(done) == KEYS
    assert (done["step"], done["shards"], done["partitions"]) == (None, [], [])
    assert "nothing is saved" in run("inspect", "--store", "ckpt").stdout


def test_a_listing_off_a_terminal(run: Run, saved: Model) -> None:
    text = run("inspect", "--store", "ckpt").stdout
    assert text.isascii()
    assert "\x1b" not in text
    for word in ("shards", "stalest", "emb[0:8]", "losing it changes"):
        assert word in text


@pytest.mark.leaves_arena
def test_what_the_run_on_this_host_knows(run: Run, saved: Model, arena_dir: Path) -> None:
    store = Store.open("ckpt")
    layout = store.current_layout()
    assert layout is not None
    arena = Arena.create(arena_folder(str(arena_dir), store.run_id), layout, run_id=store.run_id, epoch=1)
    arena.begin_lines(store.lines())
    arena.head_step, arena.errors = 40, 2
    arena.distance[:] = 0.5
    arena.distance[3] = float("nan")
    # The run is alive: it has the lock.
    done = run("inspect", "--store", "ckpt", "--json").document
    assert set(done["run"]) == RUN_KEYS
    assert done["run"]["alive"]
    assert (done["run"]["errors"], done["step"]) == (2, 40)
    assert done["partitions"][0]["staleness"] == 40
    assert done["partitions"][0]["distance"] == 0.5
    assert done["partitions"][3]["distance"] is None
    kinds = {line["shard"]: line["perturbation"] for line in done["shards"]}
    unknown = int(layout.shards(4, 0)[3])
    assert kinds.pop(unknown) == {"value": None, "kind": "unknown"}
    for shard, perturbation in kinds.items():
        count = int((layout.shards(4, 0) == shard).sum())
        assert perturbation == {"value": pytest.approx(0.5 * np.sqrt(count)), "kind": "estimated"}
    text = run("inspect", "--store", "ckpt").stdout
    assert "most changed" in text
    assert "2 errors" in text
    arena.close()
    (arena.folder / "arena").write_bytes(b"garbage")
    spoiled = run("inspect", "--store", "ckpt", "--json")
    assert spoiled.document["run"] is None
    assert "warning" in spoiled.stderr


def screen(store: str, **options: object) -> str:
    out = io.StringIO()
    draw(survey(Store.open(store), None), Console(file=out, width=60, **options))  # type: ignore[arg-type]
    return out.getvalue()


@pytest.mark.leaves_arena
def test_a_terminal_shows_a_heatmap_and_tables(run: Run, saved: Model) -> None:
    saved.train("layers.5.w")
    run("checkpoint", saved.path, "--store", "ckpt", "--step", 6, "--fraction", "0.05")
    text = screen("ckpt", force_terminal=True, color_system="standard")
    assert "\x1b[" in text
    plain = screen("ckpt")
    assert "\x1b" not in plain
    assert "staleness, 1 partition per cell: " in plain
    assert "█" in plain
    assert "stalest" in plain
    Store.create("empty")
    assert "nothing is saved" in screen("empty")


def test_a_heatmap_of_many_partitions_fits_the_screen() -> None:
    staleness = np.arange(100_000)
    staleness[5] = -1
    lines = heatmap(staleness, 50)
    assert all(len(line.plain) <= 50 for line in lines[:-1])
    assert len(lines) <= 13
    cells = "".join(line.plain for line in lines[:-1])
    assert cells[0] == "!"
    assert cells[1] == "·"
    assert cells[-1] == "█"
    assert "never saved" in lines[-1].plain
    assert heatmap(np.zeros(3, dtype=np.int64), 50)[0].plain == "···"
    assert heatmap(np.full(3, -1), 50)[0].plain == "!!!"
    assert heatmap(np.array([0, 1, 1 << 40]), 50)[0].plain == "··█"


@pytest.mark.parametrize("known", [True, False], ids=["distances known", "ages only"])
def test_every_line_is_what_counting_gives(known: bool) -> None:
    rng, step, since = np.random.default_rng(0), 100, 3
    layout = build_layout(
        [
            (f"g{n}", kind, (TensorSpec("", "F32", (n + 3, 2)),))
            for n, kind in enumerate(["parameter", "buffer"] * 8)
        ],
        rows={"*": 2},
    )
    count = layout.partitions
    # A damaged store may name any shard: nothing is as long as the highest number.
    shard_of = rng.choice(np.array([0, 3, 70_000, 2**31 - 1], np.int32), count)
    saved = rng.integers(-1, step, count)
    distance = np.where(known, rng.integers(0, 5, count) / 4, np.nan)
    outlook = Outlook.of(step, [History((k, 5, 0.97**k) for k in range(0, 100, 5))])
    view = Survey(
        "s",
        step,
        layout,
        shard_of,
        saved,
        distance,
        {},
        [],
        None,
        outlook=outlook,
        comparable=True,
        since=since,
    )
    parameter = np.array([layout.groups[g].kind == "parameter" for g in layout.group_of(np.arange(count))])
    assert [line["shard"] for line in view.shards] == np.unique(shard_of).tolist()
    for line in view.shards:
        mine = shard_of == line["shard"]
        lost = mine & parameter
        ages = np.where(saved < 0, 0, step - saved)[lost]
        assert line["partitions"] == mine.sum()
        assert line["bytes"] == layout.partition_bytes[mine].sum()
        assert line["never_saved"] == (saved[mine] < 0).sum()
        assert (line["oldest_step"], line["newest_step"]) == (
            saved[mine & (saved >= 0)].min(),
            saved[mine].max(),
        )
        assert line["share"] == lost.sum() / parameter.sum()
        norm = float(np.linalg.norm(distance[lost])) if known else None
        told = rework_of_loss(outlook, norm, ages, line["share"], since=since)
        assert told.iterations is not None
        assert line["rework"]["basis"] == told.basis
        assert line["rework"]["iterations"] == pytest.approx(told.iterations)
        assert (line["rework"]["low"], line["rework"]["high"]) == pytest.approx((told.low, told.high))
    names = [line["name"] for line in view.partitions(np.arange(count))]
    for few in (0, 3, count, count + 5):
        stalest = [names[i] for i in np.argsort(saved, kind="stable")[:few]]
        assert [line["name"] for line in view.stalest(few)] == stalest
        changed = [i for i in np.argsort(-distance, kind="stable") if distance[i] > 0]
        assert [line["name"] for line in view.most_changed(few)] == [names[i] for i in changed[:few]]


@pytest.mark.parametrize("spoiled", ["scarctl.json", "layout", "log"])
def test_damage_is_an_error_that_names_the_file(run: Run, saved: Model, tmp_path: Path, spoiled: str) -> None:
    path = {
        "scarctl.json": tmp_path / "ckpt" / "scarctl.json",
        "layout": next((tmp_path / "ckpt" / "layout").iterdir()),
        "log": sorted((tmp_path / "ckpt" / "shards" / "1" / "log").iterdir())[-1],
    }[spoiled]
    path.write_bytes(path.read_bytes().replace(b":", b";", 1))
    assert path.name in run("inspect", "--store", "ckpt", "--json", code=13).error["message"]
