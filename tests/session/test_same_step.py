"""Test two states of one step: saved, replaced without a step, and saved again. Their mix is never called exact."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import torch

import scarctl
from scarctl.distributed.resume_step import RankState, agree_on_step
from scarctl.recovery.reshard import find_parts
from scarctl.recovery.shared_plan import plan_lost, plans_back
from scarctl.recovery.shares import open_shares
from scarctl.store import Store, complete_sets
from tests.session.counting import Counting
from tests.support import stepper
from tests.support.ranks import RankStore
from tests.support.training import drained

ROWS, STEP = 16, 5


class Numbers(Counting):
    """A table whose every value shows its state."""

    def __init__(self, store: Path, **options: Any) -> None:
        super().__init__(store, ROWS, **{"fraction": 0.5, **options})

    def states(self) -> set[float]:
        return set(self.x.ravel().tolist())


def test_a_snapshot_of_the_second_state_of_a_step(tmp_path: Path) -> None:
    run = Numbers(tmp_path / "store")
    run.train(STEP)
    run.session.snapshot("first")
    run.x[:] = 100
    run.session.snapshot("second")
    run.x[:] = 7
    run.session.close()
    for name, value in (("first", 5.0), ("second", 100.0)):
        again = Numbers(tmp_path / "store")
        resumed = again.session.resume(snapshot=name)
        assert (resumed.consistent, again.states()) == (True, {value})
        again.session.close(seal=False)


def test_ranks_that_have_saved_two_states_of_a_step(tmp_path: Path) -> None:
    """The second whole commit has reached only one rank."""
    ranks = RankStore(tmp_path / "s", 3)
    ranks.save(5)
    ranks.save(5, [1], whole="cd" * 16)
    ranks.close()
    store = Store.open(tmp_path / "s")
    (only,) = complete_sets(store)
    assert only.whole == ranks.whole(5)
    state = open_shares(store)
    nothing = [None] * 3
    assert not plan_lost(state, state.everything(), nothing).consistent
    back = next(plans_back(state, nothing, 0, None))
    assert (back.consistent, back.step) == (True, 5)
    parts = find_parts(store)
    assert parts is not None
    assert parts.whole == ""


def test_ranks_at_one_step_agree_that_their_states_are_not_one() -> None:
    one, other = (RankState(5, True, whole=name * 16) for name in ("ab", "cd"))
    assert agree_on_step([one, one]).label.of_one
    assert not agree_on_step([one, other]).label.of_one
    nothing = RankState(5, survived=False, owns=False)
    assert agree_on_step([one, one, nothing]).label.of_one


def test_all_of_an_earlier_step_with_the_extras_of_now_is_not_exact(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with scarctl.attach(
        model, optimizer, store=tmp_path / "s", interval=100, settings=scarctl.Settings(daemon=False)
    ) as session:
        session.resume()
        for step in range(1, 8):
            optimizer.zero_grad()
            model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
            if step == 5:
                session.checkpoint(full=True, wait=True)
        report = session.recover("all")
        assert report.step == 5
        assert not report.consistent
        session.checkpoint(full=True, wait=True)
        assert session.recover("all").consistent


def life(store: Path, arena: Path, steps: int, mode: Literal["partial", "auto"] = "auto") -> scarctl.Session:
    """Resume with new memory, and take these steps."""
    arena.mkdir()
    model, optimizer = stepper.build()
    session = stepper.attach(model, optimizer, str(store), arena_dir=str(arena), daemon=False)
    session.resume(mode=mode)
    for _ in range(steps):
        optimizer.step()
        session._saving.finish()
        drained([session])  # the store gets a part of every step that it is due one
    return session


def test_saving_a_mixed_state_again_without_a_step_does_not_make_it_consistent(tmp_path: Path) -> None:
    session = life(tmp_path / "first", tmp_path / "a", 12)
    shutil.copytree(tmp_path / "first", tmp_path / "s")
    session.close()
    reasons = []
    for name in "bcde":
        session = life(
            tmp_path / "s", tmp_path / name, int(name == "d"), "partial" if name == "b" else "auto"
        )
        assert session.resumed is not None
        reasons.append(session.resumed.reasons)
        session.close()
    mixed = ("partitions are of several steps",)
    again = ("it was restored like this, and no step has ended since: partitions are of several steps",)
    assert reasons == [mixed, again, again, ()], "the last but one life has taken a step"
