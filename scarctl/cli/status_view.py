"""Lay out the health of stores for people: one page, worst first, at most as wide as the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from scarctl.cli.inspect_view import pace_of
from scarctl.cli.output import in_iterations
from scarctl.ops.health import AT_RISK, LOSING, NOTE, Finding, Health, Loss, Saving
from scarctl.ops.surveyed import ShardLine
from scarctl.store.saved import describe
from scarctl.util.text import aligned, counted, human_bytes

_MARKS = {LOSING: "!!", AT_RISK: "! ", NOTE: "- "}
_VERDICT = {LOSING: "LOSING", AT_RISK: "AT RISK", NOTE: "well"}
_IF_LOST = {"process": "process", "host": "this host", "store": "store"}
LOSS_COLUMNS = ("if it is lost now", "goes back by", "change", "predicted rework")
_MOST = 230
"""Characters of a finding, three lines: `scarctl inspect` and --json show all of it."""
_UNSEEN = "nothing, unless the run continues on another host"
_RANKS = 4
"""Ranks whose saving is listed for a store."""
_SHARDS = 3
"""Shards that are listed for a store."""


def page(stores: Sequence[Health], width: int) -> list[str]:
    """Return the lines for these stores, in their order. Lines are wrapped at `width`, except commands."""
    lines = []
    if len(stores) > 1:
        unwell = sum(not one.well for one in stores)
        lines.append(
            f"{counted(len(stores), 'store')}, {f'{unwell} with problems' if unwell else 'all well'}"
        )
    for one in stores:
        lines += [line for text in _store(one, width) for line in _wrapped(text, width)]
    return lines


def _store(one: Health, width: int) -> Iterator[str]:
    yield f"{_VERDICT[one.severity]}: {one.url}"
    view = one.survey
    if view is not None and view.layout is not None:
        who = "no run on this host" if view.run is None else _run(one)
        yield (
            f"  {view.reached}, {counted(view.layout.partitions, 'partition')}, "
            f"{human_bytes(view.layout.nbytes)}; {who}; {describe(view.age.saved_at)}"
        )
        yield f"  {view.ages}"
        if view.run is not None and view.run.alive:
            yield from (f"  {line}" for line in pace_of(view.run))
    yield from _losses(one, width)
    yield from _progress(one, width)
    for finding in one.findings:
        yield from _finding(finding)
    for line in one.unwell[:_SHARDS]:
        yield f"  {_shard(line)}"
    if len(one.unwell) > _SHARDS:
        yield f"  and {counted(len(one.unwell) - _SHARDS, 'more shard')}: `scarctl inspect` lists all"


def _run(one: Health) -> str:
    assert one.survey is not None
    assert one.survey.run is not None
    run, view = one.survey.run, one.survey
    here = [rank for rank in view.ranks if rank.alive is not None and rank.replica_of is None]
    if here and view.topology is not None:
        alive = sum(bool(rank.alive) for rank in here)
        return f"{alive} of {counted(len(here), view.topology.noun)} on this host alive"
    return f"process {run.pid} {'alive' if run.alive else 'dead'}"


def _losses(one: Health, width: int) -> Iterator[str]:
    """Yield a table: what is lost if the process, the host or the store is lost now."""
    if not one.losses:
        return
    yield from _table([LOSS_COLUMNS, *(loss_cells(*loss) for loss in one.losses.items())], width)


def _table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return rows below their header as a table. Where that is too wide, return a sentence for each row."""
    lines = aligned(rows, "  ")
    if max(map(len, lines)) <= width:
        return lines
    (head, *columns), *others = rows
    named = [
        ", ".join(f"{name} {cell}" for name, cell in zip(columns, cells, strict=True))
        if len(cells) == len(columns)
        else cells[0]
        for _, *cells in others
    ]
    return [f"  {head}:", *(f"    {row[0]}: {text}" for row, text in zip(others, named, strict=True))]


def _progress(one: Health, width: int) -> Iterator[str]:
    """Yield a table of this host's daemon's progress: errors first, then lacking copies, then the farthest behind."""
    if not one.saving:
        return
    shown = sorted(one.saving, key=_urgency)[:_RANKS]
    rows: list[tuple[str, ...]] = [("saving", "step", "behind", "waiting", "store's speed", "errors")]
    rows += [
        (
            saving.name,
            str(saving.step),
            counted(saving.lag, "step"),
            human_bytes(saving.pending_bytes),
            f"{human_bytes(saving.bandwidth)}/s",
            str(saving.errors),
        )
        for saving in shown
    ]
    if any(saving.copies_wanted for saving in one.saving):
        cells = (f"{saving.copies} of {saving.copies_wanted}" for saving in shown)
        rows = [(*row, cell) for row, cell in zip(rows, ("on other hosts", *cells), strict=True)]
    yield from _table(rows, width)
    if len(one.saving) > len(shown):
        yield f"  and {counted(len(one.saving) - len(shown), 'more rank')}: `scarctl daemon status` lists all"


def _urgency(saving: Saving) -> tuple[int, ...]:
    return -saving.errors, saving.copies - saving.copies_wanted, -saving.lag


def loss_cells(what: str, loss: Loss) -> tuple[str, ...]:
    """Return the cells of one loss: its name and a sentence, or a cell for each column."""
    name = _IF_LOST[what]
    gone, total = loss.partitions_without_copy, loss.total_partitions
    if gone == total:
        return name, "everything is lost: no other copy is known here"
    if gone:
        return name, f"{gone} of {counted(total, 'partition')} lost: no other copy is known here"
    if loss.steps is None:
        return name, "unknown: damage hides how far the run was"
    if not loss.steps and what == "store":
        return name, "nothing while its process lives, then everything"
    if not loss.steps:
        return name, _UNSEEN if loss.age_is_lower_bound else "nothing is lost"
    return (
        name,
        f"up to {loss.steps}+ steps" if loss.age_is_lower_bound else f"up to {counted(loss.steps, 'step')}",
        "unknown" if loss.perturbation is None else f"{loss.perturbation:.4g}",
        "unknown" if loss.rework.iterations is None else in_iterations(loss.rework),
    )


def _finding(finding: Finding) -> Iterator[str]:
    yield f"  {_MARKS[finding.severity]} {textwrap.shorten(finding.message, _MOST, placeholder=' ...')}"
    if finding.command:
        yield f"     $ {finding.command}"


def _shard(line: ShardLine) -> str:
    return f"shard {line.shard}: {line.never_saved} of {counted(line.partitions, 'partition')} never saved"


def _wrapped(text: str, width: int) -> list[str]:
    """Return a line broken at spaces, the rest indented below it. A command stays in one piece, to be copied."""
    indent = len(text) - len(text.lstrip(" "))
    if len(text) <= width or text.lstrip().startswith("$ "):
        return [text]
    return textwrap.wrap(
        text,
        width,
        initial_indent="",
        subsequent_indent=" " * (indent + 2),
        drop_whitespace=True,
        break_on_hyphens=False,
        break_long_words=False,
    )
