"""Run the short form: some power losses, without the most important fsyncs, and the losses that once did harm."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from scarctl.store import Store, delete_snapshot, snapshots, verify
from scarctl.store.snapshot import snapshot_names
from tests.adversarial.disk import Disk, Loss, Recorder
from tests.adversarial.power import History, Run, fail
from tests.adversarial.witness import Violation, Witness, check
from tests.adversarial.workload import Message, Player, name_newest
from tests.support.failpoint import Killed
from tests.support.logs import records

CASES = 20
NEEDED = (
    "commit: file in a/run/lanes/N/seg",
    "commit: folder a/run/lanes/N/seg",
    "commit < create_exclusive: file in a/run/lanes/N/log/N",
    "_sync_visible < create_exclusive: folder a/run/lanes/N/log/N",
)


pytestmark = pytest.mark.usefixtures("soon_full")


@pytest.fixture
def run() -> Iterator[Run]:
    with Run(seed=7) as run:
        yield run


def test_power_losses(run: Run) -> None:
    for number in range(CASES):
        run.case(number)


def test_a_commit_needs_each_of_its_fsyncs(run: Run) -> None:
    """This proves that the test above could fail."""
    history = run.history(0)
    for site in NEEDED:
        assert site in history.sites
        rng = np.random.default_rng(1)
        assert any(_is_caught(run, history, rng, site) for _ in range(200)), site


def _is_caught(run: Run, history: History, rng: np.random.Generator, site: str) -> bool:
    try:
        fail(history, rng, run.folder / "case", without=site)
    except Violation:
        return True
    return False


class Chosen(Loss):
    """All changes that are not safe survive, or none; `lost` names those of which nothing survives."""

    def __init__(self, lost: Callable[[str], bool]) -> None:
        super().__init__(np.random.default_rng(0), 1.0)
        self._lost = lost

    def name(self, key: object, options: list[int | None]) -> int | None:
        assert isinstance(key, tuple)
        return options[0 if self._lost(key[1]) else -1]


class Scene:
    """A store with a sealed state; later changes are recorded."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder / "there" / "run")
        self.after = folder / "after"
        (folder / "there").mkdir()
        self.player = Player(self.url, self.tell)
        self.player.play([("open",), ("seal", 1.0), ("snapshot", "a")])
        self.recorder = Recorder(folder / "there")

    def tell(self, message: Message) -> None:
        """Ignore the message."""

    def power_fails(self, lost: Callable[[str], bool]) -> Store:
        disk = Disk()
        disk.play(self.recorder.events)
        disk.write(self.after, Chosen(lost))
        return Store.open(str(self.after / "run"))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.player.close()


def test_a_deleted_snapshot_stays_deleted(scene: Scene) -> None:
    """The snapshot would keep what was collected since, and a damaged snapshot stops all collection."""
    with scene.recorder:
        delete_snapshot(scene.player.writer.store, "a")
    assert snapshot_names(scene.power_fails(lambda name: True)) == []


def test_what_a_deleted_snapshot_kept_goes_after_its_name(scene: Scene) -> None:
    """This also holds if the process that deleted the name has died before the deletion was durable."""
    with scene.recorder:
        scene.player.writer.store.blobs.delete("snapshots/a.json")
        scene.player.play([("commit",), ("seal", 1.0), ("collect",)])
    store = scene.power_fails(lambda name: name == "a.json")
    assert snapshots(store) == []
    assert verify(store, read_data=True).problems == []


def test_a_snapshot_is_not_durable_before_its_records(scene: Scene) -> None:
    """Another process names a sealed state whose record is visible and not durable yet."""
    store, taken = Store.open(scene.url), []

    def take(path: str) -> None:
        if "/log/" in path and not path.endswith(".json") and scene.player.sealing and not taken:
            taken.append(path)
            name_newest(store, "new", scene.tell)
            moment = len(scene.recorder.events)
            disk = Disk()
            disk.play(scene.recorder.events[:moment])
            disk.write(scene.after, Loss(np.random.default_rng(0), 0.0))

    scene.recorder.before_fsync = take
    with scene.recorder:
        scene.player.play([("seal", 0.5)])
    assert taken
    after = Store.open(str(scene.after / "run"))
    assert snapshot_names(after) == ["a", "new"]
    assert verify(after, read_data=True).problems == []


@pytest.mark.parametrize("fsync", [1, 2, 5])  # each leaves changes that are not safe
def test_a_store_whose_maker_died_is_safe_when_the_next_has_opened_it(tmp_path: Path, fsync: int) -> None:
    """A process is killed before an fsync; the next builds on its files, and the power fails at any moment."""
    base, after, told = tmp_path / "there", tmp_path / "after", list[tuple[int, Message]]()
    base.mkdir()
    recorder, first = Recorder(base), 0
    with recorder:
        for dies in (fsync, None):
            player = Player(
                str(base / "a" / "run"), lambda message: told.append((len(recorder.events), message))
            )
            recorder.die_synced = dies
            with contextlib.suppress(Killed):
                player.play([("open",)])
            recorder.die_synced, recorder.dead = None, dies is not None
            with contextlib.suppress(Killed):
                player.close()
            recorder.dead = False
            if dies is not None:
                first = len(recorder.events)
    disk = Disk()
    disk.play(recorder.events[:first])
    pending = {name for node in disk.nodes.values() for name in getattr(node, "since", ())}
    assert pending
    for moment in (*range(first, first + 20, 2), len(recorder.events)):
        witness = Witness()
        for at, message in told:
            if at <= moment:
                witness.take(message)
        for lost in pending:
            disk = Disk()
            disk.play(recorder.events[:moment])
            disk.write(after, Chosen(lambda name, lost=lost: name == lost))  # type: ignore[misc]
            check(str(after / "a" / "run"), witness)
            Store.create(str(after / "a" / "run"))
            shutil.rmtree(after)


def test_the_witness_finds_a_commit_that_is_gone(tmp_path: Path) -> None:
    witness = Witness()
    player = Player(str(tmp_path / "run"), witness.take)
    player.play([("open",), ("commit", 1.0), ("commit",)])
    check(player.url, witness)
    records(tmp_path / "run")[-1].unlink()
    with pytest.raises(Violation):
        check(player.url, witness)
    player.close()
