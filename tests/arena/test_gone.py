"""Test when the store of a dead run counts as gone: never while it may only be away."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.folder import host_folder, note_site
from scarctl.arena.gone import DELETED, REPLACED, why_gone
from scarctl.arena.header import SITE, TOLD
from scarctl.arena.owner import Owner, write_owner
from scarctl.arena.stale import DAY, reap, survey
from scarctl.store import Store
from tests.daemon.rig import copy_into, small_layout

NOBODY = 0x7FFFFFF0
"""A process id that no process has."""


class Run:
    """A dead run with a copy that its store lacks."""

    def __init__(self, tmp_path: Path, arena_dir: Path) -> None:
        self.mount = tmp_path / "mount"
        self.place = self.mount / "runs" / "store"
        self.place.parent.mkdir(parents=True)
        self.store = Store.create(self.place)
        self.base = host_folder(str(arena_dir))
        self.folder = self.base / self.store.run_id
        arena = Arena.create(
            self.folder, small_layout(), run_id=self.store.run_id, epoch=1, place=str(self.place)
        )
        assert copy_into(arena, np.arange(2), 1, 1)
        arena.take_over(NOBODY)
        arena.close()
        note_site(self.folder, self.store)

    def why(self) -> str | None:
        return why_gone(self.folder, str(self.place))


@pytest.fixture
def run(tmp_path: Path, arena_dir: Path) -> Run:
    return Run(tmp_path, arena_dir)


pytestmark = pytest.mark.leaves_arena


def made_again(run: Run) -> None:
    shutil.rmtree(run.place)
    Store.create(run.place)


def emptied(run: Run) -> None:
    for path in run.place.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("remove", "why"),
    [
        (made_again, REPLACED),
        (emptied, DELETED),
        (lambda run: shutil.rmtree(run.place), DELETED),
        (lambda run: shutil.rmtree(run.place.parent), DELETED),
    ],
    ids=["made again", "emptied", "deleted", "deleted with its folder"],
)
def test_gone(run: Run, remove: Callable[[Run], None], why: str) -> None:
    assert run.why() is None
    remove(run)
    assert run.why() == why
    (found,) = survey(run.base)
    assert found.gone == why
    assert reap(run.base, older_than=DAY) == []
    assert [one.folder for one in reap(run.base)] == [str(run.folder)]
    assert not run.folder.exists()


def unmounted(run: Run) -> None:
    """Leave the folder below the mount, which is another one."""
    run.mount.rename(run.mount.with_name("device"))
    run.mount.mkdir()


def unmounted_itself(run: Run) -> None:
    run.place.rename(run.mount / "device")
    run.place.mkdir()


def on_another_device(run: Run) -> None:
    """Remove the mount with its folder, as for a stick."""
    site = json.loads((run.folder / SITE).read_text())
    site["marks"][0][0] += 1
    (run.folder / SITE).write_text(json.dumps(site))
    shutil.rmtree(run.place)


def without_settings(run: Run) -> None:
    (run.place / "scarctl.json").unlink()
    (run.place / "lanes").mkdir()


def a_broken_link(run: Run) -> None:
    run.place.rename(run.mount / "device")
    run.place.symlink_to(run.mount / "nowhere")


def moved_with_a_link(run: Run) -> None:
    run.place.rename(run.mount / "device")
    run.place.symlink_to(run.mount / "device")


def never_noted(run: Run) -> None:
    (run.folder / SITE).unlink()
    shutil.rmtree(run.place)


def never_noted_and_made_again(run: Run) -> None:
    (run.folder / SITE).unlink()
    made_again(run)


def malformed(run: Run) -> None:
    (run.folder / SITE).write_text('{"path": "/", "marks": [[0]]}')
    shutil.rmtree(run.place)


def a_replica(run: Run) -> None:
    write_owner(run.folder, Owner("other", "s" * 32, 1))
    shutil.rmtree(run.place)


@pytest.mark.parametrize(
    "leave",
    [
        unmounted,
        unmounted_itself,
        on_another_device,
        without_settings,
        a_broken_link,
        moved_with_a_link,
        never_noted,
        never_noted_and_made_again,
        malformed,
        a_replica,
    ],
)
def test_away(run: Run, leave: Callable[[Run], None]) -> None:
    leave(run)
    if leave is not a_replica:
        assert run.why() is None
    (found,) = survey(run.base)
    assert found.gone is None
    assert reap(run.base) == []
    assert run.folder.exists()


@pytest.mark.parametrize("error", [PermissionError, OSError])
def test_a_folder_that_cannot_be_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    shutil.rmtree(run.place)
    real = os.lstat

    def refuse(path: str | Path, **options: object) -> os.stat_result:
        if os.fspath(path) == str(run.place):
            raise error(13, "refused")
        return real(path)

    monkeypatch.setattr(os, "lstat", refuse)
    assert run.why() is None


def test_a_store_in_a_linked_folder(tmp_path: Path, arena_dir: Path) -> None:
    """What counts is the folder, not the link."""
    (tmp_path / "big").mkdir()
    (tmp_path / "mount").symlink_to(tmp_path / "big")
    run = Run(tmp_path, arena_dir)
    assert run.why() is None
    run.mount.unlink()
    assert run.why() is None
    shutil.rmtree(tmp_path / "big" / "runs" / "store")
    assert run.why() == DELETED


def test_a_run_that_goes_on_may_be_told_again(run: Run) -> None:
    (run.folder / TOLD).touch()
    note_site(run.folder, run.store)
    assert not (run.folder / TOLD).exists()
