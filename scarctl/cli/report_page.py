"""Lay out a report as one HTML file: no scripts, nothing from the network, its data embedded as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from scarctl import __version__
from scarctl.cli.inspect_view import Table, pace_of, summary, tables
from scarctl.cli.output import SCHEMA_VERSION
from scarctl.cli.report_charts import (
    LEVELS,
    MOST_ROWS,
    Line,
    Mark,
    ages,
    clock,
    layers_over_time,
    steps_over_time,
    text,
)
from scarctl.cli.status_view import LOSS_COLUMNS, loss_cells
from scarctl.ops.falls import with_falls
from scarctl.ops.health import AT_RISK, LOSING, NOTE, Health
from scarctl.ops.report import Report
from scarctl.state.journal import Event
from scarctl.store.saved import describe, parse
from scarctl.util.text import counted, human_bytes

_LEVELS = {LOSING: "bad", AT_RISK: "warn", NOTE: "info"}
_STYLE = files("scarctl.cli").joinpath("report.css").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(report: Report, data: Mapping[str, Any]) -> str:
    """Return the HTML document. data: the report's `to_json`, which is embedded."""
    parts = [
        "<!doctype html>",
        "<html lang='en'><head><meta charset='utf-8'>",
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>scarctl: {text(report.view.url)}</title>",
        f"<style>{_STYLE}</style></head><body>",
        *_body(report),
        f"<script type='application/json' id='data'>{_embedded(data)}</script>",
        "</body></html>",
        "",
    ]
    return "\n".join(parts)


def _embedded(data: Mapping[str, Any]) -> str:
    document = {"schema_version": SCHEMA_VERSION, "command": "report", **data}
    # Nothing in a script element may look like markup, and these are the characters that begin and end it.
    plain = json.dumps(document, allow_nan=False, ensure_ascii=True)
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _body(report: Report) -> list[str]:
    view = report.view
    made = f"as of {clock(report.made)} UTC, scarctl {text(__version__)}"
    parts = [f"<h1>{text(view.url)}</h1>", f"<p class='soft'>{made}</p>"]
    if view.layout is None:
        return [*parts, _findings(report.health)]
    parts += [
        _cards(report),
        "<h2>Is it safe now?</h2>",
        _findings(report.health),
        _table(_losses(report.health)),
    ]
    pace = [] if view.run is None else pace_of(view.run)
    parts += [f"<p class='soft'>{text(line)}</p>" for line in (*summary(view)[1:4], *pace)]
    history = report.history
    if report.history.damage is not None:
        parts.append(f"<p>The history cannot be shown: {text(report.history.damage)}</p>")
    parts += _steps(report)
    if history.layers and history.spans:
        more = len(history.layers) - MOST_ROWS
        of = f" The {MOST_ROWS} layers saved most; {more} more are in the data." if more > 0 else ""
        parts += [
            "<h2>What changes</h2>",
            f"<p>Layers that were saved, over time: the darker, the larger the share of the layer.{of} "
            f"{counted(history.commits, 'commit')} wrote {human_bytes(history.bytes)}.</p>",
            _wide(layers_over_time(history)),
        ]
    parts += [
        "<h2>Ages of all partitions</h2>",
        _keys(
            [
                ("l0", "newest"),
                *((f"l{n}", "") for n in range(1, LEVELS - 1)),
                (f"l{LEVELS - 1}", "oldest"),
                ("never", "never saved"),
            ]
        ),
        _wide(ages(view.staleness)),
    ]
    for table in [_layer_table(report), *tables(view)]:
        if table.rows:
            parts += [f"<h2>{text(table.title.capitalize())}</h2>", _table(table)]
    if view.events:
        parts += ["<h2>Starts and recoveries</h2>", _table(_event_table(view.events))]
        parts.append(
            "<p class='soft'>As of the newest checkpoint. Iterations done again: those between the newest step "
            "that was finished and the step of the resume.</p>"
        )
    return parts


def _steps(report: Report) -> list[str]:
    """Return the picture of steps over time: of the run's own samples, or without any, of the store's logs."""
    samples = with_falls(report.view.samples, report.view.events)
    points = report.history.points
    if len(samples) > 1:
        marks = [
            Mark(moment.timestamp(), _is_failure(event), f"{event.kind} at step {event.step}")
            for event in report.view.events
            if (moment := parse(event.at)) is not None
        ]
        seconds = [sample.seconds for sample in samples]
        lines = [
            Line("newest", "iterations finished", [sample.head for sample in samples]),
            Line("median", "oldest copy in memory", [sample.copied for sample in samples]),
            Line("oldest", "oldest copy in the store", [sample.durable for sample in samples]),
        ]
        about = (
            "A fall is a death: the steps that it loses were trained again after the resume. With several ranks, this "
            "is the first rank."
        )
        stall = f" The session has delayed training by {samples[-1].stall:.3g} s in total."
    elif points:
        moments = [(parse(start.at), start) for start in report.history.starts]
        marks = [
            Mark(at.timestamp(), start.after_failure, f"a writer began at step {start.step}")
            for at, start in moments
            if at is not None
        ]
        times = [parse(point.at) for point in points]
        seconds = [0.0 if at is None else at.timestamp() for at in times]
        lines = [
            Line("newest", "newest copy", [point.newest for point in points]),
            Line("median", "half of the copies", [point.median for point in points]),
            Line("oldest", "oldest copy", [point.oldest for point in points]),
        ]
        about, stall = "Copies in the store, as far back as its logs reach.", ""
    else:
        return []
    keys = [(line.name, line.label) for line in lines]
    return [
        "<h2>Steps over time</h2>",
        f"<p>The band shows how far the oldest copy is behind. {about}{stall}</p>",
        _keys([*keys, ("failure", "failure")]),
        _wide(steps_over_time(seconds, lines, marks)),
    ]


def _is_failure(event: Event) -> bool:
    """Return whether an event is a loss: a recovery, or a resume from a mix of steps."""
    consistent = event.facts.get("consistent") is True
    return event.kind == "recovered" or (event.kind == "resumed" and not consistent)


# -- is it safe --------------------------------------------------------------------------------------------------


def _cards(report: Report) -> str:
    view = report.view
    oldest = int(view.staleness.max(initial=0))
    never = int((view.saved_step < 0).sum())
    bound = "at least " if view.age.is_lower_bound else ""
    sealed = [snapshot.step for snapshot in view.snapshots]
    cards = [
        (f"{view.step}{' or later' if view.age.is_lower_bound else ''}", "newest step"),
        (
            f"{never} never saved" if never else f"{bound}{counted(oldest, 'iteration')}",
            "age of the oldest copy",
        ),
        (_ago(report), "since the last save"),
        (
            human_bytes(view.usage["bytes"]),
            f"on disk, for a state of {human_bytes(view.layout.nbytes)}" if view.layout else "on disk",
        ),
    ]
    if sealed:
        cards.append((f"{len(sealed)}, newest of step {max(sealed)}", "snapshots"))
    if view.run is not None:
        memory = view.run.memory_age
        age = "incomplete" if memory is None else counted(memory, "iteration")
        cards.append((age, "age of this host's memory"))
    boxes = "".join(f"<div class='card'><b>{text(value)}</b>{text(name)}</div>" for value, name in cards)
    return f"<div class='cards'>{boxes}</div>"


def _ago(report: Report) -> str:
    told = describe(report.view.age.saved_at)
    return told.rpartition(", ")[2].removesuffix(" ago") if ", " in told else "unknown"


def _findings(health: Health) -> str:
    """Return the problems, worst first, each with what to do next."""
    lines = [
        f"<li class='{_LEVELS[one.severity]}'><b>{text(one.message)}</b>"
        f"{f'<br><code>{text(one.command)}</code>' if one.command else ''}</li>"
        for one in health.findings
    ]
    if health.well:
        lines.insert(0, "<li class='good'><b>Well: nothing known here is lost or at risk</b></li>")
    return f"<ul class='list'>{''.join(lines)}</ul>"


def _losses(health: Health) -> Table:
    """Return what is lost if the process, the host or the store is lost now."""
    return Table("", LOSS_COLUMNS, [loss_cells(*loss) for loss in health.losses.items()])


# -- tables ------------------------------------------------------------------------------------------------------


def _layer_table(report: Report) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            layer.name,
            str(layer.partitions),
            human_bytes(layer.bytes),
            "never saved" if layer.oldest is None else str(layer.oldest),
            "unknown" if layer.distance is None else f"{layer.distance:.4g}",
        )
        for layer in report.layers
    ]
    more = f" (the largest {len(rows)} of {len(rows) + report.more_layers})" if report.more_layers else ""
    columns = ("layer", "partitions", "bytes", "oldest age", "change since saved")
    return Table(f"layers{more}", columns, rows)


def _event_table(events: Sequence[Event]) -> Table:
    rows = [
        (event.kind, clock(event.at), str(event.step), *_event_cells(event)) for event in reversed(events)
    ]
    columns = ("event", "time (UTC)", "step", "restored", "from", "change", "predicted", "done again")
    return Table("starts and recoveries", columns, rows)


def _event_cells(event: Event) -> tuple[str, ...]:
    facts = event.facts
    if event.kind == "started":
        return "", str(facts.get("process", "")), "", "", ""
    if event.kind == "closed":
        return ("",)
    if event.kind in ("ranks differ", "ranks agree"):
        return ("of parameters that all ranks should have in common",)
    label = "consistent" if facts.get("consistent") is True else "mixed"
    restored = f"{facts.get('partitions', 'all')}, {label}"
    tiers = ", ".join(f"{facts[tier]} {tier}" for tier in ("memory", "peer", "store") if facts.get(tier))
    low, high = facts.get("low"), facts.get("high")
    ends = [end for end in (low, high) if isinstance(end, int | float)]
    predicted = f"{ends[0]:.3g} to {ends[1]:.3g}" if len(ends) == 2 else "unknown"
    change = facts.get("perturbation")
    reached = facts.get("reached")
    again = str(max(0, reached - event.step)) if isinstance(reached, int) else "0"
    return (
        restored,
        tiers,
        f"{change:.4g}" if isinstance(change, int | float) else "unknown",
        predicted,
        again,
    )


def _table(table: Table) -> str:
    head = "".join(f"<th scope='col'>{text(name)}</th>" for name in table.columns)
    body = "".join(f"<tr>{_cells(row, len(table.columns))}</tr>" for row in table.rows)
    return _wide(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _cells(row: tuple[str, ...], columns: int) -> str:
    """Return the cells of a row. The last cell of a shorter row is a sentence over the other columns."""
    missing = columns - len(row)
    cells = [f"<td>{text(cell)}</td>" for cell in (row[:-1] if missing else row)]
    if missing:
        cells.append(f"<td class='sentence' colspan='{missing + 1}'>{text(row[-1])}</td>")
    return "".join(cells)


# -- marks -------------------------------------------------------------------------------------------------------


def _keys(keys: Sequence[tuple[str, str]]) -> str:
    marks = "".join(f"<span class='key {name}'></span>{text(label)}" for name, label in keys)
    return f"<p class='soft'>{marks}</p>"


def _wide(content: str) -> str:
    return f"<div class='wide'>{content}</div>"
