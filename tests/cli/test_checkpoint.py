"""Test `scarctl checkpoint`: what it saves, what it refuses, and that the store stays intact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from scarctl.store import Store
from tests.cli.conftest import Done, Model, Run, assert_sound
from tests.daemon.rig import acknowledge
from tests.support.ranks import arena_of, current_layout
from tests.support.stored import stored_steps


def checkpoint(run: Run, path: Path | str, step: int, *arguments: object, code: int = 0) -> Done:
    return run("checkpoint", path, "--store", "ckpt", "--step", step, "--json", *arguments, code=code)


def saved_steps() -> list[int]:
    return list(stored_steps(Path("ckpt")))


def test_the_first_call_creates_the_store_and_saves_everything(run: Run, model: Model) -> None:
    done = checkpoint(run, model.path, 5, "--shards", 3).document
    assert done["command"] == "checkpoint"
    assert done["step"] == 5
    assert done["saved_partitions"] == done["total_partitions"] > 0
    assert done["saved_bytes"] == done["total_bytes"] == sum(t.numel() * 4 for t in model.tensors.values())
    assert set(done["seq"]) == {"0"}
    assert all(isinstance(seq, int) for seq in done["seq"].values())
    assert (done["durable"], done["consistent"], done["dry_run"]) == (True, True, False)
    assert assert_sound().settings.shards == 3


def test_later_calls_save_what_changed_most_within_the_budget(run: Run, saved: Model) -> None:
    saved.train(by=0.01)
    saved.train("layers.3.w", by=5.0)
    done = checkpoint(run, saved.path, 7, "--fraction", "1/8").document
    assert 0 < done["saved_bytes"] <= done["total_bytes"] / 8
    layout = current_layout(Store.open("ckpt"))
    steps = np.array(saved_steps())
    newest = np.flatnonzero(steps == 7)
    assert len(newest) == done["saved_partitions"]
    assert set(newest.tolist()) <= set(layout.match("layers.3.w").tolist())
    assert not done["consistent"]
    assert done["reasons"] == ["the store does not have the whole state of this step"]
    assert_sound()


def test_unused_budget_and_the_round_are_carried_over(run: Run, saved: Model) -> None:
    saved.train("layers.0.w")
    first = checkpoint(run, saved.path, 1, "--fraction", 0.5).document
    assert first["saved_bytes"] < first["total_bytes"] / 2
    assert first["credit"] > 0
    for step in range(2, 8):
        saved.train()
        checkpoint(run, saved.path, step, "--fraction", "1/4", "--policy", "round")
    assert min(saved_steps()) >= 3
    assert_sound()


def test_nothing_changed_is_sealed_without_data(run: Run, saved: Model) -> None:
    done = checkpoint(run, saved.path, 9).document
    assert (done["saved_partitions"], done["saved_bytes"], done["consistent"]) == (0, 0, True)
    assert set(saved_steps()) == {9}
    assert_sound()


def test_a_dry_run_writes_nothing(run: Run, model: Model, tmp_path: Path) -> None:
    done = checkpoint(run, model.path, 0, "--dry-run").document
    assert (done["durable"], done["dry_run"], done["seq"]) == (False, True, {})
    assert not (tmp_path / "ckpt").exists()
    checkpoint(run, model.path, 0)
    before = sorted(tmp_path.rglob("*"))
    model.train()
    assert checkpoint(run, model.path, 1, "--dry-run", "--policy", "full").document["saved_partitions"] > 0
    assert sorted(tmp_path.rglob("*")) == before


class TestNotFinite:
    def test_the_last_good_copy_is_kept(self, run: Run, saved: Model) -> None:
        good = saved.tensors["layers.2.w"]
        bad = good.clone() + 1
        bad[3, 3] = float("nan")
        saved.save(**{"layers.2.w": bad})
        done = checkpoint(run, saved.path, 4, "--policy", "full", code=3)
        assert done.document["nonfinite_partitions"] == done.document["left_out_partitions"] == 1
        assert not done.document["consistent"]
        assert "layers.2.w[0:8]" in done.stderr
        run("recover", "--store", "ckpt", "--lost", "layers.2.w", "--output", "out.pt")
        restored = torch.load("out.pt", weights_only=True)["layers.2.w"]
        assert torch.equal(restored[:8], good[:8])
        assert torch.equal(restored[8:], bad[8:])
        assert_sound()

    def test_infinities_that_stay_are_no_change(self, run: Run, model: Model) -> None:
        mask = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
        model.save(mask=mask)
        done = checkpoint(run, model.path, 0)
        assert done.document["nonfinite_partitions"] == 1
        assert "not finite" in done.stderr
        model.train("emb")
        assert checkpoint(run, model.path, 1).document["nonfinite_partitions"] == 0
        run("recover", "--store", "ckpt", "--lost", "mask", "--output", "out.pt")
        assert torch.equal(torch.load("out.pt", weights_only=True)["mask"], mask)


def test_what_is_refused_changes_nothing(run: Run, saved: Model) -> None:
    checkpoint(run, saved.path, 30)
    steps = saved_steps()
    error = checkpoint(run, saved.path, 29, code=2).error
    assert (error["kind"], bool(error["hint"])) == ("step-goes-back", True)
    checkpoint(run, saved.path, 30)
    saved.save(emb=torch.zeros(41, 8, dtype=torch.float16), more=torch.zeros(3))
    error = checkpoint(run, saved.path, 40, code=2).error
    assert (error["kind"], bool(error["hint"])) == ("layout-mismatch", True)
    assert all(part in error["message"] for part in ("(40, 8) -> (41, 8)", "F32 -> F16", "'more'"))
    assert saved_steps() == steps


def test_a_damaged_copy_is_saved_again(run: Run, saved: Model, tmp_path: Path) -> None:
    (segment,) = [p for p in (tmp_path / "ckpt/lanes/0/seg").iterdir() if p.stat().st_size > 1500]
    data = bytearray(segment.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    segment.write_bytes(data)
    done = checkpoint(run, saved.path, 1)
    assert done.document["saved_partitions"] == 1
    assert "checksum" in done.stderr
    recovered = run("recover", "--store", "ckpt", "--lost", "all", "--output", "out.pt", "--json").document
    assert not recovered["degraded"]


@pytest.mark.leaves_arena
def test_the_memory_of_a_stopped_run_is_compared_with(run: Run, saved: Model, arena_dir: Path) -> None:
    store = Store.open("ckpt")
    layout, arena = current_layout(store), arena_of(store, arena_dir)
    (version,) = {int(one) for shard in store.shards() for one in store.state(shard).version}
    everything = np.arange(layout.partitions)
    for g, group in enumerate(layout.groups):
        arena.rows(g, 0)[:] = saved.tensors[group.name].reshape(group.rows, -1).numpy().view(np.uint8)
    arena.slot.end(everything, version, 1)
    acknowledge(arena, everything)
    # It differs from the store, which shows that memory is compared.
    arena.rows(0, 0)[0] ^= 1
    arena.close()
    done = checkpoint(run, saved.path, 2).document
    assert done["saved_partitions"] == 1
