"""Test `scarctl snapshot`: names in the list, snapshots of a state file, and deleting several at once."""

from __future__ import annotations

import pytest
import torch

from scarctl.store import Store, sealed_sets
from tests.cli.conftest import Model, Run, assert_sound


def create(run: Run, model: Model, name: str, step: int) -> None:
    run("snapshot", "create", name, model.path, "--store", "ckpt", "--step", step)


def test_snapshots_of_a_state_file_are_listed_and_deleted(run: Run, model: Model) -> None:
    first = run(
        "snapshot", "create", "b", model.path, "--store", "ckpt", "--step", 1, "--shards", 2, "--json"
    ).document
    assert (first["snapshot"], first["consistent"], first["policy"]) == ("b", True, "full")
    model.train()
    create(run, model, "a", 2)
    assert run("snapshot", "list", "--store", "ckpt").stdout == "b: step 1\na: step 2\n"
    listed = run("snapshot", "list", "--store", "ckpt", "--json").document["snapshots"]
    assert [(one["name"], one["step"]) for one in listed] == [("b", 1), ("a", 2)]
    done = run("snapshot", "delete", "a", "b", "--store", "ckpt", "--yes", "--json").document
    assert [one["name"] for one in done["deleted_snapshots"]] == ["a", "b"]
    assert run("snapshot", "list", "--store", "ckpt").stdout == "no snapshots\n"
    assert_sound()


def test_deleting_asks_and_keeps_what_is_configured(
    run: Run, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        run("checkpoint", model.path, "--store", "ckpt", "--step", step, "--policy", "full")
        model.train()
    create(run, model, "a", 4)
    words = ("snapshot", "delete", "a", "--store", "ckpt", "--json")
    assert "deletes files" in run(*words, code=2).error["message"]
    monkeypatch.setenv("SCARCTL_KEEP_LAST", "10")
    with monkeypatch.context() as patch:
        patch.setenv("SCARCTL_DRY_RUN", "1")
        assert run(*words).document["dry_run"]
    assert run("snapshot", "list", "--store", "ckpt").stdout == "a: step 4\n"
    assert run(*words, "--yes").document["dropped_sealed_steps"] == []
    assert run("snapshot", "list", "--store", "ckpt").stdout == "no snapshots\n"
    assert [one.step for one in sealed_sets([Store.open("ckpt").state(0)])] == [4, 3, 2, 1]


def test_one_unknown_name_deletes_nothing(run: Run, model: Model) -> None:
    create(run, model, "a", 1)
    error = run("snapshot", "delete", "a", "x", "--store", "ckpt", "--json", code=2).error
    assert error["kind"] == "no-snapshot"
    assert run("snapshot", "list", "--store", "ckpt").stdout == "a: step 1\n"


def test_values_that_are_not_finite_make_no_snapshot(run: Run, model: Model) -> None:
    create(run, model, "a", 1)
    model.save(scalar=torch.tensor(float("nan")))
    done = run("snapshot", "create", "b", model.path, "--store", "ckpt", "--step", 2, code=3)
    assert "no snapshot is made" in done.stderr
    assert run("snapshot", "list", "--store", "ckpt").stdout == "a: step 1\n"
