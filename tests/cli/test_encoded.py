"""Test commands on a store with encoded copies: no result is wrongly called consistent, and a whole state is."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scarctl.arena.arena import Arena
from scarctl.ops import live
from scarctl.state.version import NEVER
from scarctl.store import Store, open_writer
from scarctl.store.encoder import Encoder
from tests.cli.conftest import Model, Run
from tests.support.ranks import current_layout
from tests.support.training import Loop


def encoded_in(folder: Path) -> int:
    store = Store.open(folder)
    return sum(int(store.state(shard).encoded.sum()) for shard in store.shards())


@pytest.fixture
def lossy(tmp_path: Path, arena_dir: Path) -> Path:
    """Return a store with copies of step 20, those of parameters in int8, and an earlier sealed state of step 9."""
    run = Loop(
        tmp_path / "s", arena_dir=arena_dir, daemon=False, encoding="int8", fraction=1.0, partition_bytes=256
    )
    run.train(9, settle=True)
    run.session.checkpoint(full=True, wait=True)
    run.train(11, settle=True)
    copy = shutil.copytree(tmp_path / "s", tmp_path / "lossy")
    run.session.close()
    assert encoded_in(copy) > 10
    return copy


def test_export_and_diff_read_decoded_values_and_call_them_not_exact(
    run: Run, lossy: Path, tmp_path: Path
) -> None:
    before, out = encoded_in(lossy), tmp_path / "out.safetensors"
    done = run("export", "--store", lossy, out, "--json").document
    assert (done["consistent"], done["oldest_step"], done["newest_step"]) == (False, 20, 20)
    assert done["encoded_partitions"] == before
    text = run("export", "--store", lossy, tmp_path / "again.safetensors").stdout
    assert text.endswith(
        f"step 20, mixed: {before} partitions come from encoded copies, which have fewer bits\n"
    )
    assert run("diff", lossy, out, "--json").document["equal"]
    plan = run(
        "recover",
        "--store",
        lossy,
        "--lost",
        "all",
        "--output",
        tmp_path / "p.safetensors",
        "--dry-run",
        "--json",
    ).document
    assert (plan["consistent"], plan["encoded_partitions"]) == (False, before)
    back = tmp_path / "back.safetensors"
    words = ("recover", "--store", lossy, "--lost", "all", "--mode", "rollback", "--output", back, "--json")
    sealed = run(*words).document
    assert (sealed["consistent"], sealed["step"], sealed["encoded_partitions"]) == (True, 9, 0)
    assert not run("diff", out, back, "--json", code=4).document["equal"]
    # The report of `scarctl live checkpoint` if the session ends meanwhile, without a seal.
    made = live._closed(Store.open(lossy), NEVER, 1)
    assert made is not None
    assert set(made.durable.tolist()) == {made.version}
    assert made.consistent is False


@pytest.mark.parametrize("same", [True, False])
def test_a_state_file_is_sealed_exactly(run: Run, saved: Model, tmp_path: Path, same: bool) -> None:
    """`same`: the file has the decoded values, so that no partition has changed."""
    state, out = tmp_path / "new.safetensors", tmp_path / "out.safetensors"
    store = Store.open("ckpt")
    layout = current_layout(store)
    arena = Arena.anonymous(layout)
    for g, group in enumerate(layout.groups):
        arena.rows(g, 0)[:] = saved.tensors[group.name].reshape(group.rows, -1).numpy().view(np.uint8)
    with open_writer(store, layout=layout) as writer:
        ids = np.arange(layout.partitions)
        writer.commit(ids, Encoder(layout, "int8", arena.slot.source, ids), step=20)
    before = encoded_in(Path("ckpt"))
    assert before > 2
    run("export", "--store", "ckpt", state)
    tensors = load_file(state)
    if not same:
        tensors["emb"] = tensors["emb"] + 1
        save_file(tensors, state)
    words = ("checkpoint", state, "--store", "ckpt", "--json")
    part = run(*words, "--step", 21, "--fraction", "0.01").document
    assert part["consistent"] is False
    assert encoded_in(Path("ckpt"))
    done = run(*words, "--step", 22, "--policy", "full").document
    assert done["consistent"] is True
    assert encoded_in(Path("ckpt")) == 0
    assert run("export", "--store", "ckpt", out, "--json").document["consistent"] is True
    found = load_file(out)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
