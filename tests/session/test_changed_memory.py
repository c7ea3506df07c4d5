"""Test bytes that change in memory after they were written: never restored if the store has the same copy."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.ops.recover import RecoverSettings, recover
from scarctl.ops.survey import survey
from scarctl.store import Store
from tests.session.flushed import MORE, STEPS
from tests.support.process import Forked, Tell
from tests.support.training import Loop, differing

EMBEDDING, MOMENT = ("embed.weight", ""), ("out.weight", "exp_avg")


@pytest.fixture
def store(tmp_path: Path, warm_torch: None) -> Path:
    """Return the store of a run that was killed after a seal. Its memory has everything that the store has."""

    def body(tell: Tell) -> None:
        loop = Loop(tmp_path / "store", interval=2)
        loop.train(STEPS)
        loop.session.checkpoint(full=True, wait=True)
        os.kill(os.getpid(), signal.SIGKILL)

    with Forked(body) as child:
        assert child.wait() == -signal.SIGKILL
    return tmp_path / "store"


def opened(store: Path, arena_dir: Path) -> Arena:
    run_id = Store.open(str(store)).run_id
    arena = Arena.open_existing(arena_folder(str(arena_dir), run_id), run_id=run_id)
    assert arena is not None
    return arena


def flip(store: Path, arena_dir: Path, *tensors: tuple[str, str]) -> None:
    """Change one bit of each of these tensors in memory, as a faulty memory module would."""
    arena = opened(store, arena_dir)
    for name, slot in tensors:
        g = next(g for g, group in enumerate(arena.layout.groups) if group.name == name)
        t = next(t for t, spec in enumerate(arena.layout.groups[g].tensors) if spec.slot == slot)
        arena.rows(g, t)[0, 1] ^= 4
    arena.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    return (r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


@pytest.mark.parametrize("mode", ["partial", "rollback"])
def test_the_stores_copy_is_taken_instead(
    store: Path,
    arena_dir: Path,
    mode: str,
    expected: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    flip(store, arena_dir, EMBEDDING, MOMENT)
    loop = Loop(store, seed=99)
    resumed = loop.session.resume(mode)
    assert (resumed.step, resumed.consistent) == (STEPS, True)
    assert resumed.report is not None
    assert resumed.report.tiers["store"] == 2
    assert not resumed.report.degraded
    (fault,) = resumed.report.problems
    assert fault.startswith("embed.weight[0:2], out.weight[0:2]: ")
    assert "this host's memory" in fault
    assert fault in warnings_of(caplog)
    loop.train(MORE)
    assert differing(loop.state(), expected) == []
    loop.session.close()
    # Later checkpoints keep it, and their resume is still exact.
    assert fault in [caveat.message for caveat in survey(Store.open(str(store)), None).caveats]
    after = Loop(store)
    assert after.session.resume().consistent
    after.session.close()


def test_a_file_gets_the_stores_copy(store: Path, arena_dir: Path, tmp_path: Path) -> None:
    """`scarctl recover` reads the memory of a stopped run, and leaves it unchanged."""
    arena = opened(store, arena_dir)
    right = arena.rows(0, 0).tobytes()
    arena.close()
    flip(store, arena_dir, EMBEDDING)
    done = recover(
        RecoverSettings(
            store=str(store), lost=("embed.weight",), output=tmp_path / "x.pt", arena_dir=str(arena_dir)
        )
    )
    assert (done.plan.consistent, done.plan.to_json()["tiers"]) == (True, {"memory": 31, "store": 1})
    assert len(done.problems) == 1
    assert torch.load(tmp_path / "x.pt")["embed.weight"].numpy().tobytes() == right
    arena = opened(store, arena_dir)
    assert arena.rows(0, 0).tobytes() != right
    arena.remove()
