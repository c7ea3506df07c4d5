"""Derive from the messages of the processes alone what must be true of a store."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from scarctl.errors import NoStore
from scarctl.state.version import step_of
from scarctl.store import Store, verify


class Failed(Exception):
    """A condition does not hold."""


class Log:
    """The lines that one process has written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the whole lines since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._at += end
        return [json.loads(line) for line in data[:end].splitlines()]


class Witness:
    """What is known of one run over all its processes."""

    def __init__(self, partitions: int) -> None:
        self.acknowledged = np.full(partitions, -1, dtype=np.int64)
        """By partition, the step that the run knows to be durable."""
        self.handed = np.full(partitions, -1, dtype=np.int64)
        """By partition, the newest step of a copy in memory."""
        self.step = 0
        self.resumed = 0
        """The step from which the newest process has resumed."""
        self.least = 0
        """The step before which no process may resume."""
        self.sealed = 0
        self.goes_back = False
        """Whether a rollback is in progress."""
        self.memory_lost = False
        """Whether memory was lost since the newest process has resumed."""
        self.mixed = False
        """Whether the newest process has resumed a mixed state, and made no checkpoint in memory since."""
        self.gave_up: list[str] = []
        self.closed: dict[str, Any] | None = None

    def take(self, message: dict[str, Any]) -> None:
        """Take one line of a process. Raises Failed if it reports what must not happen."""
        if "failed" in message:
            raise Failed(f"the trainer failed:\n{message['failed']}")
        if "gave_up" in message:
            self.gave_up.append(message["gave_up"])
        elif "durable" in message:
            self.step = message["step"]
            self.acknowledged = np.maximum(self.acknowledged, step_of(np.array(message["durable"])))
        elif "handed" in message:
            self.mixed = False
            if not self.goes_back:  # otherwise it may be forgotten at once
                self.handed[message["ids"]] = message["handed"]
        elif "sealed" in message:
            self.sealed = self.least = message["sealed"]
        elif "rollback" in message:
            self.goes_back = True
            self._lower(np.arange(self.handed.size), self.sealed)
            self.least = min(self.least, self.sealed)
        elif "rolled_back" in message:
            self.goes_back = False
            self.step = self.least = message["rolled_back"]
        elif "resumed" in message:
            self.goes_back = False
            self.resumed = self.step = message["resumed"]
            if self.resumed < self.least:
                raise Failed(f"resumed from step {self.resumed}, there was step {self.least}")
            self.least = self.resumed
            self._check_resumed(consistent=message["consistent"], tiers=message.get("tiers", ()))
        elif "closed" in message:
            self.closed = message

    def _check_resumed(self, *, consistent: bool, tiers: Collection[str]) -> None:
        """Raise Failed if memory is not of one step, or is older than what was acknowledged.

        Without memory a process may go back to the newest state of one step in the store: see
        `scarctl.session.forecast.mode_of_resume`.
        """
        if not (consistent or self.mixed or "memory" not in tiers):
            raise Failed("memory is not of one step")
        if self.memory_lost and consistent:
            self._lower(np.arange(self.handed.size), self.resumed)
        elif consistent and (self.acknowledged > self.resumed).any():
            raise Failed(f"resumed from step {self.resumed}, step {self.acknowledged.max()} was acknowledged")
        self.memory_lost, self.mixed = False, not consistent

    def _lower(self, ids: NDArray[np.int64], step: int) -> None:
        for steps in (self.acknowledged, self.handed):
            steps[ids] = np.minimum(steps[ids], step)

    def check_values(self, partition: int, step: int, pieces: list[NDArray[Any]], where: str) -> None:
        """Raise Failed unless a copy labelled `step` is complete, and of that step.

        If a loop meddles with its parameters, they and their slots differ by a quarter for a moment.
        """
        held = [np.unique(piece).tolist() for piece in pieces]
        if any(len(values) > 1 for values in held) or len({int(values[0]) for values in held}) > 1:
            raise Failed(f"{where}: partition {partition} of step {step} holds {held}")
        value = int(held[0][0])
        if value != step:
            raise Failed(f"{where}: partition {partition} counts as step {step} and is of step {value}")


def stored_steps(store: Store, partitions: int) -> NDArray[np.int64]:
    """Return by partition the step of its newest copy in the store, -1 if it has none."""
    steps = np.full(partitions, -1, dtype=np.int64)
    for shard in store.shards():
        state = store.state(shard)
        steps[state.ids] = step_of(state.version)
    return steps


def check_verifies(store: Store) -> None:
    """Raise Failed if `scarctl verify --read-data` would find damage."""
    report = verify(store, read_data=True)
    if report.problems:
        raise Failed(f"verify: {report.problems[:3]}")


class Copies:
    """Reads every segment that a record names once, with another library, and checks its values."""

    def __init__(self, store: Path, rows: int) -> None:
        self._store = store
        self._rows = rows
        self._checked: set[str] = set()
        self.count = 0

    def check(self, store: Store, witness: Witness) -> None:
        """Raise Failed if a copy is torn, or not of the step in its record."""
        layout = store.current_layout()
        if layout is None:
            return
        for shard in store.shards():
            for record in store.log(shard).records():
                if record.segment is None or record.segment.name in self._checked:
                    continue
                self._checked.add(record.segment.name)
                path = self._store / "lanes" / str(shard) / "seg" / record.segment.name
                try:
                    tensors = load_file(path)
                except FileNotFoundError:  # collected: its record stays until its writer's term has ended
                    continue
                ids = tensors["scarctl/partitions"].astype(np.int64)
                steps = np.full(ids.size, record.step, dtype=np.int64)
                if record.mixed:
                    steps = step_of(tensors["scarctl/versions"])
                for g, group in enumerate(layout.groups):
                    here = (ids >= layout.base[g]) & (ids < layout.base[g + 1])
                    keys = [group.key(t) for t in range(len(group.tensors))]
                    pairs = zip(ids[here].tolist(), steps[here].tolist(), strict=True)
                    for k, (partition, step) in enumerate(pairs):
                        rows = slice(k * self._rows, (k + 1) * self._rows)
                        pieces = [tensors[key][rows] for key in keys]
                        witness.check_values(partition, step, pieces, path.name)
                        self.count += 1


def open_store(folder: Path) -> Store | None:
    """Return the store, or None if the run was killed before it made one."""
    try:
        return Store.open(str(folder))
    except NoStore:
        return None
