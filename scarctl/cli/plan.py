"""`scarctl plan`: recommend the interval and size of checkpoints, and report whether they pay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from scarctl.cli.output import EXIT_OK, emit, open_store, output_options, store_option
from scarctl.cli.units import Given, Size, Time
from scarctl.config.options import DEFAULT_FRACTION, DEFAULT_MAX_LAG, DEFAULT_OVERHEAD
from scarctl.errors import NoIntactCopy, UsageError
from scarctl.policy.turns import MAX_TURN, Turns
from scarctl.util.text import aligned, counted, span

if TYPE_CHECKING:
    from scarctl.store.run_pace import Pace
    from scarctl.theory.job_cost import Advice, Job, Way

EXAMPLES = """\b
Examples:
  scarctl plan --state-bytes 120GB --step-time 800ms --bandwidth 2GB --mtbf 6h
  scarctl plan --from ckpt --step-time 0.5 --bandwidth 500MB --mtbf 2d --json
  scarctl plan --from ckpt --bandwidth 500MB --mtbf 2d --peers 1 --hosts 16
"""

_TITLES = {
    "nothing": "saving nothing",
    "full": "full checkpoints, training waits",
    "background": "full checkpoints, in the background",
    "scar": "partial checkpoints and recovery",
}
_ROWS = {
    "nothing": "none",
    "full": "full, training waits",
    "background": "full, in the background",
    "scar": "partial",
}
"""The same ways below a heading."""


@click.command(epilog=EXAMPLES)
@click.option("--state-bytes", type=Size(), help="Size of parameters and moments.")
@click.option("--step-time", type=Time(), help="Duration of an iteration.")
@click.option(
    "--bandwidth",
    type=Size(per_second=True),
    required=True,
    help="Bytes per second of the store; `scarctl doctor` measures it.",
)
@click.option("--mtbf", type=Time(), required=True, help="Mean time between failures of the job.")
@click.option(
    "--shards", type=click.IntRange(min=1), metavar="N", help="Parts of the state; a failure loses one."
)
@store_option("--from source", about="Store to take omitted options from.")
@click.option(
    "--restart",
    type=Time(zero=True),
    default="60s",
    show_default=True,
    help="Time to replace failed machines.",
)
@click.option(
    "--gain",
    type=float,
    default=1.0,
    show_default=True,
    metavar="X",
    help="Squared perturbation of your policy at 1/8, relative to round.",
)
@click.option(
    "--convergence",
    type=float,
    default=1.0,
    show_default=True,
    metavar="C",
    help="Shrinking of the distance to the optimum, per iteration.",
)
@click.option(
    "--memory-bandwidth",
    type=Size(per_second=True),
    default="4GB",
    show_default=True,
    help="Bytes per second of comparing and copying a shard.",
)
@click.option(
    "--duration", type=Time(), default="24h", show_default=True, help="Duration of training without failures."
)
@click.option(
    "--peers",
    type=click.IntRange(min=0),
    metavar="N",
    help="Other hosts that keep a copy of each host's memory.",
)
@click.option(
    "--hosts", type=click.IntRange(min=1), metavar="N", help="Hosts of the job: odds that copies survive."
)
@output_options
def command(
    state_bytes: float | None,
    step_time: float | None,
    mtbf: float,
    shards: int | None,
    source: str | None,
    restart: float,
    duration: float,
    peers: int | None,
    hosts: int | None,
    **of_job: Any,
) -> int:
    """Recommend how often to save how much of the state, and report whether partial checkpoints pay.

    Four ways are compared, each at its best, by the time that saving, rework and restarts take in an hour of training.
    Options take precedence over the store of --from. docs/theory.md has the model.
    """
    from scarctl.theory.job_cost import Job, advise

    if (peers is None) != (hosts is None):
        raise UsageError("give --peers and --hosts together", hint="see `scarctl plan --help`")
    known, stored, stored_shards = (None, None, None) if source is None else _look(source)
    if state_bytes is None and stored is not None:
        state_bytes = float(stored.nbytes)
    if step_time is None and known is not None:
        step_time = known.step_seconds
    missing = [
        name for name, value in (("--state-bytes", state_bytes), ("--step-time", step_time)) if value is None
    ]
    if state_bytes is None or step_time is None:
        where = f": {source} does not contain it" if source is not None else ", or --from a store"
        example = {"--state-bytes": "--state-bytes 120GB", "--step-time": "--step-time 0.5"}
        raise UsageError(
            f"give {' and '.join(missing)}{where}",
            hint=f"such as {' '.join(example[name] for name in missing)}; see `scarctl plan --help`",
        )
    job = Job(
        state_bytes=state_bytes,
        step_seconds=step_time,
        mtbf_seconds=mtbf,
        shards=shards or stored_shards or 1,
        restart_seconds=restart,
        duration_seconds=duration,
        **of_job,
    )
    advice = advise(job)
    turns = _turns(job)
    copies = None if peers is None or hosts is None else _copies(state_bytes, hosts, peers)
    fields = {
        "copies": copies,
        "job": job.to_json(),
        "ways": {way.name: _way(way, job) for way in advice.ways},
        "pays": advice.pays,
        "rival": advice.rival.name,
        "saves": _finite(_saves(advice)),
        "store": _store(turns),
        "history": None if known is None else _history(known, stored),
    }
    text = f"{_text(job, advice, known, stored)}\n\nWithout an interval, the store gets {turns.told}."
    if turns.turn_seconds > MAX_TURN:
        text += f" More than {span(MAX_TURN)} for all of it: its copies get old."
    emit(fields, text=text if copies is None else f"{text}\n\n{_copies_text(copies)}")
    return EXIT_OK


def _turns(job: Job) -> Turns:
    """Return the store's turns of a session with the default settings, if all of the state changes all the time."""
    state, most = int(job.state_bytes), DEFAULT_FRACTION * job.state_bytes
    turns = Turns(state_bytes=state, part_bytes=max(1, int(most)), max_lag=DEFAULT_MAX_LAG)
    turns.bandwidth = job.bandwidth
    return turns


def _store(turns: Turns) -> dict[str, Any]:
    """Return what the store gets in a day."""
    nbytes, requests = turns.daily
    return {
        "bytes_per_day": nbytes,
        "requests_per_day": requests,
        "turn_seconds": turns.turn_seconds,
        "whole": turns.small,
    }


def _copies(state_bytes: float, hosts: int, peers: int) -> dict[str, Any]:
    """Return the size of copies on other hosts, and the odds that all memory survives some hosts lost at once."""
    from scarctl.peers.placement import survival

    kept = min(peers, hosts - 1)
    return {
        "hosts": hosts,
        "peers": kept,
        "bytes_per_host": 2 * kept * state_bytes / hosts,  # two slots
        "survives": [
            {"lost": lost, "odds": survival(hosts, kept, lost)} for lost in range(1, min(kept + 2, hosts) + 1)
        ],
    }


def _copies_text(copies: dict[str, Any]) -> str:
    odds = ", ".join(f"{one['lost']}: {_odds(one['odds'])}" for one in copies["survives"])
    return (
        f"{counted(copies['peers'], 'copy', 'copies')} of each of {counted(copies['hosts'], 'host')}: "
        f"{_size(copies['bytes_per_host'])} of memory per host.\n"
        f"Odds that all of it survives hosts lost at once: {odds}. Otherwise the store is older."
    )


def _odds(odds: float) -> str:
    """Format odds. Only certain outcomes are shown as 100 % or 0 %."""
    return f"{100 * odds:.0f} %" if odds in (0.0, 1.0) else f"{min(99.99, max(0.01, 100 * odds)):.4g} %"


@dataclass(frozen=True, slots=True)
class _Stored:
    """The state in a store."""

    partitions: int
    nbytes: int


def _look(source: str) -> tuple[Pace, _Stored, int]:
    """Return a store's pace, its state, and its number of shards or ranks. Raises UsageError for an empty store."""
    from scarctl.recovery.shares import open_shares
    from scarctl.store.run_pace import pace

    store = open_store(source)
    try:
        state = open_shares(store)
    except NoIntactCopy as error:
        raise UsageError(error.message, hint="omit --from") from None
    count = sum(layout.partitions for layout in state.layouts)
    shards = store.settings.shards if state.topology is None else state.topology.world
    return pace(store), _Stored(count, state.nbytes), shards


def _way(way: Way, job: Job) -> dict[str, Any]:
    return {
        "fraction": way.fraction,
        "interval": None if way.fraction is None else _iterations(way, job),
        "interval_seconds": None if way.fraction is None else way.interval,
        "seconds_per_hour": {
            "dump": _finite(way.cost.dump),
            "rework": _finite(way.cost.rework),
            "restart": _finite(way.cost.restart),
            "total": _finite(way.cost.total),
        },
    }


def _history(known: Pace, stored: _Stored | None) -> dict[str, Any]:
    return {
        "partitions": None if stored is None else stored.partitions,
        "step_seconds": known.step_seconds,
        "interval": known.interval,
        "fraction": _used_fraction(known, stored),
    }


def _used_fraction(known: Pace, stored: _Stored | None) -> float | None:
    if known.checkpoint_bytes is None or stored is None or not stored.nbytes:
        return None
    return known.checkpoint_bytes / stored.nbytes


def _iterations(way: Way, job: Job) -> int:
    return max(1, round(way.interval / job.step_seconds))


def _saves(advice: Advice) -> float:
    """Return the seconds saved per hour; infinite if only SCAR ever ends, NaN if no way does."""
    return advice.rival.cost.total - advice.scar.cost.total


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text(job: Job, advice: Advice, known: Pace | None, stored: _Stored | None) -> str:
    lines = [
        f"{_size(job.state_bytes)} in {counted(job.shards, 'shard')}, "
        f"an iteration takes {_time(job.step_seconds)}, the store takes {_size(job.bandwidth)}/s, "
        f"a failure every {_time(job.mtbf_seconds)}"
    ]
    if known is not None and stored is not None:
        used = _used_fraction(known, stored)
        now = "the log does not show the interval of checkpoints"
        if known.interval is not None and used is not None:
            every = "iteration" if known.interval == 1 else f"{known.interval} iterations"
            now = f"so far {used:.3g} of the state is saved every {every}"
        lines.append(f"{counted(stored.partitions, 'partition')}; {now}")
    columns = ("checkpoints", "saves", "every", "dump", "rework", "restart", "total")
    rows: list[tuple[str, ...]] = [columns]
    for way in advice.ways:
        cells = [way.cost.dump, way.cost.rework, way.cost.restart, way.cost.total]
        rows.append(
            (
                _ROWS[way.name],
                "-" if way.fraction is None else _share(way.fraction),
                "-" if way.fraction is None else _time(way.interval),
                *("never ends" if math.isinf(cell) else f"{cell:.1f}" for cell in cells),
            )
        )
    lines += ["", "seconds per hour of training", *aligned(rows)]
    return "\n".join([*lines, "", *_verdict(job, advice)])


def _verdict(job: Job, advice: Advice) -> list[str]:
    scar, rival = advice.scar, advice.rival
    if math.isinf(rival.cost.total) and math.isinf(scar.cost.total):
        return [
            f"No way ever finishes: a failure every {_time(job.mtbf_seconds)} leaves no time to recover, "
            f"{_time(job.restart_seconds)} for a restart alone. Is the unit right? --mtbf 6 is 6 seconds, "
            "--mtbf 6h are hours."
        ]
    if advice.pays is None:
        return _either(job, advice)
    if not advice.pays:
        lines = [f"SCAR does not pay here. Use instead: {_TITLES[rival.name]}"]
        if rival.fraction is not None:
            lines[0] += f", every {_time(rival.interval)}"
        less = -_saves(advice)
        lines[0] += (
            f" ({less:.1f} s per hour less)." if math.isfinite(less) else " (the other never finishes)."
        )
        if job.shards == 1:
            lines.append("With one shard a failure loses everything, so partial recovery is impossible.")
        return lines
    saved = _saves(advice)
    gain = (
        "the others never finish"
        if math.isinf(saved)
        else f"{saved:.1f} s per hour less than: {_TITLES[rival.name]}"
    )
    assert scar.fraction is not None
    lines = [
        f"SCAR pays: fraction={_share(scar.fraction)}, interval={_iterations(scar, job)} ({gain}).",
        "Rework is estimated from the theory; `scarctl simulate` measures it on your model.",
        f"Its checkpoints take {_percent(scar.cost.dump / 3600)} of the time. Without an interval, a session measures "
        f"what they take, and makes them as often as overhead={DEFAULT_OVERHEAD} allows.",
    ]
    if job.gain == 1:
        lines.append(
            "Smaller fractions may do even better if choosing what to save pays for your model: measure --gain."
        )
    return lines


def _either(job: Job, advice: Advice) -> list[str]:
    """Return the verdict where the two best ways cost about as much."""
    scar, rival = advice.scar, advice.rival
    assert scar.fraction is not None
    lines = [
        f"It makes little difference here: partial checkpoints cost {scar.cost.total:.1f} s per hour, "
        f"{_TITLES[rival.name]} {rival.cost.total:.1f} s.",
        f"SCAR at its best: fraction={_share(scar.fraction)}, interval={_iterations(scar, job)}.",
    ]
    if job.shards == 1:
        lines.append("With one shard a failure loses everything, so partial recovery is impossible.")
    return lines


def _share(fraction: float) -> str:
    return "1" if fraction == 1 else f"1/{round(1 / fraction)}"


def _size(nbytes: float) -> str:
    """Format bytes in the unit that was given, otherwise in decimal units, in which storage is sold."""
    if isinstance(nbytes, Given) and nbytes.text:
        return nbytes.text
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes:.0f} bytes"


def _time(seconds: float) -> str:
    if isinstance(seconds, Given) and seconds.text:
        return seconds.text
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1000:.3g} ms"
