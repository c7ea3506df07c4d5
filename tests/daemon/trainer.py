"""What a session does with the daemon, without torch: values tell their step. Also as a program:

    python -m tests.daemon.trainer STORE BASE STEPS

It saves a quarter of the partitions per step, and prints a JSON line after every step: per partition the step that
memory has and the step that is acknowledged as durable.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.daemon import client
from scarctl.daemon.saver import DaemonSaver
from scarctl.errors import ScarError, Unavailable
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.state.version import pack, step_of
from scarctl.store import Store, verify
from scarctl.store.store import Part
from scarctl.util.arrays import Ids
from tests.daemon.rig import Rig, copy_into, small_layout
from tests.support.waiting import wait_until


def many_tensors() -> Layout:
    return build_layout(
        [(f"layers.{i}", "parameter", (TensorSpec("", "F32", (8, 8)),)) for i in range(60)], rows={"*": 4}
    )


def wide_layout(rows: int = 512) -> Layout:
    """Return the layout of a state with 32 KiB per row."""
    return build_layout([("wide", "parameter", (TensorSpec("", "F32", (rows, 8192)),))], rows={"*": 8})


class Trainer:
    """A session's saving side in this process, with a daemon in the folder under `base`."""

    stored = Rig.stored

    def __init__(
        self,
        store: Path,
        base: Path,
        *,
        shards: int = 3,
        layout: Layout | None = None,
        part: Part | None = None,
    ) -> None:
        """part: save as a rank does."""
        self.store = Store.create(str(store), shards=shards)
        if part is not None:
            self.store = self.store.of_shard(part.shard, current=part.current)
        self.requests: list[str] = []
        place = arena_folder(str(base), self.store.run_id)
        self.folder = place.parent
        requests = self.requests  # no other object refers to this one, or its arena would stay
        self.saver = DaemonSaver(
            str(self.store.root),
            self.store.run_id,
            self.folder,
            lambda request: requests.append(request.kind),
            part=part,
        )
        self.layout = layout or small_layout()
        self.everything = np.arange(self.layout.partitions)
        try:
            self.saver.claim()
            found = Arena.open_existing(place, run_id=self.store.run_id)
            self.arena = found or Arena.create(place, self.layout, run_id=self.store.run_id, epoch=1)
            self.arena.take_over()
            self.saver.open(self.arena)
            self.saver.resume()
        except ScarError:
            self.saver.close()
            self.store.close()
            raise

    def copy(self, ids: Ids, step: int, *, whole: str = "") -> None:
        """Make a memory checkpoint, with the step as extras."""
        version = pack(self.arena.epoch, step)
        assert copy_into(self.arena, ids, version, step, whole=whole, extras={"step": step}, flush=True)
        self.arena.reach(step)

    def save(self, ids: Ids, step: int, *, sealed: bool = False) -> None:
        """Make a memory checkpoint, and ask for it. sealed: for all of it, as of one state."""
        self.copy(ids, step, whole=uuid.uuid4().hex if sealed else "")
        if sealed:
            self.arena.ask(whole=True)
        else:
            self.arena.ask(ids=ids)
        self.saver.notify()

    def save_durably(self, step: int, *, sealed: bool = False) -> None:
        """Save everything, and wait until it is durable."""
        self.save(self.everything, step, sealed=sealed)
        self.drained()

    def drained(self, seconds: float = 20.0) -> None:
        assert self.saver.drain(seconds), self.saver.fault()

    def close(self, *, durable: bool = True) -> None:
        """Close as a session does: wait, release, remove the arena. `durable`: the store must have everything then."""
        done = self.saver.drain(20.0)
        self.saver.close()
        if done:
            self.arena.remove()
        else:
            self.arena.close()
        self.store.close()
        assert done or not durable, self.saver.fault()

    def die(self) -> None:
        """Release everything as a killed process does: the daemon sees the connection end, the arena stays."""
        self.saver.abandon()
        self.arena.take_over(0x7FFFFFF0)  # an id that no process has
        self.arena.close()
        self.store.close()
        wait_until(lambda: "attached" not in self.phases())

    def phases(self) -> list[str]:
        """Return the phases of this run in the daemon; empty if the daemon has no such run."""
        runs = (status(self.folder) or {"runs": []})["runs"]
        return [run["phase"] for run in runs if run["id"] == self.store.run_id]


def status(folder: Path) -> dict[str, Any] | None:
    """Return the daemon's status, or None if no daemon runs."""
    try:
        return client.ask(folder, "status")
    except Unavailable:
        return None


def idle(folder: Path) -> bool:
    """Return whether the daemon has no runs: the copies of dead processes are in their stores, or cannot be."""
    return not (status(folder) or {"runs": []})["runs"]


def kill(folder: Path, number: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to the daemon, and return its process id."""
    pid = int(client.ask(folder, "status")["pid"])
    os.kill(pid, number)
    return pid


def stop(folder: Path) -> None:
    """End the daemon, if there is one, and wait for its end."""
    try:
        pid = client.ask(folder, "stop")["pid"]
    except ScarError:
        return
    wait_until(lambda: (status(folder) or {"pid": 0})["pid"] != pid)


def assert_sound(root: Path) -> None:
    """Check that the store verifies."""
    store = Store.open(str(root))
    assert verify(store, read_data=True).problems == []


def orphans(root: Path) -> int:
    """Return the number of segments that no record names."""
    return len(verify(Store.open(str(root)), read_data=False).orphans)


def main() -> None:
    trainer = Trainer(Path(sys.argv[1]), Path(sys.argv[2]))
    start = trainer.arena.head_step
    for step in range(start + 1, start + 1 + int(sys.argv[3])):
        free = np.flatnonzero(~trainer.arena.pending())
        ids = free[step % 4 :: 4] if step > 1 else trainer.everything
        if ids.size:
            trainer.save(ids, step)
        trainer.arena.reach(step)
        told = {
            "step": step,
            "handed": step_of(trainer.arena.version).tolist(),
            "durable": step_of(trainer.arena.durable).tolist(),
        }
        os.write(1, json.dumps(told).encode() + b"\n")
        time.sleep(0.005)
    trainer.close()


if __name__ == "__main__":
    main()
