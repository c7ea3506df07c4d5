"""Test sessions that save copies in fewer bits: more of them, never called exact, and exact again when required."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from scarctl.errors import Unavailable
from scarctl.persist.evacuation import not_evacuated
from scarctl.state.encodings import ERROR_BOUND, Encoding
from scarctl.state.version import step_of
from scarctl.store import Store
from tests.store.helpers import read_all
from tests.support.training import Loop

HERE: dict[str, Any] = {"daemon": False}


def loop(store: Path, arena_dir: Path, encoding: str, **options: Any) -> Loop:
    return Loop(store, arena_dir=arena_dir, encoding=encoding, **{**HERE, **options})


def encoded_in(store: Path) -> int:
    return int(Store.open(store).state(0).encoded.sum())


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """Return a folder for memory that a resume does not find."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(("encoding", "fraction"), [("bfloat16", 1.0), ("int8", 1.0), ("int8", 0.5)])
def test_a_resume_from_encoded_copies_is_not_exact_though_all_are_of_one_step(
    tmp_path: Path, arena_dir: Path, apart: Path, encoding: Encoding, fraction: float
) -> None:
    store, copy = tmp_path / "store", tmp_path / "copy"
    run = loop(store, arena_dir, encoding, fraction=fraction)
    run.train(20, settle=True)
    live = run.state()
    shutil.copytree(store, copy)
    run.session.close()
    again = loop(copy, apart, encoding)
    resumed = again.session.resume()
    assert resumed.report is not None
    encoded = resumed.report.plan.encoded
    assert encoded == encoded_in(copy) > 10
    assert (resumed.step, resumed.consistent) == (20, False)
    reason = f"{encoded} partitions come from encoded copies, which have fewer bits"
    steps = set(step_of(resumed.report.plan.version).tolist())
    mixed = [] if steps == {20} else ["partitions are of several steps"]
    assert list(resumed.reasons) == [*mixed, reason]
    assert resumed.report.to_json()["encoded_partitions"] == encoded
    if fraction == 1.0:
        assert steps == {20}
        for name, tensor in again.state().items():
            error, values = (tensor - live[name]).abs(), live[name].abs()
            if "norm.running" in name or not tensor.is_floating_point():
                assert not error.any()
            elif encoding == "bfloat16":
                assert (error <= ERROR_BOUND["bfloat16"] * values).all()
            elif "/" not in name:
                assert (error <= ERROR_BOUND["int8"] * values.amax(-1, keepdim=True) * 1.001).all()
            elif name.endswith("exp_avg_sq"):
                assert (tensor >= live[name] * (1 - 1e-6)).all()
    again.train(6)
    again.session.close()
    assert encoded_in(copy) == 0


def test_what_has_stopped_is_exact_in_the_end(tmp_path: Path, arena_dir: Path) -> None:
    store = tmp_path / "store"
    run = loop(store, arena_dir, "int8", fraction=0.25)
    run.train(20, settle=True)
    assert encoded_in(store)
    run.session.checkpoint(wait=True)
    for parameter in run.model.parameters():
        parameter.requires_grad_(requires_grad=False)
    run.model.out.weight.requires_grad_(requires_grad=True)
    run.train(30, settle=True)
    still = run.state()["embed.weight"]
    state, layout = Store.open(store).state(0), run.session.layout
    mine = layout.match("embed.weight")
    assert not state.encoded[state.find(mine)].any()
    found, bad = read_all(Store.open(store), state, mine)
    assert not bad
    for i, copy in found.items():
        start, stop = (int(row[0]) for row in layout.row_ranges([i]))
        assert copy.startswith(still[start:stop].numpy().tobytes())
    run.session.close()


def test_copies_of_one_step_that_the_store_has_encoded_are_no_seal(
    tmp_path: Path, arena_dir: Path, apart: Path
) -> None:
    run = loop(tmp_path / "store", arena_dir, "int8", fraction=1.0)
    run.train(20, settle=True)
    copy = shutil.copytree(tmp_path / "store", tmp_path / "copy")
    engine = run.session._engine
    assert engine is not None
    assert not engine.is_sealed()
    run.session.close()
    again = loop(copy, apart, "exact")
    again.session.resume()
    engine = again.session._engine
    assert engine is not None
    assert set(step_of(engine.arena.newest()).tolist()) == {20}
    assert not engine.is_sealed()
    again.session.close()
    assert encoded_in(copy) == 0


def test_what_only_the_memory_has_exactly_is_not_safe(tmp_path: Path, arena_dir: Path) -> None:
    run = loop(tmp_path / "store", arena_dir, "int8", fraction=0.5)
    run.train(20, settle=True)
    engine = run.session._engine
    assert engine is not None
    arena = engine.arena
    assert not arena.pending().any()
    error, cut = arena.encoding_error.copy(), Unavailable("no time")
    report = not_evacuated(arena, cut)
    lacking = error >= 0
    assert report.lost_partitions == lacking.sum() == encoded_in(tmp_path / "store") > 10
    assert report.lost_bytes == run.session.layout.partition_bytes[lacking].sum()
    assert (report.safe, report.sealed) == (False, False)
    saved = run.session.evacuate(30.0)
    assert saved.safe
    assert encoded_in(tmp_path / "store") == 0
    report = not_evacuated(arena, cut)
    assert (report.lost_partitions, report.safe) == (0, True)
    run.session.close()
