"""Test that an arena is used only if the store still has the line that the arena noted."""

from __future__ import annotations

import logging
import shutil
import uuid
from pathlib import Path

import numpy as np
import pytest

from scarctl.arena import kinship
from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.arena.stale import reap, survey
from scarctl.daemon.server import Daemon
from scarctl.errors import Fenced, Unavailable
from scarctl.persist.saver import LocalSaver
from scarctl.persist.thread import Current
from scarctl.state.version import pack, step_of
from scarctl.store import Store, open_writer, sealed_sets
from scarctl.store.prune import Retention, plan_prune, prune
from tests.daemon.rig import copy_into, small_layout
from tests.daemon.trainer import Trainer

pytestmark = pytest.mark.leaves_arena
LAYOUT = small_layout()
EVERYTHING = np.arange(LAYOUT.partitions)


class Host:
    """The saving side of a session, with a thread that saves."""

    def __init__(self, folder: Path, base: Path, shards: int = 2) -> None:
        self.store = Store.create(str(folder), shards=shards)
        self.folder = arena_folder(str(base), self.store.run_id)
        self.saver = LocalSaver(self.store)
        self.saver.claim()
        try:
            self.arena = kinship.arena_for(self.folder, LAYOUT, self.store)
            self.saver.open(self.arena)
            self.saver.resume()
        except BaseException:
            self.saver.close()
            self.store.close()
            raise

    def save(self, step: int, *, wait: bool = True, sealed: bool = True) -> None:
        version, whole = pack(self.arena.epoch, step), uuid.uuid4().hex if sealed else ""
        assert copy_into(
            self.arena, EVERYTHING, version, step, whole=whole, extras={"step": step}, flush=True
        )
        self.arena.reach(step)
        self.arena.ask(whole=True)
        if wait:
            self.saver.notify()
            assert self.saver.drain(20), self.saver.fault()

    @property
    def step(self) -> int:
        """Return the step of the copies in memory, -1 without copies."""
        (step,) = set(step_of(self.arena.newest()).tolist())
        return int(step)

    def die(self) -> Path:
        """Leave everything as it is; return the arena's folder."""
        self.arena.take_over(0x7FFFFFF0)
        self.saver.close(Current.INTERRUPT)
        self.arena.close()
        self.store.close()
        return self.folder


def died_at(folder: Path, base: Path, *, pending: int = 0) -> Path:
    """Run until step 1 is sealed, with step `pending` only in memory. Return the arena's folder."""
    host = Host(folder, base)
    host.save(1)
    if pending:
        host.saver.stop()
        host.save(pending, wait=False)
    return host.die()


def save_elsewhere(folder: Path, base: Path, step: int) -> None:
    base.mkdir(exist_ok=True)
    host = Host(folder, base)
    host.save(step)
    host.die()


def test_a_prune_contradicts_nothing(arena_dir: Path, tmp_path: Path) -> None:
    """This also holds if the record that the arena noted is collected."""
    host = Host(tmp_path / "run", arena_dir)
    for step in range(1, 5):
        host.save(step)
    host.saver.stop()
    host.save(5, wait=False)
    host.die()
    store = Store.open(tmp_path / "run")
    prune(store, plan_prune(store, Retention()))
    store.close()
    assert len(store.log(0).logs()) == 2
    host = Host(tmp_path / "run", arena_dir)
    assert host.step == 5
    host.die()


def test_an_opening_contradicts_nothing(arena_dir: Path, tmp_path: Path) -> None:
    died_at(tmp_path / "run", arena_dir, pending=2)
    (tmp_path / "b").mkdir()
    Host(tmp_path / "run", tmp_path / "b").die()
    host = Host(tmp_path / "run", arena_dir)
    assert host.step == 2
    host.die()


@pytest.mark.parametrize("by", ["a commit", "a roll-back", "a backup"])
def test_what_was_contradicted_is_set_aside_and_said(
    arena_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    if by == "a backup":
        shutil.rmtree(died_at(tmp_path / "run", arena_dir))
        shutil.copytree(tmp_path / "run", tmp_path / "backup")
    folder = died_at(tmp_path / "run", arena_dir, pending=3)
    if by == "a commit":
        save_elsewhere(tmp_path / "run", tmp_path / "b", 2)
    elif by == "a roll-back":
        store = Store.open(tmp_path / "run")
        with open_writer(store, layout=LAYOUT) as writer:
            writer.roll_back(sealed_sets([writer.state])[0].seqs[0])
        store.close()
    else:
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "backup", tmp_path / "run")
    assert [(s.foreign, s.durable) for s in survey(folder.parent)] == [(True, False)]
    assert reap(folder.parent) == []
    store = Store.open(tmp_path / "run")
    assert kinship.view_of(str(arena_dir), store) is None
    assert kinship.open_stopped(str(arena_dir), store) is None
    assert "are not shown" in caplog.text
    caplog.clear()
    host = Host(tmp_path / "run", arena_dir)
    assert host.step == -1
    assert [r.levelno for r in caplog.records if "set aside" in r.message] == [logging.WARNING]
    host.die()
    aside = folder.with_name(folder.name + kinship.ASIDE)
    assert [Path(s.folder) for s in survey(folder.parent) if s.aside] == [aside]
    assert aside in [Path(s.folder) for s in reap(folder.parent)]
    assert not aside.exists()


def test_damaged_memory_is_set_aside_and_the_run_goes_on(
    arena_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = died_at(tmp_path / "run", arena_dir, pending=2)
    with (folder / "arena").open("r+b") as file:
        file.write(bytes(4096))
    host = Host(tmp_path / "run", arena_dir)
    assert not host.arena.intact().any()
    (said,) = [record for record in caplog.records if "set aside" in record.getMessage()]
    assert said.levelno == logging.WARNING
    assert "its header is not valid" in said.getMessage()
    host.save(3)
    assert host.step == 3
    host.die()
    assert (folder.with_name(folder.name + kinship.ASIDE) / "arena").exists()


def test_what_was_set_aside_gives_way_where_there_is_no_room(
    arena_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = died_at(tmp_path / "run", arena_dir, pending=3)
    save_elsewhere(tmp_path / "run", tmp_path / "b", 2)
    aside, create = folder.with_name(folder.name + kinship.ASIDE), Arena.create

    def full(*args: object, **options: object) -> Arena:
        if aside.exists():
            raise Unavailable("no room", kind="arena-full")
        return create(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Arena, "create", full)
    Host(tmp_path / "run", arena_dir).die()
    assert not aside.exists()


def test_a_process_killed_between_a_commit_and_noting_it_keeps_its_memory(
    arena_dir: Path, tmp_path: Path
) -> None:
    host = Host(tmp_path / "run", arena_dir)
    host.save(1)
    before = host.arena.line
    # As if the process died between the two.
    host.arena.note = lambda own: None  # type: ignore[method-assign]
    host.save(2, sealed=False)
    folder = host.die()
    arena = Arena.open_existing(folder, run_id=host.store.run_id)
    assert arena is not None
    assert arena.line == before
    arena.close()
    again = Host(tmp_path / "run", arena_dir)
    assert again.step == 2
    again.die()


def test_a_copy_has_a_memory_of_its_own_also_while_both_run(
    daemon: Daemon, arena_dir: Path, tmp_path: Path
) -> None:
    Trainer(tmp_path / "run", arena_dir).close()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    one, other = Trainer(tmp_path / "run", arena_dir), Trainer(tmp_path / "copy", arena_dir)
    one.save(one.everything, 3, sealed=True)
    other.save(other.everything, 5, sealed=True)
    one.drained()
    other.drained()
    assert (set(one.stored()[1]), set(other.stored()[1])) == ({3}, {5})
    assert one.arena.folder != other.arena.folder
    other.die()
    one.die()
    again = Trainer(tmp_path / "run", arena_dir)
    assert set(step_of(again.arena.newest()).tolist()) == {3}
    again.close()
    Trainer(tmp_path / "copy", arena_dir).close()


def test_memory_of_a_store_that_was_moved_is_not_used_but_said(
    arena_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    died_at(tmp_path / "run", arena_dir, pending=2)
    host = Host((tmp_path / "run").rename(tmp_path / "moved"), arena_dir)
    assert host.step == -1
    (record,) = (r for r in caplog.records if "are not used" in r.message)
    assert record.levelno == logging.WARNING
    assert f"of the store in {tmp_path / 'run'}," in record.message
    host.die()


def test_whoever_is_not_of_the_line_fences_nobody(arena_dir: Path, tmp_path: Path) -> None:
    """A saver that opens an old arena must not claim a term, because another process saves."""
    folder = died_at(tmp_path / "run", arena_dir, pending=3)
    save_elsewhere(tmp_path / "run", tmp_path / "b", 2)
    store = Store.open(tmp_path / "run")
    epoch = store.state(0).epoch
    arena = Arena.share(folder, run_id=store.run_id)
    assert arena is not None
    with pytest.raises(Fenced):
        LocalSaver(store).open(arena)
    assert store.state(0).epoch == epoch
    store.close()


def test_links_to_a_store_are_the_same_place(tmp_path: Path) -> None:
    Store.create(tmp_path / "run").close()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert Store.open(tmp_path / "link").run_id == Store.open(tmp_path / "run").run_id
    assert Store.open(tmp_path / "run").run_id[:33] == Store.open(tmp_path / "run").id + "."
