"""Test that lost parts of a living process are not copied, make no state whole, and come back from before the loss."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from scarctl.errors import NoIntactCopy, ScarError, UsageError
from scarctl.state.version import step_of
from tests.daemon.trainer import assert_sound
from tests.support.training import Loop, differing, drained

pytestmark = pytest.mark.usefixtures("both_savers")

LOST = "out.weight"
SAID = "marked as lost"


def memory(folder: Path, name: str = "memory") -> Path:
    """Return a folder for copies in memory, which exists."""
    (folder / name).mkdir(exist_ok=True)
    return folder / name


def loop_at(folder: Path, steps: int, **options: object) -> Loop:
    """Train so that memory and the store have the state after every step."""
    loop = Loop(folder / "store", arena_dir=memory(folder), **{"interval": 1, "fraction": 1.0, **options})
    loop.train(steps, settle=True)
    return loop


def views(loop: Loop) -> dict[str, torch.Tensor]:
    """Return the live parameters, buffers and moments, by full name."""
    return {
        f"{group.name}/{slot}" if slot else group.name: tensor
        for group in loop.session.adapter.groups()
        for slot, tensor in group.tensors.items()
    }


def spoil(loop: Loop) -> None:
    """Overwrite a parameter and its moments with finite garbage."""
    with torch.no_grad():
        for name, tensor in views(loop).items():
            if name.startswith(LOST) and tensor.is_floating_point():
                tensor.fill_(7.0)


def test_what_is_marked_is_not_copied_and_recover_restores_it_and_clears_the_mark(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_at(tmp_path, 5)
    good = loop.state()
    spoil(loop)
    assert loop.session.mark_lost(LOST) > 0
    assert caplog.text.count(SAID) == 1
    loop.train(2, settle=True)
    engine = loop.session._engine
    assert engine is not None
    lost = engine.layout.match(LOST)
    assert (step_of(engine.arena.version[lost]) <= 5).all()
    assert step_of(engine.arena.newest()).max() == 5, "memory keeps the state before"
    report = loop.session.recover()
    assert report.restored_partitions == lost.size
    assert (report.consistent, report.tiers) == (False, {"memory": lost.size})
    restored = loop.state()
    assert [
        name for name in good if name.startswith(LOST) and not torch.equal(good[name], restored[name])
    ] == []
    assert not engine.marked.ids.size
    loop.train(1, settle=True)
    assert step_of(engine.arena.slot.head) == 8
    loop.session.close()
    assert_sound(tmp_path / "store")


def test_no_way_of_saving_calls_a_state_with_lost_parts_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_at(tmp_path, 4)
    good = loop.state()[LOST]
    with loop.session._gate.held():  # the copy of step 5 is under way until then
        loop.train(1)
        loop.session.mark_lost(LOST)
    spoil(loop)
    assert not loop.session.flush()
    with pytest.raises(ScarError, match=SAID) as error:
        loop.session.checkpoint(full=True, wait=True)
    assert error.value.kind == "not-sealed"
    caplog.clear()
    loop.session.close()
    assert [r.levelno for r in caplog.records if SAID in r.message] == [logging.ERROR]
    again = Loop(tmp_path / "store", arena_dir=memory(tmp_path), seed=9, interval=1, fraction=1.0)
    resumed = again.session.resume(mode="partial")
    assert (resumed.step, resumed.consistent) == (4, True)
    assert torch.equal(again.model.out.weight, good)
    again.session.close()


def test_before_passes_over_newer_copies_in_memory_and_takes_the_stores(tmp_path: Path) -> None:
    loop = loop_at(tmp_path, 4)
    loop.session.checkpoint(full=True, wait=True)  # the store keeps its newest whole state
    good = loop.state()
    spoil(loop)  # nobody has noticed yet
    loop.train(3, settle=True)
    report = loop.session.recover(LOST, before=4)
    assert set(report.tiers) == {"store"}
    assert report.step == 4
    restored = loop.state()
    assert [
        name for name in good if name.startswith(LOST) and not torch.equal(good[name], restored[name])
    ] == []
    kept = {name: tensor for name, tensor in restored.items() if not name.startswith(LOST)}
    assert any(not torch.equal(kept[name], good[name]) for name in kept)
    # What was restored replaces the wrong copies in the store, even if it never changes again.
    loop.session.close()
    again = Loop(tmp_path / "store", arena_dir=memory(tmp_path, "other"), seed=9, interval=1, fraction=1.0)
    again.session.resume()
    assert differing(again.state(), restored) == []
    again.session.close()
    assert_sound(tmp_path / "store")


def test_wrong_requests_change_nothing(tmp_path: Path) -> None:
    loop = loop_at(tmp_path, 6)
    before = loop.state()
    session = loop.session
    with pytest.raises(UsageError, match="matches no group"):
        session.mark_lost("nowhere")
    with pytest.raises(UsageError, match="nothing is marked"):
        session.recover()
    with pytest.raises(UsageError, match="before is -1"):
        session.recover(LOST, before=-1)
    with pytest.raises(UsageError, match="in the future: 6 iterations"):
        session.recover(LOST, before=7)
    with pytest.raises(UsageError, match="mode='rollback'"):
        session.recover(LOST, "rollback", before=3)
    with pytest.raises(NoIntactCopy, match=rf"no copy of step 0 or earlier: {LOST}") as error:
        session.recover(LOST, before=0)
    assert "nothing was changed" in error.value.hint
    assert differing(before, loop.state()) == []
    drained([session])
    session.close()
    assert_sound(tmp_path / "store")
