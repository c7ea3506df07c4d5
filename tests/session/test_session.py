"""Test a session with a real training loop and a real store."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import scarctl
import scarctl.errors
from scarctl.errors import Corruption, NoIntactCopy, UsageError
from scarctl.formats.state_file import open_state
from scarctl.ops.checkpoint import CheckpointSettings, checkpoint
from tests.daemon.trainer import assert_sound
from tests.support.places import SECRET, Place
from tests.support.training import Loop, differing, drained

pytestmark = pytest.mark.usefixtures("both_savers")


def test_resume_on_an_empty_store_changes_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store")
    before = loop.state()
    resumed = loop.session.resume()
    assert (resumed.step, resumed.consistent, resumed.report) == (0, True, None)
    assert differing(loop.state(), before) == []
    loop.session.close()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"w": [1, 2]}, "no adapter"),
        ({"w": np.zeros(2), "lr": 0.1}, "not a numpy array"),
        ({"w": np.array(["a"])}, "dtype"),
    ],
)
def test_a_dict_of_other_things(tmp_path: Path, state: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scarctl.attach(state, store=tmp_path / "store")


def test_validate_finds_writes_that_torch_does_not_see(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval=1, fraction=1.0, validate=True, on_error="raise")
    loop.train(2)
    loop.session._saving.finish()
    drained([loop.session])
    under_way_copy = loop.session._saving.worker.submit
    release = []

    def late(call):  # type: ignore[no-untyped-def]
        def delayed():  # type: ignore[no-untyped-def]
            while not release:
                pass
            return call()

        return under_way_copy(delayed)

    loop.session._saving.worker.submit = late  # type: ignore[method-assign]
    loop.train(1)
    expected = loop.model.out.weight.detach().clone()
    loop.model.out.weight.data += 1.0
    release.append(True)
    with pytest.raises(Corruption, match=r"out\.weight"):
        loop.session._saving.finish()
    loop.session._saving.worker.submit = under_way_copy  # type: ignore[method-assign]
    loop.session.recover("out.weight")  # the copy is that of the step, not what was written after it
    assert torch.equal(loop.model.out.weight, expected)
    loop.session.close()
    assert_sound(tmp_path / "store")


def test_a_forked_child_is_inert(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval=1)
    loop.train(3)
    pid = os.fork()
    if pid == 0:  # a data loader's worker that, unusually, trains: nothing of it may be saved
        try:
            torch.set_num_threads(1)
            loop.optimizer.step()
            loop.session.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    expected = loop.state()
    loop.session.close()
    again = Loop(tmp_path / "store")
    assert again.session.resume().step == 3
    assert differing(again.state(), expected) == []
    again.session.close()


def test_an_exception_inside_an_optimizer_step_does_not_seal_half_a_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval=100, hooks="auto")
    loop.train(4)
    loop.session.checkpoint(full=True)
    expected = loop.state()

    def fails() -> torch.Tensor:
        with torch.no_grad():
            loop.model.out.weight += 100.0
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), loop.session:
        loop.optimizer.step(fails)
    again = Loop(tmp_path / "store")
    assert again.session.resume().step == 4
    assert differing(again.state(), expected) == []
    again.session.close()


def test_a_snapshot_of_nothing_is_no_new_run(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store")
    with pytest.raises(UsageError, match="has no snapshot 'five': nothing is saved there"):
        loop.session.resume(snapshot="five")
    loop.session.close()


def test_a_session_shows_its_layout_and_its_adapter(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store")
    with pytest.raises(UsageError, match="before the first step"):
        _ = loop.session.layout
    assert {group.name for group in loop.session.adapter.groups()} >= {"embed.weight", "out.bias"}
    loop.train(1)
    assert [group.name for group in loop.session.layout.groups] == [
        group.name for group in loop.session.adapter.groups()
    ]
    loop.session.close()
    assert loop.session.layout.partitions > 0, "also afterwards"


def test_the_copy_leaves_half_of_the_threads_to_training(tmp_path: Path) -> None:
    found: dict[str, int] = {}

    def norm(live: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> torch.Tensor:
        found["copy"] = torch.get_num_threads()
        return (live[""] - saved[""]).norm(dim=1)

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        loop = Loop(tmp_path / "store", norm=norm, interval=1)
        loop.train(3)
        later = threading.Thread(target=lambda: found.update(later=torch.get_num_threads()))
        later.start()
        later.join()
        loop.session.close()
        assert (torch.get_num_threads(), found) == (4, {"copy": 2, "later": 4})
    finally:
        torch.set_num_threads(before)


def test_rollback_waits_for_a_sealed_state_that_is_on_its_way(tmp_path: Path, both_savers: str) -> None:
    """This includes the first seal: while it is written, the store has nothing complete."""
    loop = Loop(tmp_path / "store", interval=100)
    loop.train(3)
    # Like a slow store.
    loop.session._started().saver.stop()
    loop.session.checkpoint(full=True)
    sealed = loop.state()
    loop.train(4)
    report = loop.session.recover("all", mode="rollback")
    assert (report.consistent, report.step) == (True, 3)
    assert differing(loop.state(), sealed) == []
    loop.session.close()


@pytest.mark.slow
def test_options_that_are_refused_are_not_repeated(s3_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCARCTL_DAEMON", "1")
    odd = {**s3_place.options, "s3_additional_kwargs": {"odd": object()}}
    unknown = {**s3_place.options, "sekret": SECRET}
    for given, said in ((odd, "cannot be sent"), (unknown, "s3:// has no storage option 'sekret'")):
        settings = scarctl.Settings(storage_options=given)
        with pytest.raises(UsageError, match=said) as caught:
            scarctl.attach({"users": np.zeros(4)}, store=s3_place.url, settings=settings)
        assert SECRET not in str(caught.value)


def test_a_store_in_memory_is_saved_by_the_process_itself(usual_saver: None) -> None:
    for trained in (False, True):
        state = {"users": np.zeros((50, 4))}
        with scarctl.attach(state, store=f"memory://{os.getpid()}/run", interval=2) as session:
            assert session.resume().step == (3 if trained else 0)
            for _ in range(session.head_step, 3):
                state["users"] += 0.5
                session.step()
        assert (state["users"] == 1.5).all()


@pytest.mark.leaves_arena
@pytest.mark.parametrize("mode", ["partial", "rollback"])
def test_resuming_says_once_what_restores_it(tmp_path: Path, mode: str) -> None:
    state = {"a": np.ones((64, 32), np.float32)}
    save_file(state, tmp_path / "state.safetensors")
    settings = CheckpointSettings(store=str(tmp_path / "store"), step=4)
    checkpoint(open_state(tmp_path / "state.safetensors"), settings)
    state["a"][:] = 0
    session = scarctl.attach(state, store=tmp_path / "store")
    with pytest.raises(NoIntactCopy) as caught:
        session.resume(mode)
    session.close()
    assert caught.value.message.count("`scarctl recover` restores a run that `scarctl checkpoint` saved") == 1
    assert not state["a"].any()
