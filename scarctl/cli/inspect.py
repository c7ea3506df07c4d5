"""`scarctl inspect`: what a store holds, how old it is, and what losing a shard now would change."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from scarctl.cli.ages import Age, age_of, lag_of, since_of
from scarctl.cli.output import EXIT_OK, Seconds, common_options, emit, human_bytes, open_store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from scarctl.caveats import Caveat
    from scarctl.cli.ranks import Layouts, Ranks
    from scarctl.layout import Layout
    from scarctl.prediction import Outlook
    from scarctl.store import Store

EXAMPLES = """\b
Examples:
  scarctl inspect --store ckpt
  scarctl inspect --store ckpt --json --limit all
  scarctl inspect --store ckpt --watch --every 10
"""
TOP = 8


class _Limit(click.ParamType[Any]):
    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or str(value).lower() == "all":
            return None
        try:
            number = int(value)
        except ValueError:
            number = -1
        if number < 0:
            self.fail(f"{value!r} is neither a number, 0 or more, nor 'all'", param, ctx)
        return number


@click.command(epilog=EXAMPLES)
@click.option(
    "--limit",
    type=_Limit(),
    default="1000",
    show_default=True,
    metavar="N|all",
    envvar="SCARCTL_LIMIT",
    help="Partitions that --json lists.",
)
@click.option(
    "--arena-dir", metavar="DIR", envvar="SCARCTL_ARENA_DIR", help="Where arenas are, if not the default."
)
@click.option(
    "--watch", "follow", is_flag=True, envvar="SCARCTL_WATCH", help="Go on until the run on this host ends."
)
@click.option(
    "--every",
    type=Seconds(at_least=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    envvar="SCARCTL_EVERY",
    help="Time between two looks with --watch.",
)
@common_options
def command(
    store: str,
    limit: int | None,
    arena_dir: str | None,
    follow: bool,
    every: float,
    as_json: bool,
    debug: bool,
) -> int:
    """Show what a store holds: ages, shards, sizes, and what losing each shard now would change.

    Distances and the newest step of a run are known as long as its arena is on this host. With --watch and --json it is
    one document per line, and no partitions in it unless --limit asks for them.
    """
    opened = open_store(store)
    if follow:
        from scarctl.cli.watch import watch

        given = click.get_current_context().get_parameter_source("limit")
        if given is click.core.ParameterSource.DEFAULT:
            limit = 0
        watch(lambda: survey(opened, arena_dir), every, as_json=as_json, limit=limit)
        return EXIT_OK
    view = survey(opened, arena_dir)
    if as_json:
        emit(view.to_json(limit), as_json=True)
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        from rich.console import Console

        from scarctl.cli.screen import draw

        draw(view, Console())
    else:
        emit({}, as_json=False, text=_plain(view))
    return EXIT_OK


@dataclass(frozen=True)
class Survey:
    """A store at one moment. Arrays are over all partitions of the layout, in order."""

    url: str
    step: int | None
    """The run's newest step, or the newest saved one. None when nothing is saved."""
    layout: Layout | Layouts | None
    shard_of: NDArray[np.int32]
    saved_step: NDArray[np.int64]
    """-1: never saved."""
    distance: NDArray[np.float64]
    """NaN: not known."""
    usage: dict[str, int]
    snapshots: list[dict[str, Any]]
    """Named sealed states."""
    run: dict[str, Any] | None
    """What the arena says about the run, None when there is no arena on this host."""
    age: Age = field(default_factory=lambda: Age(None, is_lower_bound=True))
    """When it was saved, and whether the run may have been further than `step`."""
    ranks: list[Ranks] = field(default_factory=list)
    """Those that save to the store, each to its own shard: one entry; none where one process does."""
    note: str | None = None
    """Why this is not the newest that was begun."""
    outlook: Outlook | None = None
    """How fast the run converges; None when nothing is saved."""
    comparable: bool = False
    """Distances are in the norm that convergence is told in."""
    since: int = 0
    """Iterations since the distances were taken."""
    caveats: tuple[Caveat, ...] = ()
    """What the run that saved this found unprotected, or not exact."""

    @cached_property
    def staleness(self) -> NDArray[np.int64]:
        """Iterations since each partition was saved; -1 where it never was."""
        import numpy as np

        return np.where(self.saved_step < 0, -1, np.maximum((self.step or 0) - self.saved_step, 0))

    def partitions(self, ids: NDArray[np.int64]) -> list[dict[str, Any]]:
        """A line for each of `ids`."""
        import numpy as np

        if self.layout is None or not len(ids):
            return []
        groups = [group.name for group in self.layout.groups]
        starts, stops = self.layout.row_ranges(ids)
        columns = zip(
            self.layout.group_of(ids).tolist(),
            starts.tolist(),
            stops.tolist(),
            self.shard_of[ids].tolist(),
            self.layout.partition_bytes[ids].tolist(),
            self.saved_step[ids].tolist(),
            self.staleness[ids].tolist(),
            self.distance[ids].tolist(),
            np.isfinite(self.distance[ids]).tolist(),
            strict=True,
        )
        return [
            {
                "name": f"{groups[g]}[{start}:{stop}]",
                "group": groups[g],
                "start": start,
                "stop": stop,
                "shard": shard,
                "bytes": nbytes,
                "saved_step": saved if saved >= 0 else None,
                "staleness": stale if stale >= 0 else None,
                "distance": distance if known else None,
            }
            for g, start, stop, shard, nbytes, saved, stale, distance, known in columns
        ]

    @cached_property
    def shards(self) -> list[dict[str, Any]]:
        """A line for each shard that has partitions."""
        import numpy as np

        from scarctl.outlook import parameters_of, rework_of

        lines: list[dict[str, Any]] = []
        if self.layout is None:
            return lines
        assert self.outlook is not None, "something is saved"
        parameters = parameters_of(self.layout)
        total = max(1, int(np.count_nonzero(parameters)))
        moved = self.distance[parameters]
        whole = _norm(moved) if np.isfinite(moved).all() else math.nan
        # Numbers of up to 16 bits are sorted by their digits, ten times as fast. (And np.unique would load numpy.ma.)
        width = np.min_scalar_type(self.shard_of.max(initial=0))
        order = np.argsort(self.shard_of.astype(width), kind="stable")
        numbers = self.shard_of[order]
        first = np.flatnonzero(np.diff(numbers, prepend=-1))
        # All columns in this order at once: a shard's partitions are scattered.
        columns = (self.saved_step, self.staleness, self.distance, self.layout.partition_bytes, parameters)
        parts = zip(*(np.split(column[order], first[1:]) for column in columns), strict=True)
        for shard, (steps, stale, distance, nbytes, of_parameters) in zip(
            numbers[first].tolist(), parts, strict=False
        ):
            saved = steps[steps >= 0]
            norm = _norm(distance)
            known = math.isfinite(norm)
            share = int(np.count_nonzero(of_parameters)) / total
            rework = rework_of(
                self.outlook,
                share,
                ages=np.maximum(stale[of_parameters], 0),
                distance=distance[of_parameters] if self.comparable else None,
                since=self.since,
            )
            lines.append(
                {
                    "shard": shard,
                    "partitions": len(steps),
                    "bytes": int(nbytes.sum()),
                    "oldest_step": int(saved.min()) if len(saved) else None,
                    "newest_step": int(saved.max()) if len(saved) else None,
                    "never_saved": len(steps) - len(saved),
                    "perturbation": {
                        "value": norm if known else None,
                        "kind": "estimated" if known else "unknown",
                    },
                    "share": share,
                    "expected_perturbation": math.sqrt(share) * whole if math.isfinite(whole) else None,
                    "rework": rework.to_json(),
                }
            )
        return lines

    def stalest(self, count: int) -> list[dict[str, Any]]:
        """The partitions that were saved longest ago; never saved first."""
        return self.partitions(_least(self.saved_step, count))

    def most_changed(self, count: int) -> list[dict[str, Any]]:
        """The partitions that are farthest from their saved copy, of those whose distance is known."""
        import numpy as np

        known = np.flatnonzero(np.isfinite(self.distance) & (self.distance > 0))
        return self.partitions(known[_least(-self.distance[known], count)])

    def to_json(self, limit: int | None) -> dict[str, Any]:
        """The document's fields; at most `limit` partitions, in order of the layout."""
        import numpy as np

        total = len(self.saved_step)
        return {
            "step": self.step,
            **self.age.to_json(),
            "total_partitions": total,
            "total_bytes": 0 if self.layout is None else self.layout.nbytes,
            "shards": self.shards,
            "partitions": self.partitions(np.arange(total if limit is None else min(limit, total))),
            "store": self.usage,
            "snapshots": self.snapshots,
            "run": self.run,
            "caveats": [caveat.to_json() for caveat in self.caveats],
            "convergence": None if self.outlook is None else self.outlook.to_json(),
            **(self.ranks[0].to_json() if self.ranks else {}),
        }


def survey(store: Store, arena_dir: str | None) -> Survey:
    """Look at a store and, if it is on this host, its run's arena. Takes no lock and changes nothing."""
    import numpy as np

    from scarctl.daemon.kinship import view_of
    from scarctl.outlook import stored_outlook
    from scarctl.store import check_backed, snapshots, topology_epochs
    from scarctl.version import step_of

    if not topology_epochs(store):
        states, note = store.states(store.shards()), None
        written = [state for state in states.values() if state.layout is not None]
        newest = max(written, key=lambda state: state.epoch, default=None)
        layout = None if newest is None else newest.layout
    else:
        from scarctl.cli.ranks import survey_ranks
        from scarctl.joint import fallback_note
        from scarctl.parts import find_parts

        parts = find_parts(store)
        if parts is None or parts.topology is not None:
            return survey_ranks(store, arena_dir, parts)
        # Ranks are about to take over what one process has saved.
        layout, states, note = next(iter(parts.layouts.values())), dict(parts.states), fallback_note(parts)
    check_backed(store, states.values())
    usage = store.usage(states)
    if layout is None:
        return Survey(
            store.url, None, None, np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0), usage, [], None
        )
    version = np.full(layout.partitions, -1, dtype=np.int64)
    shard_of = np.full(layout.partitions, -1, dtype=np.int32)
    since = 0
    for shard, state in states.items():
        if state.layout == layout:
            version[state.ids] = state.version
            shard_of[state.ids] = shard
    if (shard_of < 0).any():  # some shard has no record yet
        shard_of = store.shard_of(layout)
    step = max((state.step for state in states.values()), default=-1)
    distance = np.full(layout.partitions, np.nan)
    run: dict[str, Any] | None = None
    arena = view_of(arena_dir, store)
    if arena is not None and arena.layout == layout:
        distance, step = arena.distance, max(step, arena.head_step)
        since = since_of(arena, step)
        run = {
            "pid": arena.pid,
            "alive": arena.alive,
            "head_step": arena.head_step,
            "pending_partitions": arena.pending,
            "lag_steps": lag_of(arena),
            "errors": arena.errors,
        }
    named = [snapshot.to_json() for snapshot in snapshots(store)]
    outlook, norm, caveats = stored_outlook([(store, states)], max(step, 0))
    return Survey(
        store.url,
        step if step >= 0 else None,
        layout,
        shard_of,
        step_of(version),
        distance,
        usage,
        named,
        run,
        age_of(store, states, [arena]),
        note=note,
        outlook=outlook,
        comparable=norm == "l2",
        since=since,
        caveats=caveats,
    )


def _least(values: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Where the `count` least of `values` stand, the least first; of equal ones the first. None of them is NaN."""
    import numpy as np

    among = np.arange(len(values))
    if count < len(values):
        # Finding the largest of them sorts nothing.
        among = np.flatnonzero(values <= np.partition(values, count - 1)[count - 1])
    found: NDArray[np.int64] = among[np.argsort(values[among], kind="stable")[:count]]
    return found


def _norm(distances: NDArray[np.float64]) -> float:
    """Norm of the distance of all these partitions together. Not by BLAS, which wakes threads for each shard."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(np.square(distances).sum())


AHEAD = "; no running process says how far the run is, so ages are lower bounds"


def _step(view: Survey) -> str:
    return f"step {view.step}{' or later' if view.age.is_lower_bound else ''}"


def summary(view: Survey) -> list[str]:
    """The lines above the tables."""
    if view.layout is None:
        return [f"{view.url}: nothing is saved yet"]
    usage = view.usage
    lines = [
        f"store {view.url}: {_step(view)}, {view.layout.partitions} partitions, {human_bytes(view.layout.nbytes)}",
        f"{view.age}{AHEAD if view.age.is_lower_bound else ''}",
        f"on disk {human_bytes(usage['bytes'])}, of which live {human_bytes(usage['live_bytes'])}; "
        f"{usage['segments']} segments, {usage['records']} records",
    ]
    if view.snapshots:
        named = [f"{s['name']} (step {s['step']})" for s in view.snapshots[:TOP]]
        more = f" and {len(view.snapshots) - TOP} more" if len(view.snapshots) > TOP else ""
        lines.append(f"snapshots: {', '.join(named)}{more}")
    for ranks in view.ranks:
        lines += ranks.summary()
    if view.note is not None:
        lines.append(view.note)
    if view.run is not None and not view.ranks:
        lines.append(
            f"run on this host: process {view.run['pid']} ({'alive' if view.run['alive'] else 'stopped'}), "
            f"step {view.run['head_step']}, {view.run['pending_partitions']} partitions not durable yet, "
            f"{view.run['errors']} errors"
        )
    lines += [f"caution: {caveat.message}" for caveat in view.caveats]
    if view.outlook is not None:
        lines.append(_outlook_line(view.outlook))
        expected = [line["expected_perturbation"] for line in view.shards]
        if len(expected) > 1 and None not in expected:
            mean = math.sqrt(sum(change * change for change in expected) / len(expected))
            lines.append(f"losing one of {len(expected)} shards at random is expected to change {mean:.4g}")
    return lines


def _outlook_line(outlook: Outlook) -> str:
    """How fast the run converges, and where the predictions come from."""
    fit = outlook.to_json()
    if fit["c"] is None:
        return f"rework of a loss cannot be told: {fit['reason']}"
    low, high = fit["c_interval"]
    return f"convergence: c = {fit['c']:.4g} ({low:.4g} to {high:.4g}) per iteration, from {fit['points']} points"


def shard_rows(view: Survey) -> list[tuple[str, ...]]:
    """Cells of the shards' table."""
    rows: list[tuple[str, ...]] = []
    for line in view.shards:
        oldest, newest, change = line["oldest_step"], line["newest_step"], line["perturbation"]["value"]
        never = oldest is None or line["never_saved"]
        age = "never saved" if never else view.age.at_least((view.step or 0) - oldest)
        rows.append(
            (
                str(line["shard"]),
                str(line["partitions"]),
                human_bytes(line["bytes"]),
                "-" if oldest is None else f"{oldest}..{newest}",
                age,
                "unknown" if change is None else f"{change:.4g}",
                rework_cell(line),
            )
        )
    return rows


def rework_cell(line: dict[str, Any]) -> str:
    """What of a shard's or a rank's line says how many iterations losing it costs."""
    from scarctl.prediction import Rework

    return str(Rework(**line["rework"]))


def part_table(view: Survey) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """Title, columns and cells of the table of what fails together: shards, or ranks."""
    if view.ranks:
        from scarctl.cli.ranks import COLUMNS

        return "ranks", COLUMNS, view.ranks[0].rows(view)
    return "shards", SHARD_COLUMNS, shard_rows(view)


SHARD_COLUMNS = ("shard", "partitions", "bytes", "saved steps", "age", "losing it changes", "rework")
PARTITION_COLUMNS = ("partition", "shard", "saved", "staleness", "distance")


def partition_rows(lines: list[dict[str, Any]], age: Age) -> list[tuple[str, ...]]:
    """Cells of a table of partitions. age: of the view that they are of."""
    return [
        (
            line["name"],
            str(line["shard"]),
            "never" if line["saved_step"] is None else str(line["saved_step"]),
            "-" if line["staleness"] is None else age.at_least(line["staleness"]),
            "unknown" if line["distance"] is None else f"{line['distance']:.4g}",
        )
        for line in lines
    ]


def _plain(view: Survey) -> str:
    lines = summary(view)
    if view.layout is not None:
        tables = [
            part_table(view),
            ("stalest", PARTITION_COLUMNS, partition_rows(view.stalest(TOP), view.age)),
            ("most changed", PARTITION_COLUMNS, partition_rows(view.most_changed(TOP), view.age)),
        ]
        for title, columns, rows in tables:
            if rows:
                lines += ["", title, *_aligned([columns, *rows])]
    return "\n".join(lines)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
