"""Test extrapolating recovery in real sessions: its gain, when it does nothing, and what it leaves unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import scarctl
from scarctl.config import grouped
from scarctl.errors import UsageError
from tests.session.moving import INTERVAL, ROUNDING, ROWS, Moving, drift, shrink, swing
from tests.support.training import Loop, differing, drained


def test_what_goes_straight_comes_back_nearly_where_it_was(tmp_path: Path) -> None:
    run = Moving(tmp_path / "store", drift)
    run.train(10 * INTERVAL + 5)
    before, lost, factor = run.x.copy(), run.lost(0, 1), run.factor
    assert 0.8 < factor < 1
    report = run.session.recover([0, 1])
    # Saved 5 iterations ago, at 1 per iteration: a whole number, which a movement represents exactly.
    np.testing.assert_allclose(run.x[lost], before[lost] - 5 * (1 - factor), rtol=1e-12)
    assert run.x[~lost].tobytes() == before[~lost].tobytes()
    told = report.extrapolation
    assert told is not None
    assert (told.partitions, told.unknown, told.factors["x"]) == (lost.sum(), 0, factor)
    assert told.expected_gain == pytest.approx(1 - (1 - factor) ** 2, abs=0.15)
    assert report.perturbation.kind == "measured"
    assert report.perturbation.value == pytest.approx(5 * (1 - factor) * np.sqrt(4 * lost.sum()))
    assert report.to_json()["extrapolation"] == told.to_json()
    assert not report.exact
    run.session.close()


def test_what_converges_comes_back_nearer(tmp_path: Path) -> None:
    run = Moving(tmp_path / "store", shrink)
    run.train(10 * INTERVAL + 5)
    before, factor = run.x.copy(), run.factor
    saved, older = 0.95 ** (10 * INTERVAL), 0.95 ** (9 * INTERVAL)
    run.session.recover([2])
    there = saved + factor * 5 / INTERVAL * (saved - older)
    np.testing.assert_allclose(run.x[run.lost(2)], there, atol=ROUNDING * (older - saved))
    assert abs(there - before[0, 0]) < (saved - before[0, 0]) / 4
    run.session.close()


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("tracker", ["exact", "overlapped"])
def test_rows_that_stand_still_stay_where_they_are(tmp_path: Path, tracker: str, fraction: float) -> None:
    """If no batch has touched rows of an embedding since their copy, the copy is exact."""
    still, last = slice(0, ROWS // 2), 5 * INTERVAL

    def some(x: NDArray[Any], step: int) -> None:
        x[ROWS // 2 :] += 1
        if step <= last:
            x[still] += 1

    run = Moving(tmp_path / "store", some, tracker=tracker, fraction=fraction)
    run.train(12 * INTERVAL)
    run.session.checkpoint(full=True, wait=True)
    now = run.x.copy()
    report = run.session.recover("all")
    assert report.perturbation.value == 0
    assert run.x.tobytes() == now.tobytes()
    run.train(20 * INTERVAL + 3)
    before = run.x.copy()
    report = run.session.recover("all")
    assert run.x[still].tobytes() == before[still].tobytes()
    told = report.extrapolation
    assert told is not None
    assert told.partitions == ROWS // 2
    assert told.expected_gain == pytest.approx(1, abs=0.2), "only what moves is extrapolated, and judged"
    run.session.close()


@pytest.mark.parametrize("extrapolate", [True, False])
def test_what_would_be_harmed_comes_back_as_it_was_saved(tmp_path: Path, extrapolate: bool) -> None:
    run = Moving(tmp_path / "store", swing, extrapolate=extrapolate)
    run.train(10 * INTERVAL)
    saved = run.x.copy()
    run.train(10 * INTERVAL + 5)
    run.session.recover("all")
    assert run.x.tobytes() == saved.tobytes()
    run.train(11 * INTERVAL + 3)
    lost, now = run.lost(3), run.x.copy()
    report = run.session.recover([3])
    assert (run.x[lost] == run.x[lost][0]).all()
    assert (run.x[lost] != now[lost]).any()
    if extrapolate:
        assert report.extrapolation is not None
        assert report.extrapolation.to_json() == {
            "partitions": 0,
            "unknown": 0,
            "factors": {"x": 0.0},
            "expected_gain": None,
        }
    else:
        assert "extrapolation" not in report.to_json()
    run.session.close()


def test_what_is_frozen_meanwhile_comes_back_as_it_is(tmp_path: Path) -> None:
    run = Moving(tmp_path / "store", drift)
    run.train(6 * INTERVAL)
    assert run.factor > 0.7
    run.law = lambda x, step: None
    run.train(8 * INTERVAL + 3)
    now = run.x.copy()
    report = run.session.recover([0])
    assert run.x.tobytes() == now.tobytes()
    assert report.perturbation.value == 0
    run.session.close()


def test_slots_counts_and_survivors_are_left_alone(tmp_path: Path) -> None:
    """Of two equal runs one extrapolates: only parameters of lost partitions differ."""
    plain = Loop(tmp_path / "plain", shards=3, interval=5, fraction=1.0)
    loop = Loop(tmp_path / "store", shards=3, interval=5, fraction=1.0, extrapolate=True)
    for one in (plain, loop):
        torch.manual_seed(1)
        one.train(33, settle=True)
    assert differing(plain.state(), loop.state()) == []
    before = loop.state()
    one, other = plain.session.recover([1]), loop.session.recover([1])
    assert other.extrapolation is not None
    assert other.extrapolation.partitions > 0
    assert one.perturbation.value is not None
    assert other.perturbation.value is not None
    assert other.perturbation.value < one.perturbation.value
    parameters = dict(loop.model.named_parameters()).keys()
    changed = differing(plain.state(), loop.state())
    assert changed
    assert set(changed) <= set(parameters)
    engine, after = loop.session._started(), loop.state()
    for g, group in enumerate(engine.layout.groups):
        for id_ in range(int(engine.layout.base[g]), int(engine.layout.base[g + 1])):
            if engine.shard_of[id_] != 1:
                start, stop = (int(at[0]) for at in engine.layout.row_ranges([id_]))
                now, then = (state[group.name].view(group.rows, -1)[start:stop] for state in (after, before))
                assert torch.equal(now, then)
    for one in (plain, loop):
        one.session.close()


def test_what_came_back_is_saved_as_it_is(tmp_path: Path) -> None:
    """An extrapolated value is not a saved copy: the next flush saves it, and a restart has the same values."""
    loop = Loop(tmp_path / "store", shards=3, interval=5, fraction=1.0, extrapolate=True, tracker="touched")
    loop.train(33, settle=True)
    report = loop.session.recover([0])
    assert report.extrapolation is not None
    engine = loop.session._started()
    moved = np.flatnonzero(engine.arena.distance > 0)
    assert len(moved) == report.extrapolation.partitions > 0
    live = loop.session._binding.live(engine.arena)
    assert np.array_equal(
        np.flatnonzero(live.distances()[engine.shard_of == 0] > 0),
        np.flatnonzero(engine.arena.distance[engine.shard_of == 0] > 0),
    )
    # Rows without a gradient are still compared.
    distance = engine.tracker.distances(live, 34)
    np.testing.assert_allclose(distance[moved], engine.arena.distance[moved])
    left = loop.state()
    loop.session.close()
    again = Loop(tmp_path / "store", extrapolate=True, shards=3)
    assert again.session.resume().exact
    assert differing(again.state(), left) == []
    again.session.close()


def test_a_second_loss_moves_from_the_same_copy(tmp_path: Path) -> None:
    run = Moving(tmp_path / "store", drift)
    run.train(6 * INTERVAL + 3)
    run.session.recover([1])
    once = run.x.copy()
    assert run.session.recover([1]).perturbation.value == 0
    assert run.x.tobytes() == once.tobytes()
    run.session.close()


def test_lost_values_that_are_gone(tmp_path: Path) -> None:
    run = Moving(tmp_path / "store", drift)
    run.train(6 * INTERVAL + 3)
    before, lost = run.x.copy(), run.lost(0)
    run.x[lost] = np.nan
    report = run.session.recover([0])
    assert report.extrapolation is not None
    assert report.extrapolation.partitions == lost.sum()
    assert report.perturbation.kind == "estimated"
    np.testing.assert_allclose(run.x[lost], before[lost] - 3 * (1 - run.factor), rtol=1e-12)
    run.session.close()


def test_what_would_not_be_a_number_any_more_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    def to_the_end(x: NDArray[Any], step: int) -> None:
        x[:, 1:] -= 32
        x[:, 0] += 32 if step <= 3 * INTERVAL else 0

    run = Moving(tmp_path / "store", to_the_end, dtype=np.float16)
    run.x[:] = 65504 - 3 * INTERVAL * 32
    run.train(3 * INTERVAL)
    saved, lost = run.x.copy(), run.lost(0)
    run.train(3 * INTERVAL + 7)
    report = run.session.recover([0])
    assert report.extrapolation is not None
    assert report.extrapolation.factors["x"] > 0
    assert (report.extrapolation.partitions, report.extrapolation.unknown) == (0, lost.sum())
    assert run.x[lost].tobytes() == saved[lost].tobytes()
    run.session.close()


def test_a_rollback_is_exact(tmp_path: Path) -> None:
    run = Moving(tmp_path / "store", drift)
    run.train(4 * INTERVAL)
    run.session.checkpoint(full=True, wait=True)
    sealed, factor = run.x.copy(), run.factor
    run.train(6 * INTERVAL + 3)
    assert run.factor != factor
    report = run.session.recover([0], mode="rollback")
    assert report.extrapolation is None
    assert run.x.tobytes() == sealed.tobytes()
    assert run.factor == factor, "what came later has not happened"
    run.session.close()


def test_it_is_a_setting_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCARCTL_EXTRAPOLATE", "1")
    session = scarctl.attach({"x": np.zeros(3)}, store=tmp_path / "store")
    assert session.settings.extrapolate
    session.close()
    with pytest.raises(UsageError, match="extrapolate"):
        scarctl.attach(
            {"x": np.zeros(3)}, store=tmp_path / "store", selection=scarctl.Selection(extrapolate="yes")
        )  # type: ignore[arg-type]


def trained(
    store: Path, **options: Any
) -> tuple[torch.nn.ModuleDict, Callable[[int], None], scarctl.Session]:
    """Return two layers that move straight on as long as they are trained."""
    model = torch.nn.ModuleDict({"base": torch.nn.Linear(4, 8), "head": torch.nn.Linear(4, 8)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {
        "interval": INTERVAL,
        "fraction": 1.0,
        "shards": 1,
        "rows": {"base.weight": 1},
        "extrapolate": True,
    }
    session = scarctl.attach(model, optimizer, store=store, **grouped(**(settings | options)))

    def train(steps: int) -> None:
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
            optimizer.step()
            session._finish()
            drained([session])

    return model, train, session


def test_what_is_frozen_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    """The value would stay where it was put permanently."""
    model, train, session = trained(tmp_path / "store")
    train(6 * INTERVAL)
    model["base"].requires_grad_(False)
    train(2 * INTERVAL + 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = session.recover("all")
    assert report.extrapolation is not None
    factors = report.extrapolation.factors
    assert factors["base.weight"] == factors["base.bias"] == 0 < factors["head.weight"]
    assert torch.equal(model["base"].weight, before["base.weight"])
    assert not torch.equal(model["head"].weight, before["head.weight"])
    session.close()
