"""Name the figures of a session for loggers, each with its unit, and read them where they are counted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from scarctl.arena.distances import from_memory
from scarctl.arena.durability import durability
from scarctl.checkpoint.checkpointer import Stats
from scarctl.checkpoint.engine import Engine
from scarctl.recovery.forecast import rework_of
from scarctl.state.caveats import Caveat
from scarctl.state.layouts import parameters_of
from scarctl.state.version import step_of
from scarctl.theory.rework import Outlook

UNITS = {
    "step": "iterations",
    "interval": "iterations",
    "staleness_max": "iterations",
    "staleness_median": "iterations",
    "lag": "iterations",
    "pending_bytes": "bytes",
    "pending_partitions": "partitions",
    "durable_step": "iterations",
    "oldest_durable_step": "iterations",
    "sealed_step": "iterations",
    "bandwidth": "bytes per second",
    "checkpoints": "count",
    "saved_bytes": "bytes",
    "stall_seconds": "seconds",
    "copy_seconds": "seconds",
    "overhead": "share, 0 to 1",
    "nonfinite_partitions": "count",
    "torn_copies": "count",
    "errors": "count",
    "recoveries": "count",
    "caveats": "count",
    "rework": "iterations",
    "rework_high": "iterations",
}
"""Every figure of a session, with its unit. An unknown one is left out, never 0 or NaN."""


def measure(
    prefix: str, stats: Stats, step: int, caveats: Iterable[Caveat], engine: Engine | None, *, alone: bool
) -> dict[str, float]:
    """Return the known figures of one process, each under its name with the prefix.

    step: iterations finished. engine: None before the first step. alone: no other rank trains with this process.
    """
    figures: dict[str, float] = {
        "step": step,
        "checkpoints": stats.checkpoints,
        "saved_bytes": stats.saved_bytes,
        "stall_seconds": stats.stall_seconds,
        "copy_seconds": stats.copy_seconds,
        "overhead": stats.overhead,
        "nonfinite_partitions": stats.nonfinite_partitions,
        "torn_copies": stats.torn_copies,
        "errors": stats.errors,
        "recoveries": stats.recoveries,
        "caveats": sum(1 for _ in caveats),
    }
    if engine is not None:
        figures |= _of_copies(engine, step)
        # Each of several ranks knows only its own part of the state's movement.
        figures |= _rework(engine, step) if alone else {}
    return {prefix + name: value for name, value in figures.items()}


def _of_copies(engine: Engine, step: int) -> dict[str, float]:
    arena, stored = engine.arena, durability(engine.arena)
    figures: dict[str, float] = {
        "interval": engine.cadence.interval,
        "lag": engine.lag(),
        "pending_bytes": stored.pending_bytes,
        "pending_partitions": stored.pending_partitions,
    }
    steps = {
        "durable_step": stored.durable_step,
        "oldest_durable_step": stored.oldest_durable_step,
        "sealed_step": stored.sealed_step,
    }
    figures |= {name: value for name, value in steps.items() if value >= 0}
    newest = step_of(arena.newest())
    if newest.size and newest.min() >= 0:
        ages = np.maximum(step - newest, 0)
        figures |= {"staleness_max": int(ages.max()), "staleness_median": float(np.median(ages))}
    if engine.pace.turns.bandwidth is not None:
        figures["bandwidth"] = engine.pace.turns.bandwidth
    return figures


def _rework(engine: Engine, step: int) -> dict[str, float]:
    """Predict the rework if the process were killed now, and all of its state continued from the newest copies."""
    parameters = parameters_of(engine.layout)
    newest = step_of(engine.arena.newest())
    if not parameters.any() or newest.min() < 0:
        return {}
    predicted = rework_of(
        Outlook.of(step, [engine.motion.history.until(step)]),
        1.0,
        ages=np.maximum(step - newest[parameters], 0),
        distance=from_memory(engine.arena.newest())[parameters] if engine.settings.norm == "l2" else None,
        since=max(0, step - int(newest.max())),
    )
    if predicted.iterations is None or predicted.high is None:
        return {}
    return {"rework": predicted.iterations, "rework_high": predicted.high}
