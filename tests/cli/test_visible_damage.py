"""Test the damage that names and sizes show: of files that the newest copies need, never of collected ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.store import Store
from scarctl.store.shard_state import ShardState
from scarctl.store.visible_damage import visible_damage
from tests.cli.conftest import Model, Run


def look(place: str = "ckpt") -> dict[int, int]:
    """Return by shard the number of members whose newest copy is lost."""
    store = Store.open(place)
    return {
        shard: int(found.lost.sum())
        for shard, found in visible_damage(store, store.states(store.shards())).items()
    }


def segments(shard: int = 0) -> list[Path]:
    return sorted(Path("ckpt/lanes", str(shard), "seg").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_an_intact_store_has_none(saved: Model) -> None:
    assert look() == {}


@pytest.mark.parametrize("cut", [False, True])
def test_a_segment_that_is_missing_or_cut_short(run: Run, saved: Model, cut: bool) -> None:
    saved.train("emb")
    run("checkpoint", saved.path, "--store", "ckpt", "--step", 1)
    state = Store.open("ckpt").state(0)
    older = state.version < state.version.max()
    assert 0 < older.sum() < len(older), "the newest record has a part of the copies"
    names = {state.segments[k].name for k in set(state.segment[older].tolist())}
    for path in segments():
        if path.name not in names:
            continue
        if cut:
            path.write_bytes(path.read_bytes()[:-1])
        else:
            path.unlink()
    lost = int(older.sum())
    assert look() == {0: lost}
    fields = run("status", "ckpt", "--json", code=3).document["stores"][0]
    (finding,) = fields["findings"]
    assert (finding["severity"], finding["kind"]) == ("losing", "damaged")
    assert f"copies of {lost} partitions" in finding["message"]
    assert finding["command"] == "scarctl verify --store ckpt"
    assert fields["if_lost"]["process"]["partitions_without_copy"] == lost
    damage = run("inspect", "--store", "ckpt", "--json", code=3).document["damage"]
    reasons = {one["reason"] for one in damage}
    if cut:
        sizes = {path.stat().st_size for path in segments()}
        assert reasons <= {f"it has {size} bytes, its record says {size + 1}" for size in sizes}
    else:
        assert {reason.split(" ")[-1] for reason in reasons} == {"missing"}
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
    needed = {segment.name for segment in Store.open("ckpt").state(0).segments}
    for path in segments():
        if path.name not in needed:
            path.unlink()
    assert visible_damage(store, old) == {}

    def unchanged(_: Store, shard: int, *, around: bool) -> ShardState:
        return old[shard]

    monkeypatch.setattr(Store, "state", unchanged)
    assert set(visible_damage(store, old)) == set(store.shards()), "without a newer record they are damage"
