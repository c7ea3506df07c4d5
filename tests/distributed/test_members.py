"""Test sessions of members: each has its own state, even within one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scarctl
from scarctl.errors import Contention, LayoutMismatch, UsageError
from scarctl.store import Store, read_snapshot
from tests.support.member import ROWS, attached, epochs, state_of, train
from tests.support.training import drained


@contextmanager
def members(store: Path, count: int, steps: int = 3, **options: Any) -> Iterator[list[Any]]:
    """Yield (session, state) of each member, member k after `steps` + k steps."""
    with ExitStack() as stack:
        found = []
        for number in range(count):
            state = state_of(number)
            session = stack.enter_context(attached(store, number, count, state, **options))
            session.resume()
            train(session, state, steps + number)
            found.append((session, state))
        yield found


def test_each_resumes_exactly_what_it_was_at_a_step_of_its_own(tmp_path: Path) -> None:
    with members(tmp_path / "s", 3) as before:
        kept = [{name: values.copy() for name, values in state.items()} for _, state in before]
    assert epochs(Store.open(tmp_path / "s")) == {0: 1, 1: 1, 2: 1}
    for number in (2, 0):
        state = state_of(9)
        with attached(tmp_path / "s", number, 3, state) as session:
            resumed = session.resume()
            assert (resumed.step, resumed.consistent, resumed.reasons) == (3 + number, True, ())
            assert all((state[name] == kept[number][name]).all() for name in state)
    assert epochs(Store.open(tmp_path / "s")) == {0: 2, 1: 1, 2: 2}


def test_its_parts_have_its_own_names_and_those_of_the_whole_state(tmp_path: Path) -> None:
    with members(tmp_path / "s", 2) as two:
        session, state = two[1]
        other = two[0][1]["rows"].copy()
        drained([session])
        for lost, count in (
            ("rows[3:5]", 2),
            ("rows@1[3:5]", 2),
            ("bias", 1),
            ("member:1", ROWS + 1),
            (1, ROWS + 1),
            ("all", ROWS + 1),
        ):
            state["rows"][3] = np.nan
            assert session.recover(lost).plan.ids.size == count
        assert np.isfinite(state["rows"]).all()
        assert [group.name for group in session.layout.groups] == ["rows", "bias"]
        assert (two[0][1]["rows"] == other).all()
        for lost, reason in (
            ("member:0", "member 1 has none of the lost parts"),
            ("rows@0", "matches no group"),
            ("member:2", "member 2 does not exist"),
        ):
            with pytest.raises(UsageError, match=reason):
                session.recover(lost)


def test_a_rollback_is_of_one_member(tmp_path: Path) -> None:
    with members(tmp_path / "s", 2) as two:
        session, state = two[0]
        session.checkpoint(full=True, wait=True)
        sealed = state["rows"].copy()
        train(session, state, 4)
        report = session.recover("all", mode="rollback")
        assert (report.step, report.consistent) == (3, True)
        assert (state["rows"] == sealed).all()
        assert two[1][0].head_step == 4
    found = epochs(Store.open(tmp_path / "s"))
    assert found[0] > found[1] == 1


def test_a_snapshot_is_of_one_member(tmp_path: Path) -> None:
    with members(tmp_path / "s", 2) as two:
        assert [session.snapshot(f"of-{n}") for n, (session, _) in enumerate(two)] == [3, 4]
        with pytest.raises(UsageError, match="of-0"):
            two[1][0].snapshot("of-0")
        for session, state in two:
            train(session, state, 3)
    assert read_snapshot(Store.open(tmp_path / "s"), "of-1").seqs.keys() == {1}
    with attached(tmp_path / "s", 1, 2, state_of(1)) as session:
        with pytest.raises(LayoutMismatch, match="'of-0' does not contain shard 1"):
            session.resume(snapshot="of-0")
        resumed = session.resume(snapshot="of-1")
        assert (resumed.step, resumed.consistent) == (4, True)


def test_attaching_again_replaces_the_session_of_that_member_only(tmp_path: Path) -> None:
    sessions = [attached(tmp_path / "s", number, 2, state_of(number)) for number in range(2)]
    again = attached(tmp_path / "s", 1, 2, state_of(1))
    with pytest.raises(UsageError, match="closed"):
        sessions[1].checkpoint()
    with pytest.raises(UsageError, match="before the first step"):
        sessions[0].checkpoint()
    with again, pytest.raises(Contention, match="another session of this process"):
        attached(tmp_path / "s", 1, 2, state_of(1))
    sessions[0].close()


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        ((8, 8), "there is no member 8"),
        ((-1, 8), "there is no member -1"),
        ((0, 0), "there are 1 to"),
        ((0, 10**9), "there are 1 to"),
        ((1,), "such as"),
        ((1.0, 8), "such as"),
        ((True, 8), "such as"),
        ("2/8", "such as"),
    ],
)
def test_a_number_out_of_range_makes_no_store(member: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason):
        scarctl.attach(state_of(0), store=tmp_path / "s", member=member)
    assert not (tmp_path / "s").exists()


def test_contradictions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without the other ranks"):
        scarctl.attach(state_of(0), store=tmp_path / "s", member=(0, 2), ranks=True)
    with pytest.raises(UsageError, match="each member is one shard"):
        attached(tmp_path / "s", 0, 2, state_of(0), shards=4)
    assert not (tmp_path / "s").exists()


def test_a_sharded_model_is_no_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scarctl.state.group import Place
    from scarctl_adapters.torch import TorchAdapter

    model = torch.nn.Linear(4, 2)
    whole = TorchAdapter.groups

    def cut(self: Any) -> Any:
        from dataclasses import replace

        return [replace(group, place=Place((4, 4), (0, 0))) for group in whole(self)][:1]

    monkeypatch.setattr(TorchAdapter, "groups", cut)
    with pytest.raises(UsageError, match="the model is sharded"):
        scarctl.attach(model, store=tmp_path / "s", member=(0, 2))
