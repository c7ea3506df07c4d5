"""Test the damage that names and sizes show: of files that the newest copies need, never of collected ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.store import Store
from scarctl.store import visible_damage as damage_module
from scarctl.store.shard_state import ShardState
from scarctl.store.visible_damage import visible_damage
from tests.cli.conftest import Model, Run
from tests.support.log_per_shard import store_with_a_log_per_shard


@pytest.fixture
def saved_in_logs(run: Run, model: Model) -> Model:
    """Return the model, saved at step 0 in a store whose four shards have a log each."""
    store_with_a_log_per_shard("ckpt", shards=4, partition_bytes=256).close()
    run("checkpoint", model.path, "--store", "ckpt", "--step", 0)
    return model


def look(place: str = "ckpt") -> dict[int, int]:
    """Return by shard the number of members whose newest copy is lost."""
    store = Store.open(place)
    return {
        shard: int(found.lost.sum())
        for shard, found in visible_damage(store, store.states(store.shards())).items()
    }


def segments(shard: int) -> list[Path]:
    return sorted(Path("ckpt/shards", str(shard), "seg").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_an_intact_store_has_none(saved: Model) -> None:
    assert look() == {}


def test_a_segment_that_is_missing_or_cut_short(run: Run, saved_in_logs: Model) -> None:
    for path in segments(1):
        path.unlink()
    for path in segments(2):
        path.write_bytes(path.read_bytes()[:-1])
    store = Store.open("ckpt")
    states = store.states(store.shards())
    assert look() == {shard: len(states[shard].ids) for shard in (1, 2)}
    lost = sum(len(states[shard].ids) for shard in (1, 2))
    fields = run("status", "ckpt", "--json", code=3).document["stores"][0]
    (finding,) = fields["findings"]
    assert (finding["severity"], finding["kind"]) == ("losing", "damaged")
    assert f"copies of {lost} partitions" in finding["message"]
    assert finding["command"] == "scarctl verify --store ckpt"
    assert fields["if_lost"]["process"]["partitions_without_copy"] == lost
    damage = run("inspect", "--store", "ckpt", "--json", code=3).document["damage"]
    assert {one["reason"].split(" ")[-1] for one in damage if "/shards/1/" in one["file"]} == {"missing"}
    reasons = [one["reason"] for one in damage if "/shards/2/" in one["file"]]
    sizes = {path.stat().st_size for path in segments(2)}
    assert reasons
    assert set(reasons) <= {f"it has {size} bytes, its record says {size + 1}" for size in sizes}
    assert run("inspect", "--store", "ckpt", code=3).stdout.count("damaged: ") == len(damage)
    assert run("verify", "--store", "ckpt", code=13).stdout.count("seg/") >= len(damage)


def test_what_a_newer_record_supersedes_is_no_damage(
    run: Run, saved: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states were read before a writer saved everything again and collected the files that they need."""
    store = Store.open("ckpt")
    old = store.states(store.shards())
    saved.train()
    run("checkpoint", saved.path, "--store", "ckpt", "--step", 1, "--policy", "full")
    run("prune", "--store", "ckpt", "--keep-last", 1, "--yes")
    for shard in store.shards():
        for path in segments(shard)[:-1]:
            path.unlink()
    assert visible_damage(store, old) == {}

    def unchanged(_: Store, shard: int) -> ShardState:
        return old[shard]

    monkeypatch.setattr(damage_module, "state_around", unchanged)
    assert set(visible_damage(store, old)) == set(store.shards()), "without a newer record they are damage"
