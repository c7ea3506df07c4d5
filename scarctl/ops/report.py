"""Gather the content of a report as one document of plain values."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from scarctl.errors import Corruption, ScarError
from scarctl.ops.health import LOSING, Finding, Health, health_of
from scarctl.ops.known import daemon_here, runs_of
from scarctl.ops.survey import survey
from scarctl.ops.surveyed import Layer, Survey
from scarctl.ops.timeline import Timeline, timeline
from scarctl.store import Store
from scarctl.util.document import json_of

MOST_PARTITIONS = 20
"""Partitions in each list of those at risk."""
MOST_LAYERS = 200
"""Layers that are listed: the largest."""


@dataclass(frozen=True, slots=True)
class Report:
    """A store at one moment, and its recent history."""

    made: str
    """UTC time, in ISO 8601."""
    view: Survey
    health: Health
    history: Timeline
    layers: tuple[Layer, ...]
    """The largest first; at most `MOST_LAYERS`."""
    more_layers: int
    """Layers beyond these."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a document."""
        return {
            "made": self.made,
            "store": self.view.url,
            "now": {**self.view.to_json(0), "stalest": self.view.stalest(MOST_PARTITIONS)},
            "health": self.health.to_json(),
            "layers": json_of(self.layers),
            "more_layers": self.more_layers,
            "history": self.history.to_json(),
        }


def gather(store: Store, arena_dir: str | None) -> Report:
    """Survey a store, and replay its logs. Raises Corruption, AccessDenied, Unavailable.

    A history that cannot be read is left out, and the report says so: the present state does not need it.
    """
    view = survey(store, arena_dir)
    health = _health(store, view, arena_dir)
    shards = view.topology.shards if view.topology is not None else store.shards()
    try:
        history = timeline(store, shards)
    except Corruption as error:
        history = Timeline(damage=error.message)
    made = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    layers = sorted(view.layers, key=lambda layer: -layer.bytes)
    return Report(made, view, health, history, tuple(layers[:MOST_LAYERS]), max(0, len(layers) - MOST_LAYERS))


def _health(store: Store, view: Survey, arena_dir: str | None) -> Health:
    """Judge the store, using this host's daemon's reports on its runs."""
    try:
        return health_of(view, runs_of(daemon_here(arena_dir), store.run_id))
    except ScarError as error:
        silent = Finding(LOSING, error.kind, str(error), "scarctl daemon status")
        return health_of(view, ()).with_finding(silent)
