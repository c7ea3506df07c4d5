"""Test a damaged record in the one log of a store: each command reports it, and restores what is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scarctl.errors import Corruption
from scarctl.store import Store
from tests.cli.conftest import ROLLBACK, Model, Run
from tests.support.logs import records
from tests.support.ranks import RankStore
from tests.support.training import Loop


@pytest.fixture
def damaged(run: Run, saved: Model) -> tuple[Path, dict[str, torch.Tensor]]:
    """Damage the newest record. Return it, and the values before it, of step 0."""
    before = dict(saved.tensors)
    saved.train()
    run("checkpoint", saved.path, "--store", "ckpt", "--step", 1, "--policy", "full")
    store = Store.open("ckpt")
    assert store.shards() == [0], "one log"
    newest = records(store.root)[-1]
    newest.write_bytes(newest.read_bytes().replace(b'"kind":"full"', b'"kind":"fvll"'))
    return newest, before


def same(path: str, wanted: dict[str, torch.Tensor]) -> bool:
    found = load_file(path)
    return all(torch.equal(found[name].reshape(value.shape), value) for name, value in wanted.items())


def test_what_is_left_is_restored_and_not_called_exact(
    run: Run, damaged: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    newest, before = damaged
    words = ("recover", "--store", "ckpt", "--lost", "all", "--output")
    plan = run(*words, "a.safetensors", "--dry-run", "--json", code=3)
    assert (plan.document["consistent"], plan.document["degraded"]) == (False, True)
    assert any(newest.name in problem for problem in plan.document["problems"])
    done = run(*words, "a.safetensors", code=3)
    assert newest.name in done.stderr
    assert ", consistent" not in done.stdout
    assert same("a.safetensors", before)
    back = run(*words, "b.pt", "--mode", "rollback", "--json", code=3)
    assert (back.document["step"], back.document["degraded"]) == (0, True)
    assert any(newest.name in problem for problem in back.document["problems"])
    out = run("export", "--store", "ckpt", "c.safetensors", "--json", code=3).document
    assert (out["consistent"], out["degraded"]) == (False, True)
    assert same("c.safetensors", before)


def test_it_is_said_everywhere(run: Run, damaged: tuple[Path, dict[str, torch.Tensor]]) -> None:
    newest, _ = damaged
    view = run("inspect", "--store", "ckpt", "--json", code=3).document
    assert view["damage"] == [{"file": str(newest), "reason": view["damage"][0]["reason"]}]
    assert run("inspect", "--store", "ckpt", code=3).stdout.count(str(newest)) == 1
    assert run("status", "ckpt", code=3).stdout.count("unknown: damage hides how far the run was") == 2
    (health,) = run("status", "ckpt", "--json", code=3).document["stores"]
    assert health["if_lost"]["process"]["steps"] is None
    (finding,) = health["findings"]
    assert (finding["severity"], finding["kind"]) == ("losing", "damaged")
    assert finding["message"].startswith("damaged: a part of the store's log")
    assert newest.name in finding["message"]
    done = run("verify", "--store", "ckpt", code=13)
    assert str(newest) in done.stdout
    assert "nothing more can be saved here" in done.stderr
    assert "`scarctl recover --lost all --output FILE` saves what other records name" in done.stderr


def test_nothing_is_saved_over_it(
    run: Run, damaged: tuple[Path, dict[str, torch.Tensor]], saved: Model
) -> None:
    newest, _ = damaged
    error = run("checkpoint", saved.path, "--store", "ckpt", "--step", 2, "--json", code=13).error
    assert newest.name in error["message"]
    assert error["hint"].startswith("put this file back from a copy of this store")
    error = run(*ROLLBACK, "--into", saved.path, "--json", code=13).error
    assert newest.name in error["message"]


def test_memory_that_cannot_be_told_from_anothers_is_not_used(run: Run, arena_dir: Path) -> None:
    loop = Loop("ckpt", arena_dir=arena_dir, daemon=False, shards=4)
    loop.train(6, settle=True)
    newest = records("ckpt")[-1]
    intact = newest.read_bytes()
    newest.write_bytes(intact[:-1])
    seen = run("inspect", "--store", "ckpt", "--arena-dir", arena_dir, code=3)
    assert "it is not known whether this host's memory belongs to the store" in seen.stderr
    done = run("export", "--store", "ckpt", "out.safetensors", code=3)
    assert newest.name in done.stderr
    loop.session.close(seal=False)
    newest.write_bytes(intact[:-1])
    with pytest.raises(Corruption, match=newest.name) as caught:
        Loop("ckpt", arena_dir=arena_dir, daemon=False, shards=4)
    assert "put this file back" in (caught.value.hint or "")
    newest.write_bytes(intact)
    again = Loop("ckpt", arena_dir=arena_dir, daemon=False, shards=4)
    assert again.session.resume().report is not None
    again.session.close(seal=False)


def test_older_ranks_are_not_called_the_newest_state(run: Run, ranks: RankStore) -> None:
    """The first whole state of other ranks is damaged: whether it was whole is unknown."""
    made = RankStore(ranks.path, 2)
    made.save(9)
    made.close()
    assert run("export", "--store", "ckpt", "0.pt", "--json").document["step"] == 9
    newest = records("ckpt", 5)[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    done = run("export", "--store", "ckpt", "a.pt", "--json", code=3)
    assert (done.document["consistent"], done.document["degraded"]) == (False, True)
    assert newest.name in done.stderr
    words = ("recover", "--store", "ckpt", "--lost", "all", "--json")
    for number, mode in enumerate(("partial", "rollback")):
        found = run(*words, "--mode", mode, "--output", f"{number}.safetensors", code=3).document
        assert found["degraded"]
        assert any(newest.name in problem for problem in found["problems"])
    view = run("inspect", "--store", "ckpt", "--json", code=3).document
    assert [Path(one["file"]).name for one in view["damage"]] == [newest.name]
