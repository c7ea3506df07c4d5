"""Define the extras of a checkpoint, its state next to the partitions, and their stored form.

`Extras` is the state that a session stores, `Notes` the part that any program may read. Both are stored as a tree of
plain values and arrays; `scarctl.state.codec` turns a tree into bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from scarctl.errors import Corruption
from scarctl.state.caveats import Caveat, read_caveats
from scarctl.state.codec import encode
from scarctl.state.common import read_digests
from scarctl.state.journal import Event, read_events

FILE_POLICY = "scarctl"
"""Field in which `scarctl checkpoint`, which has no session, keeps its `PolicyMemory`."""
_MOST = 1 << 63


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """The selection policy's state between two checkpoints."""

    credit: int = 0
    """Unused budget in bytes."""
    cursor: int = 0
    """Partition at which the policy "round" continues."""
    seed: int | None = None
    """Seed of the policy "random"; None: the store's own seed, as in a session."""

    @classmethod
    def from_tree(cls, tree: object) -> PolicyMemory:
        """Read what `to_tree` wrote. Return the defaults for anything else: only the next choice depends on it."""
        found = tree if isinstance(tree, dict) else {}
        values = {name: found[name] for name in ("credit", "cursor", "seed") if name in found}
        sound = all(type(value) is int and 0 <= value < _MOST for value in values.values())
        return cls(**values) if sound else cls()

    def to_tree(self) -> dict[str, int]:
        """Return the stored form."""
        return {
            "credit": self.credit,
            "cursor": self.cursor,
            **({} if self.seed is None else {"seed": self.seed}),
        }


@dataclass(frozen=True, slots=True)
class Notes:
    """A session's measurements of its run, for forecasts and display. Every field may be absent."""

    points: Any = None
    """Movements of the parameters, as `scarctl.theory.history.History.to_array` returns them; `from_array` checks
    them."""
    norm: str = ""
    """Norm of the session's distances, such as "l2"; "" when no session stored it."""
    caveats: tuple[Caveat, ...] = ()
    """Parts of the run that are not protected, or cannot be repeated."""
    events: tuple[Event, ...] = ()
    """Starts, resumes and recoveries of the run: see `scarctl.state.journal`."""
    samples: Any = None
    """Ages of copies over time: `scarctl.state.journal.Journal.samples`; `read_samples` checks it."""
    at: float | None = None
    """Unix time at which the checkpoint was complete in memory."""
    max_lag: float | None = None
    """Seconds after which the store should have the whole state, as set."""
    declared: bool = False
    """The loop had declared the end of the step: `Extras` have its position in the data."""
    common: Mapping[str, str] = field(default_factory=dict)
    """In a seal of one of several ranks, digests of what it has in common with others: see `scarctl.state.common`."""

    @classmethod
    def from_tree(cls, tree: object) -> Notes:
        """Read the notes in the stored extras of any writer. Hostile input gives absent fields, never an error."""
        found = tree if isinstance(tree, dict) else {}
        history = found.get("history")
        history = history if isinstance(history, dict) else {}
        norm = history.get("norm")
        return cls(
            points=_array(history.get("points")),
            norm=norm if isinstance(norm, str) else "",
            caveats=read_caveats(found.get("caveats")),
            events=read_events(found.get("events")),
            samples=_array(found.get("samples")),
            at=_seconds(found.get("at")),
            max_lag=_seconds(found.get("max_lag")),
            declared=found.get("declared") is True,
            common=read_digests(found.get("common")),
        )

    def to_tree(self) -> dict[str, Any]:
        """Return the stored fields, without absent ones."""
        tree: dict[str, Any] = {}
        if self.points is not None:
            tree["history"] = {"norm": self.norm, "points": self.points}
        if self.caveats:
            tree["caveats"] = [caveat.to_json() for caveat in self.caveats]
        if self.events:
            tree["events"] = [event.to_json() for event in self.events]
        if self.samples is not None:
            tree["samples"] = self.samples
        tree |= {name: value for name in ("at", "max_lag") if (value := getattr(self, name)) is not None}
        if self.declared:
            tree["declared"] = True
        if self.common:
            tree["common"] = dict(self.common)
        return tree

    def of_part(self, own: Notes) -> Notes:
        """Return these notes of another process, with the fields of `own` that describe one process's part of the
        state.
        """
        return replace(self, points=own.points, norm=own.norm, samples=own.samples)


@dataclass(frozen=True, slots=True)
class Extras:
    """State that a session saves with a checkpoint, next to the partitions.

    Tensors inside are torch's while a session uses them, and `RawTensor` in a stored tree.
    """

    state: Any
    """The adapter's state: random generators, the user's objects, schedules, the optimizer's scalars."""
    loop: Mapping[str, Any] | None = None
    """Position of a loop over `Session.batches`: see `scarctl.session.loop`."""
    policy: PolicyMemory = field(default_factory=PolicyMemory)
    notes: Notes = field(default_factory=Notes)

    @classmethod
    def from_tree(cls, tree: object) -> Extras:
        """Read what `to_tree` wrote. Fields that an older session did not store get their defaults.

        Raises Corruption for a tree that no session can continue from.
        """
        if not isinstance(tree, dict) or "state" not in tree:
            raise Corruption(
                "extras: no session stored them. `scarctl recover` restores a run that `scarctl checkpoint` saved"
            )
        loop = tree.get("loop")
        if not isinstance(loop, dict | None):
            raise Corruption(f"extras: the position of the loop is a {type(loop).__name__}")
        return cls(
            state=tree["state"],
            loop=loop,
            policy=PolicyMemory.from_tree(tree.get("policy")),
            notes=Notes.from_tree(tree),
        )

    def to_tree(self) -> dict[str, Any]:
        """Return the stored form: a dict that `scarctl.state.codec` can encode."""
        tree = {"state": self.state}
        if self.loop is not None:
            tree["loop"] = self.loop
        return {**tree, "policy": self.policy.to_tree(), **self.notes.to_tree()}

    def digest(self) -> bytes:
        """Return a digest of the saved state: all fields but the measurements.

        Raises UsageError for values that cannot be stored.
        """
        text, tensors = encode({"state": self.state, "loop": self.loop})
        digest = xxhash.xxh3_128(text.encode())
        for tensor in tensors.values():
            digest.update(memoryview(tensor.data).cast("B"))
        return digest.digest()


def _seconds(value: object) -> float | None:
    return value if isinstance(value, float) and 0 <= value < 1e12 else None


def _array(value: object) -> NDArray[Any] | None:
    return value if isinstance(value, np.ndarray) else None
