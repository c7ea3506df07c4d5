"""Test a store of eight shards that was written once: resumed, continued, recovered, rolled back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from scarctl.cli.main import cli
from scarctl.store import Store, verify
from scarctl.store.prune import Retention, plan_prune, prune
from tests.golden.write_session import NEWEST, SHARDS, SNAPSHOT, State, attach, state_of, train

SESSION = Path(__file__).parent / "1" / "session"
NO_STATE = {"table": np.full((32, 4), np.nan), "head": np.full((3, 2), np.nan)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the store that may be changed."""
    return Path(shutil.copytree(SESSION, tmp_path / "session"))


def run(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done


def empty() -> State:
    return {name: values.copy() for name, values in NO_STATE.items()}


def assert_equal(state: State, other: State) -> None:
    for name, values in state.items():
        np.testing.assert_array_equal(values, other[name], name)


def rows_of(store: Store, shard: int) -> dict[str, np.ndarray]:
    """Return a mask of the rows of a shard's partitions, by tensor."""
    layout = store.current_layout()
    assert layout is not None
    marks = {group.name: np.zeros(group.rows, bool) for group in layout.groups}
    ids = np.flatnonzero(layout.shards(SHARDS, 0) == shard)
    for g, start, stop in zip(layout.group_of(ids), *layout.row_ranges(ids), strict=True):
        marks[layout.groups[g].name][start:stop] = True
    return marks


def test_it_is_intact_and_shows_its_shards(folder: Path) -> None:
    store = Store.open(folder)
    assert store.shards() == [0]
    assert verify(store, read_data=True).intact
    shown = json.loads(run("inspect", "--store", folder, "--json").stdout)
    assert [line["shard"] for line in shown["shards"]] == list(range(SHARDS))
    layout = store.current_layout()
    assert layout is not None
    counts = np.bincount(layout.shards(SHARDS, 0), minlength=SHARDS)
    assert [line["partitions"] for line in shown["shards"]] == counts.tolist()
    assert {line["newest_step"] for line in shown["shards"]} == {NEWEST}


def test_it_is_resumed_continued_and_resumed_again(folder: Path, tmp_path: Path) -> None:
    state = empty()
    session = attach(state, folder, tmp_path / "arenas")
    resumed = session.resume()
    assert (resumed.step, resumed.consistent) == (NEWEST, True)
    assert_equal(state, state_of(NEWEST))
    train(session, state, NEWEST, NEWEST + 4)
    session.close()
    store = Store.open(folder)
    assert store.shards() == [0]
    assert verify(store, read_data=True).intact
    prune(store, plan_prune(store, Retention(delete=("first",))))
    again = empty()
    other = attach(again, folder, tmp_path / "others")
    resumed = other.resume()
    assert (resumed.step, resumed.consistent) == (NEWEST + 4, True)
    assert_equal(again, state_of(NEWEST + 4))
    other.close()


def test_one_shard_is_recovered_in_a_running_session(folder: Path, tmp_path: Path) -> None:
    state = empty()
    session = attach(state, folder, tmp_path / "arenas")
    session.resume()
    train(session, state, NEWEST, NEWEST + 1)
    session.checkpoint(full=True, wait=True)
    marks = rows_of(session.store, 3)
    for name, rows in marks.items():
        state[name][rows] = np.nan
        state[name][~rows] += 1000.0  # progress that is not lost
    report = session.recover(3)
    assert [line["shard"] for line in report.plan.to_json()["shards"]] == [3]
    whole = state_of(NEWEST + 1)
    for name, rows in marks.items():
        np.testing.assert_array_equal(state[name][rows], whole[name][rows])
        np.testing.assert_array_equal(state[name][~rows], whole[name][~rows] + 1000.0)
    session.close(seal=False)


def test_one_shard_is_recovered_into_a_file(folder: Path, tmp_path: Path) -> None:
    file, lost = tmp_path / "state.safetensors", empty()
    save_file(lost, file)
    report = json.loads(run("recover", "--store", folder, "--lost", "3", "--into", file, "--json").stdout)
    store = Store.open(folder)
    layout = store.current_layout()
    assert layout is not None
    mine = np.flatnonzero(layout.shards(SHARDS, 0) == 3)
    assert report["restored_partitions"] == len(mine)
    assert report["bytes"] == int(layout.partition_bytes[mine].sum())
    assert [line["shard"] for line in report["shards"]] == [3]
    found, whole = load_file(file), state_of(NEWEST)
    for name, rows in rows_of(store, 3).items():
        np.testing.assert_array_equal(found[name][rows], whole[name][rows])
        assert np.isnan(found[name][~rows]).all()
    refused = run("recover", "--store", folder, "--lost", "8", "--into", file, code=2)
    assert "shards are 0..7" in refused.stderr


def test_the_snapshot_is_resumed(folder: Path, tmp_path: Path) -> None:
    state = empty()
    session = attach(state, folder, tmp_path / "arenas")
    resumed = session.resume(snapshot="first")
    assert (resumed.step, resumed.consistent) == (SNAPSHOT, True)
    assert_equal(state, state_of(SNAPSHOT))
    train(session, state, SNAPSHOT, SNAPSHOT + 1)
    session.close()
    other = empty()
    again = attach(other, folder, tmp_path / "others")
    assert again.resume().step == SNAPSHOT + 1
    assert_equal(other, state_of(SNAPSHOT + 1))
    again.close()
