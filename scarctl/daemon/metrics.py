"""Write the daemon's status in Prometheus' text format 0.0.4, or as OpenMetrics 1.0.0, without timestamps.

The formats: https://prometheus.io/docs/instrumenting/exposition_formats and
https://prometheus.io/docs/specs/om/open_metrics_spec. The textfile collector of node_exporter reads the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scarctl.daemon.status import DaemonStatus, RunStatus
from scarctl.store.saved import parse
from scarctl.util.text import printable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of a run."""

    name: str
    kind: str
    """"gauge", or "counter", which begins at 0 with each daemon."""
    help: str
    value: Callable[[RunStatus], float | None]
    """Returns None where the run has no such figure yet."""


def _step(name: str) -> Callable[[RunStatus], float | None]:
    def value(run: RunStatus) -> float | None:
        found = _number(run, name)
        return None if found is None or found < 0 else found

    return value


def _count(name: str) -> Callable[[RunStatus], float | None]:
    return lambda run: _number(run, name)


def _number(values: Mapping[str, object], name: str) -> float | None:
    found = values.get(name)
    return found if isinstance(found, int | float) else None


def _saved_at(run: RunStatus) -> float | None:
    moment = parse(run.get("saved_at") or "")
    return None if moment is None else moment.timestamp()


FAMILIES = (
    Family(
        "scarctl_attached",
        "gauge",
        "1 while the training process lives, 0 once only the daemon saves.",
        lambda run: float(run["phase"] == "attached"),
    ),
    Family("scarctl_stopped", "gauge", "1 if saving has stopped permanently.", _count("stopped")),
    Family("scarctl_head_step", "gauge", "Iterations that training has finished.", _step("head_step")),
    Family("scarctl_durable_step", "gauge", "Newest step in the store.", _step("durable_step")),
    Family(
        "scarctl_oldest_durable_step",
        "gauge",
        "Step of the partition whose copy in the store is the oldest.",
        _step("oldest_durable_step"),
    ),
    Family(
        "scarctl_sealed_step", "gauge", "Newest step whose whole state is in the store.", _step("sealed_step")
    ),
    Family(
        "scarctl_pending_partitions",
        "gauge",
        "Partitions whose copies wait for the store.",
        _count("queued_partitions"),
    ),
    Family("scarctl_pending_bytes", "gauge", "Bytes of these partitions.", _count("queued_bytes")),
    Family("scarctl_saved_bytes_total", "counter", "Bytes of state made durable.", _count("saved_bytes")),
    Family("scarctl_errors_total", "counter", "Failed attempts to save.", _count("errors")),
    Family(
        "scarctl_saved_timestamp_seconds",
        "gauge",
        "Unix time of the newest checkpoint that became durable.",
        _saved_at,
    ),
    Family(
        "scarctl_bandwidth_bytes_per_second",
        "gauge",
        "Bytes per second while the store is written.",
        _count("bytes_per_second"),
    ),
)
"""The metrics with one sample for each run, labelled with store, id and rank."""


def exposition(status: DaemonStatus, *, openmetrics: bool = False) -> bytes:
    """Return the text of a status, in UTF-8. Names of stores may contain anything, and are escaped.

    OpenMetrics names a counter's family without "_total", and ends with a mark.
    """
    lines = [
        "# HELP scarctl_start_time_seconds Unix time at which the daemon started.",
        "# TYPE scarctl_start_time_seconds gauge",
        f"scarctl_start_time_seconds {status['started']!r}",
        "# HELP scarctl_runs Runs that the daemon saves.",
        "# TYPE scarctl_runs gauge",
        f"scarctl_runs {len(status['runs'])}",
    ]
    labels = [_labels(run) for run in status["runs"]]
    for family in FAMILIES:
        samples = [(label, family.value(run)) for label, run in zip(labels, status["runs"], strict=True)]
        known = [f"{family.name}{label} {float(value)!r}" for label, value in samples if value is not None]
        if known:
            name = family.name.removesuffix("_total") if openmetrics else family.name
            lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}", *known]
    return ("\n".join([*lines, *(["# EOF"] if openmetrics else [])]) + "\n").encode()


def _labels(run: RunStatus) -> str:
    # Two runs may have one address, if a store was moved and another one made in its place: their ids differ.
    labels = {"store": run["store"], "run": run["id"]}
    if run.get("rank") is not None:
        labels["rank"] = str(run["rank"])
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    """Return a label's value as the format wants it, in characters that UTF-8 has."""
    return printable(value).replace("\\", "\\\\").replace('"', '\\"')
