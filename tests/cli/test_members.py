"""Test commands on a store that members share: they show one state, and change one member."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.conftest import Run
from tests.support.logs import records
from tests.support.member import ROWS, attached, state_of, train

WORLD = 3


def values(number: int, steps: int) -> dict[str, np.ndarray]:
    state = {name: value + steps for name, value in state_of(number).items()}
    return {f"{name}@{number}": value for name, value in state.items()}


def read(path: Path) -> dict[str, np.ndarray]:
    return dict(load_file(path))


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all((found[name] == wanted[name]).all() for name in wanted)


def save(store: Path, number: int, steps: int, *, close: bool = True) -> None:
    state = state_of(number)
    session = attached(store, number, WORLD, state)
    session.resume()
    train(session, state, steps)
    session.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store in which member k is sealed after 4 + k steps."""
    for number in range(WORLD):
        save(tmp_path / "ckpt", number, 4 + number)
    return tmp_path / "ckpt"


def test_inspect_has_a_line_for_each_member_with_its_own_staleness(run: Run, store: Path) -> None:
    done = run("inspect", "--store", store, "--json").document
    assert done["topology"]["members"] is True
    assert [(line["rank"], line["durable_step"], line["staleness"]) for line in done["ranks"]] == [
        (0, 4, 0), (1, 5, 0), (2, 6, 0)
    ]  # fmt: skip
    assert {one["group"] for one in done["partitions"]} == {
        f"{name}@{number}" for name in ("rows", "bias") for number in range(WORLD)
    }
    assert {one["staleness"] for one in done["partitions"]} == {0}
    text = run("inspect", "--store", store).stdout
    assert "3 members; one shard each" in text
    assert "each member converges alone" in text


def test_who_has_saved_nothing_is_named_and_disturbs_nobody(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "ckpt", 1, 4)
    assert "members that have saved nothing yet: 0, 2" in run("inspect", "--store", "ckpt").stdout
    run("recover", "--store", "ckpt", "--lost", "1", "--output", "one.safetensors")
    assert same(read(tmp_path / "one.safetensors"), values(1, 4))
    for words in (
        ("recover", "--lost", "all", "--output", "all.safetensors"),
        ("recover", "--lost", "member:2", "--output", "all.safetensors"),
        ("export", "exported"),
    ):
        error = run(*words, "--store", "ckpt", "--json", code=16).error
        assert "has saved nothing yet" in error["message"]
    assert not (tmp_path / "all.safetensors").exists()


def test_the_eight_are_exported_as_one_state(run: Run, store: Path, tmp_path: Path) -> None:
    done = run("export", "exported", "--store", store, "--json").document
    assert (done["consistent"], done["step"], done["oldest_step"], done["newest_step"]) == (False, None, 4, 6)
    wanted = values(0, 4) | values(1, 5) | values(2, 6)
    assert same(read(tmp_path / "exported" / "model.safetensors"), wanted)
    run("verify", "--store", store)


def test_one_lost_member_is_patched_into_the_state_of_all(run: Run, store: Path, tmp_path: Path) -> None:
    wanted = values(0, 4) | values(1, 5) | values(2, 6)
    broken = wanted | {name: np.zeros_like(value) for name, value in values(2, 6).items()}
    save_file(broken, tmp_path / "state.safetensors")
    done = run("recover", "--store", store, "--lost", "2", "--into", "state.safetensors", "--json").document
    assert (done["ranks"], done["restored_partitions"]) == ({"world": WORLD, "lost": [2]}, ROWS + 1)
    assert same(read(tmp_path / "state.safetensors"), wanted)
    run("recover", "--store", store, "--lost", "rows@1[3:5]", "--output", "rows.safetensors")
    assert read(tmp_path / "rows.safetensors").keys() == {"rows@1[3:5]"}


def test_members_have_no_common_step_to_go_back_to(run: Run, store: Path, tmp_path: Path) -> None:
    back = ("recover", "--store", store, "--mode", "rollback", "--output")
    error = run(*back, "a.safetensors", "--lost", "1,2", "--json", code=2).error
    assert error["kind"] == "members-apart"
    done = run(*back, "b.safetensors", "--lost", "1", "--json").document
    assert (done["consistent"], done["step"]) == (True, 5)
    assert same(read(tmp_path / "b.safetensors"), values(1, 5))
    error = run("snapshot", "create", "best", "--store", store, "--json", code=2).error
    assert error["kind"] == "members-apart"


def test_a_member_without_memory_here_is_named_a_member(run: Run, store: Path) -> None:
    error = run("recover", "--store", store, "--lost", "1", "--json", code=2).error
    assert error["message"] == "this host has no arena of stopped member 1"


def test_a_damaged_member_is_its_own_affair(run: Run, store: Path, tmp_path: Path) -> None:
    for record in records(store, 1):
        record.write_bytes(record.read_bytes()[:-1])
    run("recover", "--store", store, "--lost", "2", "--output", "two.safetensors")
    assert same(read(tmp_path / "two.safetensors"), values(2, 6))
    run("recover", "--store", store, "--lost", "1", "--output", "one.safetensors", code=13)
    run("export", "exported", "--store", store, code=13)
    run("verify", "--store", store, code=13)
    save(store, 0, 5)


def test_one_process_may_not_save_to_it(run: Run, store: Path, tmp_path: Path) -> None:
    save_file({"rows": np.zeros((4, 4))}, tmp_path / "state.safetensors")
    words = ("checkpoint", "state.safetensors", "--store", store, "--step", "9")
    assert run(*words, "--json", code=2).error["kind"] == "store-of-members"
