"""Test that all commands label a state as a session that resumes from it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import scarctl
from scarctl.arena.extras import write_extras
from scarctl.errors import ScarError
from scarctl.state.caveats import Caveat
from scarctl.state.extras import Notes
from scarctl.store import complete_sets, create_snapshot
from tests.cli.conftest import Run
from tests.support.ranks import RankStore

DIFFERED, UNKNOWN = "ranks had different values", "cannot be read, so that it may not be consistent"
ALL = ("recover", "--store", "store", "--lost", "all")


def labels(document: dict[str, Any]) -> bool:
    """Return whether a document calls its state consistent. It has reasons if not."""
    assert document["consistent"] is not bool(document["reasons"])
    return bool(document["consistent"])


CAVEAT = Caveat("ranks-differ", "one rank says so")


@pytest.mark.parametrize(
    ("notes", "says"),
    [
        ({}, []),
        ({0: Notes(common={"0,1": "a"}), 1: Notes(common={"0,1": "a"})}, []),
        ({0: Notes(common={"0,1": "a"}), 1: Notes(common={"0,1": "b"})}, [DIFFERED]),
        ({3: Notes(caveats=(CAVEAT,))}, ["one rank says so"]),
        ({3: Notes(caveats=(Caveat("kind", "a note"),))}, []),
    ],
)
def test_the_reasons_of_all_ranks(run: Run, tmp_path: Path, notes: dict[int, Notes], says: list[str]) -> None:
    """Caveats of other states, older or newer ones, say nothing about this one."""
    ranks = RankStore(tmp_path / "store")
    ranks.save(
        4, notes={rank: Notes(caveats=(Caveat("ranks-differ", "of an older state"),)) for rank in range(4)}
    )
    ranks.save(5, notes=notes)
    ranks.close()
    create_snapshot(ranks.store, "kept", complete_sets(ranks.store)[0])
    for words in (
        ("recover", "--lost", "rank:1", "--output", "a.pt"),
        ("recover", "--lost", "all", "--mode", "rollback", "--output", "b.pt"),
        ("export", "c"),
    ):
        document = run(*words, "--store", "store", "--json").document
        assert labels(document) is not says
        assert all(text in reason for text, reason in zip(says, document["reasons"], strict=True))
    again = RankStore(tmp_path / "store")
    again.save(
        6, notes={rank: Notes(caveats=(Caveat("ranks-differ", "of a newer state"),)) for rank in range(4)}
    )
    again.close()
    kept = run("export", "--store", "store", "d", "--snapshot", "kept", "--json").document
    assert labels(kept) is not says
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
    assert labels(done) is False
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
    assert labels(document) is False
    (reason,) = document["reasons"]
    assert UNKNOWN in reason
    assert "damaged" in reason
    text = run("recover", "--store", "store", "--lost", "all", "--output", "a.pt").stdout
    assert "step 5, mixed: what was saved" in text


def test_a_mix_of_steps_has_a_reason(run: Run, tmp_path: Path) -> None:
    ranks = RankStore(tmp_path / "store", 2)
    ranks.save(5)
    ranks.save(6, every=2)
    ranks.close()
    document = run("recover", "--store", "store", "--lost", "all", "--output", "a.pt", "--json").document
    assert labels(document) is False
    assert document["reasons"] == ["partitions are of several steps"]


@pytest.mark.parametrize("there", [True, False])
def test_what_is_in_memory_alone_has_its_caveats_there(run: Run, tmp_path: Path, there: bool) -> None:
    """The ranks died before the store had their seal. Without its extras nothing has the caveats."""
    ranks = RankStore(tmp_path / "store", 2)
    ranks.save(4)
    ranks.close()
    for rank in range(2):
        arena = ranks.arena(tmp_path, rank, 5)
        if there:
            slot, notes = arena.slot, Notes(caveats=(CAVEAT,))
            write_extras(arena.folder, slot.number, slot.moment, notes.to_tree())
        arena.close()
    document = run(*ALL, "--arena-dir", tmp_path, "--output", "a.pt", "--json").document
    assert document["tiers"].keys() == {"memory"}
    assert (document["step"], labels(document)) == (5, False)
    (reason,) = document["reasons"]
    assert reason == CAVEAT.message if there else UNKNOWN in reason


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
    with pytest.raises(ScarError, match="not finite"):
        session.checkpoint(wait=True)
    with torch.no_grad():
        model.weight[1] = 0.0
    session.checkpoint(full=True, wait=True)
    session.close()
