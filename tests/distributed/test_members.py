"""Test sessions of members: each has its own state, even within one process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scarctl
from scarctl.errors import Contention, LayoutMismatch, SettingsConflict, UsageError
from scarctl.store import Store, read_snapshot
from tests.support.member import ROWS, attached, epochs, state_of, train
from tests.support.ranks import RankStore
from tests.support.training import Loop, differing, drained


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


def test_a_member_with_torch_and_adam_resumes_exactly(tmp_path: Path) -> None:
    first = Loop(tmp_path / "s", member=(1, 2))
    first.session.resume()
    first.train(7)
    first.session.close()
    kept = first.state()
    again = Loop(tmp_path / "s", seed=5, member=(1, 2))
    resumed = again.session.resume()
    assert (resumed.step, resumed.consistent) == (7, True)
    assert differing(kept, again.state()) == []
    again.session.close()


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


def test_another_number_of_members_and_other_writers_are_refused(tmp_path: Path) -> None:
    with members(tmp_path / "s", 2):
        pass
    with pytest.raises(SettingsConflict, match="has 2 members, not 3"):
        attached(tmp_path / "s", 2, 3, state_of(2))
    for ranks in (None, False):
        with pytest.raises(UsageError, match="written by 2 members") as caught:
            scarctl.attach(state_of(0), store=tmp_path / "s", ranks=ranks)
        assert caught.value.kind == "store-of-members"
    with members(tmp_path / "s", 2) as two:
        assert [session.resumed.step for session, _ in two] == [3, 4]

    RankStore(tmp_path / "ranks", 2).close()
    with pytest.raises(UsageError, match="2 ranks, not by members"):
        scarctl.attach(state_of(0), store=tmp_path / "ranks", member=(0, 2))
    with scarctl.attach(state_of(0), store=tmp_path / "one") as session:
        session.step()
    with pytest.raises(UsageError, match="one process saved"):
        scarctl.attach(state_of(0), store=tmp_path / "one", member=(0, 2))


def test_the_part_of_another_member_is_refused_if_its_shapes_differ(tmp_path: Path) -> None:
    with members(tmp_path / "s", 2):
        pass
    with attached(tmp_path / "s", 1, 2, {"rows": np.zeros((ROWS, 5)), "bias": np.zeros(4)}) as session:
        with pytest.raises(LayoutMismatch, match="rows"):
            session.resume()
        session.close(seal=False)


def test_a_copied_store_is_a_store_of_its_own(tmp_path: Path) -> None:
    with members(tmp_path / "s", 2):
        # Before the last seal. Files that are still written may vanish meanwhile.
        shutil.copytree(tmp_path / "s", tmp_path / "copy", ignore=shutil.ignore_patterns(".tmp-*"))
    with members(tmp_path / "s", 2, steps=9):
        pass
    for url, step in (("s", 14), ("copy", None)):
        state = state_of(1)
        with attached(tmp_path / url, 1, 2, state) as session:
            resumed = session.resume()
            assert step is None or resumed.step == step
            assert resumed.report is None or resumed.report.tiers.keys() == {"store"}
            train(session, state, 1)
    assert epochs(Store.open(tmp_path / "s")) == {0: 2, 1: 3}
    assert epochs(Store.open(tmp_path / "copy")) == {0: 1, 1: 2}


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
