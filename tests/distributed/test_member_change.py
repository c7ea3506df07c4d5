"""Test that another number of members takes over the state that the previous members have saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scarctl
from scarctl.errors import Contention, Fenced, LayoutMismatch, UsageError
from scarctl.ops.export import ExportSettings, export
from scarctl.store import Store, newest_topology, open_writer, topology_epochs, verify
from scarctl.store.prune import Retention, plan_prune, prune
from tests.support.divided import ROWS, attached, rows_of, run_member, start, state_of, train

ONE = scarctl.Partitioning(rows={"table": 1})


def before(store: Path | str, count: int = 2, steps: int = 3, **options: Any) -> list[int]:
    """Have `count` members train, member k for `steps` + k steps. Return the step of every row."""
    found = []
    for number in range(count):
        run_member(store, number, count, steps + number, **options)
        first, stop = rows_of(number, count)
        found += [steps + number] * (stop - first)
    return found


def after(store: Path | str, count: int, replaces: int | None, **options: Any) -> list[int]:
    """Start `count` members that take over. Return the step of every row."""
    found: list[int] = []
    for number in range(count):
        resumed, steps = run_member(store, number, count, 0, replaces=replaces, **options)
        assert resumed.report is not None or not resumed.consistent, "no state of several members is exact"
        found += steps
    return found


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2)])
def test_each_row_comes_from_the_member_that_had_it(old: int, new: int, tmp_path: Path) -> None:
    rows = before(tmp_path / "s", old)
    assert after(tmp_path / "s", new, old) == rows
    assert after(tmp_path / "s", new, old) == rows, "their own shards have the rows now"
    topology = newest_topology(Store.open(tmp_path / "s"))
    assert topology is not None
    assert (topology.world, topology.epoch) == (new, 2)
    assert topology.shards == tuple(range(old, old + new))
    assert verify(Store.open(tmp_path / "s"), read_data=True).problems == []


def test_steps_and_extras_are_those_of_the_member_of_that_number(tmp_path: Path) -> None:
    for number in range(2):
        state = state_of(number, 2)
        with attached(tmp_path / "s", number, 2, state, interval=1) as session:
            session.resume()
            train(session, state, number, 2, 3 + number)
    steps = [run_member(tmp_path / "s", n, 4, 0, replaces=2)[0].step for n in range(4)]
    # Members 2 and 3 are new. All of their rows belonged to member 1.
    assert steps == [3, 4, 4, 4]


def adam(number: int, count: int, store: Path, replaces: int | None, steps: int) -> Any:
    """Train an embedding that is divided, and a layer of the member's own. Return the model and the optimizer."""
    first, stop = rows_of(number, count)
    torch.manual_seed(number)
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(stop - first, 4), "top": torch.nn.Linear(4, 1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    member = scarctl.Member(number, count, {"table.weight": (first, ROWS)}, replaces)
    with scarctl.attach(model, optimizer, store=store, member=member, interval=1) as session:
        resumed = session.resume()
        there = {name: value.detach().clone() for name, value in model.state_dict().items()}
        slots = [dict(state) for state in optimizer.state_dict()["state"].values()]
        for _ in range(steps):
            optimizer.zero_grad()
            model["top"](model["table"].weight).square().mean().backward()
            optimizer.step()
    return resumed, there, slots, model


def test_slots_follow_their_rows_and_a_new_member_begins_with_its_own_layer(tmp_path: Path) -> None:
    was = [adam(number, 2, tmp_path / "s", None, 3 + number) for number in range(2)]
    whole = torch.cat([model["table"].weight.detach() for *_, model in was])
    stepped = [adam(number, 3, tmp_path / "s", 2, 0) for number in range(3)]
    assert torch.equal(torch.cat([there["table.weight"] for _, there, _, _ in stepped]), whole)
    for number, (resumed, there, slots, _) in enumerate(stepped):
        assert not resumed.consistent
        assert float(slots[0]["step"]) == resumed.step == (3 if number == 0 else 4)
        assert slots[0]["exp_avg"].abs().sum() > 0
        if number < 2:
            assert torch.equal(there["top.weight"], was[number][3]["top"].weight.detach())
            assert slots[1]["exp_avg"].abs().sum() > 0
        else:
            torch.manual_seed(2)
            torch.nn.Embedding(rows_of(2, 3)[1] - rows_of(2, 3)[0], 4)
            assert torch.equal(there["top.weight"], torch.nn.Linear(4, 1).weight.detach())
            assert slots[1]["exp_avg"].abs().sum() == 0
    again = adam(2, 3, tmp_path / "s", None, 2)
    assert (again[0].step, again[0].consistent) == (4, False), "what it took over is a mix"
    again = adam(2, 3, tmp_path / "s", None, 0)
    assert (again[0].step, again[0].consistent) == (6, True)


def test_the_table_is_one_tensor_in_an_export(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    rows = before(tmp_path / "s", 2)
    for count in (2, 3):
        if count == 3:
            after(tmp_path / "s", 3, 2)
        done = export(ExportSettings(store=str(tmp_path / "s"), output=tmp_path / f"{count}.safetensors"))
        assert (done.tensors, done.consistent) == (1, False)
        table = load_file(tmp_path / f"{count}.safetensors")["table"]
        assert (table[:, 0] == np.arange(1, ROWS + 1) * rows).all()


def test_a_member_that_waits_to_take_over_is_named_and_its_rows_stay(tmp_path: Path) -> None:
    rows = before(tmp_path / "s", 2)
    run_member(tmp_path / "s", 0, 3, 2, replaces=2)
    from scarctl.ops.survey import survey

    note = survey(Store.open(tmp_path / "s"), None).note
    assert note is not None
    assert "still hold: 1, 2" in note
    with pytest.raises(scarctl.NoIntactCopy, match="member 1 of 3 has not started yet"):
        export(ExportSettings(store=str(tmp_path / "s"), output=tmp_path / "out"))
    # No shard is retired before all members have taken over.
    store = Store.open(tmp_path / "s")
    assert plan_prune(store, Retention()).retire == ()
    assert [run_member(tmp_path / "s", number, 3, 1)[1] for number in (2, 1)] == [rows[16:], rows[8:16]]
    plan = plan_prune(Store.open(tmp_path / "s"), Retention())
    assert plan.retire == (0, 1)
    prune(Store.open(tmp_path / "s"), plan)
    assert after(tmp_path / "s", 3, None) == [5] * 8 + [step + 1 for step in rows[8:]]
    assert after(tmp_path / "s", 4, 3) == [5] * 8 + [step + 1 for step in rows[8:]]


def test_a_member_that_still_runs_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scarctl.distributed.leftover_arenas.PATIENCE", 0.2)
    state = state_of(1, 2)
    before(tmp_path / "s", 2)
    with attached(tmp_path / "s", 1, 2, state) as session:
        session.resume()
        with pytest.raises(Contention):
            run_member(tmp_path / "s", 0, 3, 0, replaces=2)
        assert topology_epochs(Store.open(tmp_path / "s")) == [1]
        train(session, state, 1, 2, 2)
    assert after(tmp_path / "s", 3, 2) == [3] * 12 + [6] * 12


def test_one_that_begins_while_its_shard_is_taken_over_is_fenced(tmp_path: Path) -> None:
    """The member has compared its number, and begins its epoch after the others have read its shard."""
    rows = before(tmp_path / "s", 2)
    late = state_of(1, 2)
    options = {"daemon": False}
    with attached(tmp_path / "s", 1, 2, late, **options) as session:
        session.store.unlock()  # as on a remote store, which has no lock
        session._saver.close()
        in_other_processes(tmp_path / "s", tmp_path, **options)
        layout = session.store.current_layout()
        assert layout is not None
        with pytest.raises(Fenced, match="3 members have taken over"):
            open_writer(session.store, layout=layout)
        session.close(seal=False)
    assert after(tmp_path / "s", 3, None) == rows


def in_other_processes(store: Path | str, folder: Path, **options: Any) -> None:
    """Start three members that take over from two, and end them."""
    for number in range(3):
        program = start(store, number, 3, 0, folder / f"{number}.err", replaces=2, **options)
        assert program.wait(90) == 0, (folder / f"{number}.err").read_text()


@pytest.mark.parametrize("number", [0, 1])
def test_a_tensor_of_its_own_has_no_heir_when_its_member_ends(number: int, tmp_path: Path) -> None:
    for k in range(2):
        with scarctl.attach({"own": np.zeros(3)}, store=tmp_path / "s", member=(k, 2)) as session:
            session.step()
    with pytest.raises(UsageError, match=r"member 1 has tensors of its own \(own@1\)") as caught:
        scarctl.attach({"own": np.zeros(3)}, store=tmp_path / "s", member=scarctl.Member(0, 1, replaces=2))
    assert caught.value.kind == "members-own-state"
    assert topology_epochs(Store.open(tmp_path / "s")) == [1]
    state = {"own": np.full(3, 7.0)}
    with scarctl.attach(
        state, store=tmp_path / "s", member=scarctl.Member(2 * number, 3, replaces=2)
    ) as session:
        assert session.resume().step == 1
    assert (state["own"] == (7 if number else 0)).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"divided": {"table": (0, 25)}}, r"resized \(24, 2\) -> \(25, 2\)"),
        ({"divided": {"table": (0, ROWS), "other": (0, 5)}}, "tensor 'other' new"),
    ],
)
def test_another_model_changes_nothing(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    rows = before(tmp_path / "s", 2)
    state = state_of(0, 3) | ({"other": np.zeros((5, 2))} if "other" in change["divided"] else {})
    with pytest.raises(LayoutMismatch, match=reason):
        scarctl.attach(state, store=tmp_path / "s", member=scarctl.Member(0, 3, replaces=2, **change))
    assert topology_epochs(Store.open(tmp_path / "s")) == [1]
    assert after(tmp_path / "s", 3, 2) == rows


@pytest.mark.parametrize(
    ("divided", "reason"),
    [
        ({"tabel": (0, 24)}, "did you mean 'table'"),
        ({"table": (20, 24)}, "rows 20 to 28"),
        ({"table": (-1, 24)}, "divided is"),
        ({"table": 24}, "divided is"),
        ([("table", (0, 24))], "divided is"),
    ],
)
def test_a_place_that_does_not_fit_makes_no_store(divided: Any, reason: str, tmp_path: Path) -> None:
    member = scarctl.Member(0, 3, divided)
    with pytest.raises(UsageError) as caught:
        scarctl.attach(state_of(0, 3), store=tmp_path / "s", member=member)
    assert reason in f"{caught.value.message} {caught.value.hint}"
    assert not (tmp_path / "s").exists()


def test_rows_that_two_members_have_are_refused(tmp_path: Path) -> None:
    for number, first in enumerate((0, 10)):
        member = scarctl.Member(number, 2, {"table": (first, ROWS)})
        with scarctl.attach(
            {"table": np.zeros((12, 2))}, store=tmp_path / "s", member=member, partitioning=ONE
        ) as session:
            session.step()
    with pytest.raises(UsageError, match="members 0 and 1 both have row 10 of 'table'"):
        run_member(tmp_path / "s", 0, 3, 0, replaces=2)


def test_members_are_not_replaced_before_each_has_saved(tmp_path: Path) -> None:
    run_member(tmp_path / "s", 0, 2, 3)
    with pytest.raises(UsageError, match="never saved some of the 24 rows of 'table'") as caught:
        run_member(tmp_path / "s", 0, 3, 0, replaces=2)
    assert caught.value.kind == "members-incomplete"
    run_member(tmp_path / "s", 1, 2, 4)
    assert after(tmp_path / "s", 3, 2) == [3] * 12 + [4] * 12


def test_a_store_without_a_state_has_nothing_to_take_over(tmp_path: Path) -> None:
    with attached(tmp_path / "s", 0, 2, state_of(0, 2)):
        pass
    resumed, steps = run_member(tmp_path / "s", 2, 3, 4, replaces=2)
    assert (resumed.step, resumed.consistent, steps) == (0, True, [0] * 8)
    assert run_member(tmp_path / "s", 2, 3, 0)[1] == [4] * 8
