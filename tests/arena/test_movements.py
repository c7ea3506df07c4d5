"""Test the file of movements after a kill, damaged, torn, or without space; it is removed with its arena."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from scarctl.arena import movements
from scarctl.arena.header import FILE, MOVEMENTS
from scarctl.arena.stale import reap
from scarctl.errors import ScarError, Unavailable
from tests.session.moving import INTERVAL, ROWS, Moving, drift, folder_of, killed


def test_a_run_that_was_killed_goes_on_further_along_the_way(
    tmp_path: Path, both_savers: str, warm_torch: None
) -> None:
    store = tmp_path / "store"
    killed(store, 10 * INTERVAL + 3)
    run = Moving(store, drift)
    resumed = run.session.resume()
    assert (resumed.step, resumed.exact) == (10 * INTERVAL, False)
    assert resumed.report is not None
    told = resumed.report.extrapolation
    assert told is not None
    there, left = 1.0 + resumed.step, run.x.copy()
    # Half was saved at that step, half one checkpoint earlier, after 16 iterations.
    late = left[:, 0] != there
    assert (told.partitions, told.unknown) == (late.sum(), 0)
    assert late.sum() in (ROWS // 2 - 1, ROWS // 2)
    assert run.factor == told.factors["x"] > 0.7
    np.testing.assert_allclose(left[late], there - INTERVAL * (1 - run.factor), rtol=1e-12)
    run.session.close()
    again = Moving(store, drift)
    resumed = again.session.resume()
    assert resumed.report is not None
    assert resumed.report.whole, "all copies are of what was closed"
    assert not resumed.exact, "and that is what was resumed inexactly, no step later"
    assert resumed.report.extrapolation is None
    assert again.factor == pytest.approx(told.factors["x"]), "it is carried over restarts"
    assert again.x.tobytes() == left.tobytes()
    again.session.close()


@pytest.mark.parametrize("damage", ["gone", "short", "another layout", "noise", "a link"])
def test_movements_that_are_gone_or_damaged(
    tmp_path: Path, arena_dir: Path, warm_torch: None, damage: str
) -> None:
    store = tmp_path / "store"
    killed(store, 10 * INTERVAL + 3)
    file = folder_of(store, arena_dir) / MOVEMENTS
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "short":
        os.truncate(file, len(data) // 2)
    elif damage == "another layout":
        data[40] ^= 1
        file.write_bytes(data)
    elif damage == "noise":
        data[-ROWS * 8 :] = b"\xff" * (ROWS * 8)  # NaN
        file.write_bytes(data)
    else:
        file.rename(tmp_path / "movements")
        (tmp_path / "movements").write_bytes(b"")
        file.symlink_to(tmp_path / "movements")
    run = Moving(store, drift)
    if damage == "a link":
        with pytest.raises(ScarError, match="movements"):
            run.session.resume()
        file.unlink()
    resumed = run.session.resume()
    assert resumed.report is not None
    told = resumed.report.extrapolation
    assert told is not None
    assert told.partitions == 0
    assert told.unknown == (run.x[:, 0] == 1 + 9 * INTERVAL).sum() > 0
    assert set(run.x[:, 0].tolist()) == {1.0 + 9 * INTERVAL, 1.0 + 10 * INTERVAL}
    run.session.close()


def test_it_goes_with_the_arena_and_is_never_in_the_store(tmp_path: Path, arena_dir: Path) -> None:
    store = tmp_path / "store"
    run = Moving(store, drift)
    run.train(3 * INTERVAL)
    file = folder_of(store, arena_dir) / MOVEMENTS
    assert file.stat().st_mode & 0o777 == 0o600
    run.session.close()
    assert not file.exists()
    assert not list(store.rglob(MOVEMENTS))


def test_it_goes_with_the_arena_of_a_dead_run_too(tmp_path: Path, arena_dir: Path, warm_torch: None) -> None:
    killed(tmp_path / "store", 3 * INTERVAL)
    folder = folder_of(tmp_path / "store", arena_dir)
    assert (folder / MOVEMENTS).exists()
    assert [stale.folder for stale in reap(folder.parent)] == [str(folder)]
    assert not folder.exists()


def test_a_copy_that_was_torn_has_no_movement_that_passes_for_its_own(tmp_path: Path) -> None:
    run = Moving(tmp_path / "store", drift)
    run.train(6 * INTERVAL + 3)
    engine = run.session._started()
    lost = run.lost(0)
    engine.arena.spoil(np.flatnonzero(engine.shard_of == 0))
    report = run.session.recover([0])
    assert report.tiers == {"store": report.restored_partitions}
    # The same copy comes from the store: its movement is still known.
    assert report.extrapolation is not None
    assert report.extrapolation.partitions == lost.sum()
    run.train(7 * INTERVAL)
    engine.arena.begin(np.flatnonzero(engine.shard_of == 0))
    run.train(7 * INTERVAL + 1)
    run.session.close()


def test_too_little_memory_for_movements_leaves_none_of_it_taken(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise Unavailable("the arena needs more", kind="arena-full")

    monkeypatch.setattr(movements, "reserve", full)
    run = Moving(tmp_path / "store", drift)
    with pytest.raises(Unavailable):
        run.train(1)
    run.session.close()
    assert not (folder_of(tmp_path / "store", arena_dir) / FILE).exists()
