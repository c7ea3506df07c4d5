"""Show a survey of a store to people: a summary, and tables."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from scarctl.ops.surveyed import RankLine, RunOnHost, ShardLine, Survey
from scarctl.state.encodings import ERROR_BOUND
from scarctl.store.saved import describe
from scarctl.util.text import aligned, counted, human_bytes

TOP = 8
"""Partitions and snapshots that are listed."""

_OF = {"bfloat16": "a value", "int8": "a row's largest value"}
"""The quantity to which an encoding's error bound is relative."""
SHARD = ("shard", "partitions", "bytes", "saved steps", "age", "change if lost", "rework")
LAYER = ("parameter or buffer", "partitions", "bytes", "oldest copy", "oldest of changed values")
PARTITION = ("partition", "shard", "saved", "staleness", "distance")
LEAST = ("bytes", "head", "durable", "partitions", "copies", "process")
"""Columns that a narrow terminal leaves out, the first one first."""


class Table(NamedTuple):
    """Cells of text below a title."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def plain(view: Survey, width: int | None = None) -> str:
    """Return summary and tables as ASCII text. width: of a terminal, for which columns may be left out."""
    lines = summary(view)
    for table in tables(view):
        if table.rows:
            shown = table if width is None else narrowed(table, width)
            lines += ["", shown.title, *aligned([shown.columns, *shown.rows], "  ")]
    return "\n".join(lines)


# -- the summary -------------------------------------------------------------------------------------------------


def summary(view: Survey) -> list[str]:
    """Return the lines above the tables."""
    if view.layout is None:
        return [f"{view.url}: nothing is saved yet"]
    usage = view.usage
    bound = "; no running process says how far the run is, so ages are lower bounds"
    lines = [
        f"store {view.url}: {view.reached}, {counted(view.layout.partitions, 'partition')}, "
        f"{human_bytes(view.layout.nbytes)}",
        f"{describe(view.age.saved_at)}{bound if view.age.is_lower_bound else ''}",
        view.ages,
        f"on disk {human_bytes(usage['bytes'])}, of which live {human_bytes(usage['live_bytes'])}; "
        f"{counted(usage['segments'], 'segment')}, {counted(usage['records'], 'record')}",
    ]
    lines += [
        f"in fewer bits: {counted(copies, 'copy', 'copies')} in {encoding}, "
        f"with errors up to {100 * ERROR_BOUND[encoding]:.1f} % of {_OF[encoding]}"
        for encoding, copies in view.encoded.items()
    ]
    if view.snapshots:
        named = [f"{snapshot.name} (step {snapshot.step})" for snapshot in view.snapshots[:TOP]]
        more = f" and {len(view.snapshots) - TOP} more" if len(view.snapshots) > TOP else ""
        lines.append(f"snapshots: {', '.join(named)}{more}")
    lines += _processes(view)
    if view.note is not None:
        lines.append(view.note)
    lines += [f"damaged: {file}: {reason}" for file, reason in view.damage[:TOP]]
    if len(view.damage) > TOP:
        lines.append(
            f"and {counted(len(view.damage) - TOP, 'more damaged file')}: `scarctl verify` lists all"
        )
    lines += [f"caution: {caveat.message}" for caveat in view.caveats]
    lines.append(_convergence(view))
    if (stale := view.effective_staleness) is not None:
        lines.append(
            f"losing all live values undoes about {stale:.3g} iterations of movement at the present speed"
        )
    expected = [line.expected_perturbation for line in view.shards]
    known = [change for change in expected if change is not None]
    if 1 < len(expected) == len(known):
        mean = math.sqrt(sum(change * change for change in known) / len(known))
        lines.append(
            f"expected change if one of {counted(len(known), 'shard')} is lost at random: {mean:.4g}"
        )
    return lines


def _errors(run: RunOnHost) -> str:
    return counted(run.errors + run.failed_saves, "error")


def pace_of(run: RunOnHost) -> list[str]:
    """Return one line about a run's interval and overhead; no line if they are unknown."""
    if run.interval is None:
        return []
    every = "iteration" if run.interval == 1 else f"{run.interval:,} iterations"
    cost = "" if run.overhead is None else f"; measured overhead: {100 * run.overhead:.2g} % of training time"
    return [f"a checkpoint every {every}{cost}"]


def _processes(view: Survey) -> list[str]:
    """Return the writers of the store: ranks and their shards, or one process."""
    run, topology = view.run, view.topology
    if topology is None:
        if run is None:
            return []
        return [
            f"run on this host: process {run.pid} ({_alive(run.alive)}), step {run.head_step}, {_errors(run)}",
            *pace_of(run),
        ]
    noun = topology.noun
    # The first members replaced no others, so no command needs their epoch.
    since = "" if topology.independent and topology.epoch == 1 else f", since epoch {topology.epoch}"
    lines = [f"{counted(topology.world, noun)}{since}; one shard each"]
    if run is not None:
        here = [rank for rank in view.ranks if rank.alive is not None and rank.replica_of is None]
        dead = [str(rank.rank) for rank in here if not rank.alive]
        stopped = f"; stopped: {noun} {', '.join(dead)}" if dead and run.alive else ""
        lines.append(
            f"{noun}s on this host: {len(here) - len(dead)} of {len(here)} alive{stopped}, {_errors(run)}"
        )
        lines += pace_of(run)
    kept = [str(rank.rank) for rank in view.ranks if rank.replica_of is not None]
    if kept:
        lines.append(f"{noun}s of other hosts whose memory is copied to this host: {', '.join(kept)}")
    held = [other for other in view.others if not other.retired]
    if held:
        names = ", ".join(str(other.shard) for other in held)
        size = human_bytes(sum(other.bytes for other in held))
        whose = f"{'earlier' if topology.independent else 'other'} {noun}s"
        lines.append(f"shards of {whose}: {names}, {size} (`scarctl prune` retires those not needed)")
    retired = [str(other.shard) for other in view.others if other.retired]
    if retired:
        lines.append(f"retired shards: {', '.join(retired)}")
    return lines


def _convergence(view: Survey) -> str:
    """Return the run's convergence rate, and the number of points that the estimate uses."""
    fit = view.outlook.to_json()
    if fit["c"] is None:
        return f"no convergence rate yet: {fit['reason']}"
    low, high = fit["c_interval"]
    points = counted(fit["points"], "point")
    return f"convergence: c = {fit['c']:.4g} ({low:.4g} to {high:.4g}) per iteration, from {points}"


# -- the tables --------------------------------------------------------------------------------------------------


def tables(view: Survey) -> list[Table]:
    """Return the tables of shards or ranks, and of the partitions at risk."""
    if view.layout is None:
        return []
    stalest, changed = (
        [_partition(view, one) for one in of(TOP)] for of in (view.stalest, view.most_changed)
    )
    return [
        _shards(view) if view.topology is None else _ranks(view, view.topology.noun),
        Table("stalest parameters", LAYER, _layers(view)),
        Table("stalest", PARTITION, stalest),
        Table("most changed", PARTITION, changed),
    ]


def _shards(view: Survey) -> Table:
    return Table("shards", SHARD, [(*_saved(view, line), *_cost(line)) for line in view.shards])


def _ranks(view: Survey, noun: str) -> Table:
    # Only a job with copies on other hosts has a column for them.
    copied = any(rank.copies for rank in view.ranks)
    columns = (noun, *SHARD[:-2], "durable", "head", "process", *(["copies"] * copied), *SHARD[-2:])
    rows = [
        (str(rank.rank), *_saved(view, line), *_process(rank), *(_copies(rank) * copied), *_cost(line))
        for rank, line in view.shards_of_ranks
    ]
    return Table(f"{noun}s", columns, rows)


def _saved(view: Survey, line: ShardLine) -> tuple[str, ...]:
    """Return the cells from "shard" to "age"."""
    age = "never saved" if line.staleness is None or line.never_saved else _at_least(view, line.staleness)
    steps = "-" if line.oldest_step is None else f"{line.oldest_step}..{line.newest_step}"
    return str(line.shard), str(line.partitions), human_bytes(line.bytes), steps, age


def _process(rank: RankLine) -> tuple[str, ...]:
    """Return the cells from "durable" to "process"."""
    steps = ["-" if step is None else str(step) for step in (rank.durable_step, rank.head_step)]
    if rank.replica_of is not None:
        process = f"copy of {rank.replica_of}"
    else:
        process = "not on this host" if rank.alive is None else f"{rank.pid} ({_alive(rank.alive)})"
    return *steps, process


def _copies(rank: RankLine) -> tuple[str, ...]:
    """Return the cell "copies"."""
    if rank.alive is None or rank.replica_of is not None:
        return ("-",)
    return ("; ".join(rank.copies) or "none",)


def _cost(line: ShardLine) -> tuple[str, ...]:
    """Return the cells "change if lost" and "rework"."""
    change, rework = line.perturbation.value, line.rework
    return (
        "unknown" if change is None else f"{change:.4g}",
        "unknown" if rework.iterations is None else str(rework),
    )


def _layers(view: Survey) -> list[tuple[str, ...]]:
    """Return the cells of the parameters with the oldest copies; no rows if there is only one parameter."""
    rows = []
    for layer in view.stalest_layers(TOP) if len(view.layers) > 1 else ():
        ages = [
            "never saved" if age is None else _at_least(view, age)
            for age in (layer.oldest, layer.oldest_changed)
        ]
        rows.append((layer.name, str(layer.partitions), human_bytes(layer.bytes), *ages))
    return rows


def _partition(view: Survey, one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one["name"],
        str(one["shard"]),
        "never" if one["saved_step"] is None else str(one["saved_step"]),
        "-" if one["staleness"] is None else _at_least(view, one["staleness"]),
        "unknown" if one["distance"] is None else f"{one['distance']:.4g}",
    )


def narrowed(table: Table, width: int) -> Table:
    """Return the table without as many columns of `LEAST` as it takes to fit. Its title then names them."""
    kept, left = list(range(len(table.columns))), []
    for name in LEAST:
        if sum(max(len(row[k]) for row in (table.columns, *table.rows)) + 2 for k in kept) - 2 <= width:
            break
        if name in table.columns:
            kept.remove(table.columns.index(name))
            left.append(name)
    title = f"{table.title} (a wider terminal shows: {', '.join(left)})" if left else table.title
    columns, *rows = (tuple(row[k] for k in kept) for row in (table.columns, *table.rows))
    return table._replace(title=title, columns=columns, rows=rows)


# -- words -------------------------------------------------------------------------------------------------------


def _at_least(view: Survey, age: int) -> str:
    return f"at least {age}" if view.age.is_lower_bound else str(age)


def _alive(alive: bool) -> str:
    return "alive" if alive else "stopped"
