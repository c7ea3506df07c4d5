"""Test that no command calls a state exact that a session which resumes from it would not: caveats are read by all."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

import scarctl
from scarctl.arena.queue import HandOverQueue
from scarctl.errors import ScarError
from scarctl.ops.survey import survey
from scarctl.state.caveats import Caveat
from scarctl.state.extras import Notes
from scarctl.state.version import pack
from scarctl.store import Store, complete_sets, create_snapshot
from tests.cli.conftest import Run
from tests.distributed.launch import launch
from tests.loops.test_changed_afterwards import STEPS, scaled
from tests.loops.test_changed_afterwards import Run as Training
from tests.session.serving import Server, raises, resumed, sigterm, waits
from tests.support.process import Forked, Tell
from tests.support.ranks import RankStore

REPLACED, RAISED = "in place of its parameters", "has raised an exception"
DIFFERED, UNKNOWN = "ranks had different values", "cannot be read, so that it may not be exact"
ALL = ("recover", "--store", "store", "--lost", "all")
BACK = (*ALL, "--mode", "rollback")


def labels(document: dict[str, Any]) -> tuple[bool, bool]:
    """Return what a document says of its state: exact, and whole. Reasons are there exactly if it is not exact."""
    assert document["exact"] == (not document["reasons"])
    return document["exact"], document["whole"]


def test_a_snapshot_of_an_average(run: Run, tmp_path: Path) -> None:
    """Weights were replaced while it was saved. The state after it is exact, as is its label."""
    first = Training(tmp_path / "store")
    first.train(ours=False)
    trained = first.state()
    scaled(first.model)
    first.session.snapshot("average")
    first.model.load_state_dict(trained)
    first.session.close(seal=False)
    words = (*BACK, "--snapshot", "average", "--output")
    planned = run(*words, "plan.pt", "--dry-run", "--json").document
    done = run(*words, "back.pt", "--json").document
    exported = run("export", "--store", "store", "out", "--snapshot", "average", "--json").document
    for document in (planned, done, exported):
        assert labels(document) == (False, True)
        assert document["step"] == STEPS
        assert REPLACED in "; ".join(document["reasons"])
    text = run(*words, "text.pt").stdout
    assert f"all copies are of step {STEPS}; not exact: " in text
    assert REPLACED in text
    assert "the state is exact" not in text
    text = run("export", "--store", "store", "text", "--snapshot", "average").stdout
    assert f": of step {STEPS}, not exact: " in text


def test_what_is_lost_of_a_state_that_an_iteration_left_half_changed(run: Run, tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        server = Server(tmp_path / "store")
        server.serve(3)
        server.session.checkpoint(full=True, wait=True)
        raises(server)
        tell("ready")
        waits()

    sigterm(body)
    found, _, _ = resumed(tmp_path / "store")
    assert (found.exact, found.whole) == (False, False)
    part = ("recover", "--store", "store", "--lost", "table[0:4]")
    done = run(*part, "--output", "part.pt", "--json").document
    assert (done["step"], *labels(done)) == (3, False, False)
    assert "no commit has the whole state" in done["reasons"][0]
    assert "step 3; not exact: all copies are of this step, but" in run(*part, "--output", "b.pt").stdout
    assert labels(run("export", "--store", "store", "out", "--json").document) == (False, False)


def test_what_is_lost_of_a_state_that_changed_outside_of_blocks(run: Run, tmp_path: Path) -> None:
    """Its last copies are only in this host's memory when the process is killed: a hand-over has the caveat."""

    def body(tell: Tell) -> None:
        server = Server(tmp_path / "store")
        server.serve(3)
        server.session.checkpoint(full=True, wait=True)
        server.session._started().saver.stop()
        server.table[:] *= 2
        server.session.checkpoint(full=True)
        tell("ready")
        waits()

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    part = ("recover", "--store", "store", "--lost", "table[0:4]")
    near = run(*part, "--output", "near.pt", "--json").document
    assert near["tiers"] == {"memory": 4}
    found, values, _ = resumed(tmp_path / "store")
    assert (found.exact, found.whole, values) == (False, True, [6.0])
    far = run(*part, "--output", "far.pt", "--json").document
    assert far["tiers"] == {"store": 4}
    for done in (near, far):
        assert labels(done) == (False, True)
        assert done["reasons"] == list(found.reasons)
    text = run(*part, "--output", "text.pt").stdout
    assert f"all copies are of step 3; not exact: {found.reasons[0]}" in text
    assert labels(run("export", "--store", "store", "out", "--json").document) == (False, True)


def test_the_state_after_the_next_block_is_exact_again(run: Run, tmp_path: Path) -> None:
    server = Server(tmp_path / "store")
    server.serve(3)
    raises(server)
    server.serve()
    server.session.checkpoint(full=True, wait=True)
    server.session.close()
    assert resumed(tmp_path / "store")[0].exact
    for words in (
        (*ALL, "--output", "a.pt"),
        (*BACK, "--output", "b.pt"),
        ("export", "--store", "store", "c"),
    ):
        assert labels(run(*words, "--json").document) == (True, True)
    assert "the state is exact, of step 4" in run(*BACK, "--output", "text.pt").stdout


@pytest.mark.parametrize(
    ("optimizer", "steps", "exact"), [("SGD", 31, False), ("SGD", 30, True), ("one tensor", 31, False)]
)
def test_ranks_that_had_other_values(
    run: Run, tmp_path: Path, optimizer: str, steps: int, exact: bool
) -> None:
    """Between two averages, at one, and with a rank that owns nothing. Only the seals of all ranks show it."""
    launch("tests.distributed.averages:flushed", 2, str(tmp_path), optimizer, steps)
    for words in (
        (*ALL, "--output", "a.pt"),
        (*BACK, "--output", "b.pt"),
        ("export", "--store", "store", "c"),
    ):
        document = run(*words, "--json").document
        assert labels(document) == (exact, True)
        assert document["step"] == steps
        assert (DIFFERED in "; ".join(document["reasons"])) is not exact


CAVEAT = Caveat("kind", "one rank says so")


@pytest.mark.parametrize(
    ("notes", "says"),
    [
        ({}, []),
        ({0: Notes(common={"0,1": "a"}), 1: Notes(common={"0,1": "a"})}, []),
        ({0: Notes(common={"0,1": "a"}), 1: Notes(common={"0,1": "b"})}, [DIFFERED]),
        ({3: Notes(caveats=(CAVEAT,))}, ["one rank says so"]),
        ({3: Notes(caveats=(Caveat("kind", "a note", inexact=False),))}, []),
    ],
)
def test_the_reasons_of_all_ranks(run: Run, tmp_path: Path, notes: dict[int, Notes], says: list[str]) -> None:
    """Caveats of other states, older or newer ones, say nothing about this one."""
    ranks = RankStore(tmp_path / "store")
    ranks.save(4, notes={rank: Notes(caveats=(Caveat("older", "of an older state"),)) for rank in range(4)})
    ranks.save(5, notes=notes)
    ranks.close()
    create_snapshot(ranks.store, "kept", complete_sets(ranks.store)[0])
    for words in (
        ("recover", "--lost", "rank:1", "--output", "a.pt"),
        ("recover", "--lost", "all", "--mode", "rollback", "--output", "b.pt"),
        ("export", "c"),
    ):
        document = run(*words, "--store", "store", "--json").document
        assert labels(document) == (not says, True)
        assert all(text in reason for text, reason in zip(says, document["reasons"], strict=True))
    again = RankStore(tmp_path / "store")
    again.save(6, notes={rank: Notes(caveats=(Caveat("newer", "of a newer state"),)) for rank in range(4)})
    again.close()
    kept = run("export", "--store", "store", "d", "--snapshot", "kept", "--json").document
    assert labels(kept) == (not says, True)
    assert run("export", "--store", "store", "e", "--json").document["reasons"] == ["of a newer state"]


def test_the_survivors_of_a_state_that_is_not_exact(run: Run, tmp_path: Path) -> None:
    """A rank's arena is filled again: all is of one commit again, and has the caveats of that commit."""
    ranks = RankStore(tmp_path / "store", 2)
    ranks.save(5, notes={1: Notes(caveats=(CAVEAT,))})
    ranks.close()
    for rank in range(2):
        ranks.arena(tmp_path, rank, 5).close()
    words = ("recover", "--store", "store", "--arena-dir", tmp_path, "--lost", "rank:0", "--json")
    done = run(*words).document
    assert labels(done) == (False, True)
    assert done["reasons"] == [CAVEAT.message]


def test_caveats_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    """The copies are intact, and whether they are exact is not known."""
    ranks = RankStore(tmp_path / "store", 2)
    ranks.save(5, notes={1: Notes(caveats=(CAVEAT,))})
    ranks.close()
    damaged = 0
    for path in (tmp_path / "store").rglob("seg/*"):
        data = path.read_bytes()
        damaged += data.count(b"one rank says so")
        path.write_bytes(data.replace(b"one rank says so", b"ome rank says so"))
    assert damaged == 1
    document = run("export", "--store", "store", "out", "--json").document
    assert labels(document) == (False, True)
    (reason,) = document["reasons"]
    assert UNKNOWN in reason
    assert "damaged" in reason
    text = run("recover", "--store", "store", "--lost", "all", "--output", "a.pt").stdout
    assert "all copies are of step 5; not exact: the caveats" in text


def test_a_mix_of_steps_has_a_reason(run: Run, tmp_path: Path) -> None:
    ranks = RankStore(tmp_path / "store", 2)
    ranks.save(5)
    ranks.save(6, every=2)
    ranks.close()
    document = run("recover", "--store", "store", "--lost", "all", "--output", "a.pt", "--json").document
    assert labels(document) == (False, False)
    assert document["reasons"] == ["partitions are of several steps"]


@pytest.mark.parametrize("mode", ["partial", "rollback"])
def test_a_recovery_in_the_process(tmp_path: Path, mode: Any) -> None:
    """Its report, and the journal, which `scarctl report` shows."""
    server = Server(tmp_path / "store")
    server.serve(3)
    server.table[:] *= 2  # outside of the blocks
    server.session.checkpoint(full=True, wait=True)
    found = server.session.recover("table[0:4]", mode=mode)
    assert (found.exact, found.whole) == (False, True)
    assert "outside" in "; ".join(found.reasons)
    server.session.checkpoint(full=True, wait=True)
    server.session.close()
    again, _, _ = resumed(tmp_path / "store")
    assert (again.exact, again.whole) == (False, True)
    assert again.report is not None
    assert (again.report.exact, again.report.whole) == (False, True)
    assert set(again.reasons) <= set(again.report.reasons)
    last = Server(tmp_path / "store")
    last.session.resume()
    last.serve()
    last.session.close()
    events = {event.kind: event.facts for event in survey(Store.open(tmp_path / "store"), None).events}
    for kind in ("recovered", "resumed"):
        assert (events[kind]["exact"], events[kind]["whole"]) == (False, True), kind


def test_a_recovery_from_an_exact_state_is_exact(tmp_path: Path) -> None:
    server = Server(tmp_path / "store")
    server.serve(3)
    server.session.checkpoint(full=True)
    for mode in ("partial", "rollback"):
        found = server.session.recover("table[0:4]", mode=mode)  # type: ignore[arg-type]
        assert (found.exact, found.whole, found.reasons) == (True, True, ())
    server.session.close()


@pytest.mark.parametrize("there", [True, False])
def test_what_is_in_memory_alone_has_its_caveats_there(run: Run, tmp_path: Path, there: bool) -> None:
    """The ranks died before the store had their seal. Without its hand-over nothing has the caveats."""
    ranks = RankStore(tmp_path / "store", 2)
    ranks.save(4)
    ranks.close()
    for rank in range(2):
        arena = ranks.arena(tmp_path, rank, 5)
        if there:
            HandOverQueue(arena.folder).put(
                version=pack(ranks.topology.epoch, 5),
                ids=np.arange(arena.layout.partitions),
                whole=ranks.whole(5),
                extras=Notes(caveats=(CAVEAT,)).to_tree(),
            )
        arena.close()
    document = run(*ALL, "--arena-dir", tmp_path, "--output", "a.pt", "--json").document
    assert document["tiers"].keys() == {"memory"}
    assert (document["step"], *labels(document)) == (5, False, True)
    (reason,) = document["reasons"]
    assert reason == CAVEAT.message if there else UNKNOWN in reason


def test_a_state_file_keeps_the_caveats_of_the_session_before(run: Run, tmp_path: Path) -> None:
    """They are saved again with it, so that a resume and a recovery call it what the command does."""
    server = Server(tmp_path / "store")
    server.serve(3)
    server.table[:] *= 2  # outside of the blocks
    server.session.checkpoint(full=True, wait=True)
    server.session.close()
    save_file({"table": server.table + 1}, tmp_path / "state.safetensors")
    words = ("checkpoint", tmp_path / "state.safetensors", "--store", "store", "--policy", "full", "--step")
    planned = run(*words, 7, "--dry-run", "--json").document
    done = run(*words, 7, "--json").document
    restored = run(*ALL, "--output", "a.pt", "--json").document
    for document in (planned, done, restored):
        assert (document["step"], *labels(document)) == (7, False, True)
        assert document["reasons"] == restored["reasons"]
    assert f"; the whole state is of this step, not exact: {done['reasons'][0]}" in run(*words, 8).stdout


# -- a seal that was asked for -------------------------------------------------------------------------------------


def trained(store: Path) -> tuple[nn.Module, scarctl.Session]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = scarctl.attach(model, optimizer, store=store, interval=1000)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    session.checkpoint(full=True, wait=True)
    with torch.no_grad():
        model.weight[1] = np.nan
    return model, session


def test_a_whole_checkpoint_that_cannot_be_sealed_raises(tmp_path: Path) -> None:
    """It promises the whole state, sealed and durable. The last seal stays the one to go back to."""
    model, session = trained(tmp_path / "store")
    with pytest.raises(ScarError, match="step 3 could not be sealed: values are not finite") as caught:
        session.checkpoint(full=True, wait=True)
    assert caught.value.kind == "not-sealed"
    with pytest.raises(ScarError, match="not finite") as caught:
        session.snapshot("best")
    assert caught.value.kind == "not-sealed"
    assert complete_sets(session.store)[0].step == 3
    session.checkpoint(wait=True)  # a part promises nothing about the rest
    with torch.no_grad():
        model.weight[1] = 0.0
    session.checkpoint(full=True, wait=True)
    session.close()


def test_without_waiting_it_warns_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, session = trained(tmp_path / "store")
    for count in (1, 2):
        session.checkpoint(full=True)
        said = [one for one in caplog.records if "step 3 is not saved as a whole" in one.getMessage()]
        assert [one.levelno for one in said] == [logging.WARNING] * count
        assert "values are not finite" in said[-1].getMessage()
    with torch.no_grad():
        model.weight[1] = 0.0
    session.close()
