"""Define `scarctl rehearse`: end a program by signals, start it again, and compare it with an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from scarctl.cli.output import (
    EXIT_DIFFERENT,
    EXIT_NOT_DETERMINISTIC,
    EXIT_OK,
    emit,
    note,
    output_options,
    timeout_option,
    warn,
)
from scarctl.util.text import counted

if TYPE_CHECKING:
    from scarctl.rehearse.records import Attached
    from scarctl.rehearse.rehearsal import Rehearsed, RehearsedRun
    from scarctl.store.verdict import Verdict

EXAMPLES = """\b
Examples:
  scarctl rehearse -- python train.py
  scarctl rehearse --steps 10 -- torchrun --nproc-per-node 8 train.py
"""
_SHOWN = 5
"""Differences that are listed for a run."""


@click.command(epilog=EXAMPLES, context_settings={"allow_interspersed_args": False})
@click.argument("cmd", metavar="CMD...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--steps",
    type=click.IntRange(min=4),
    default=40,
    show_default=True,
    metavar="N",
    help="The program ends after step N.",
)
@timeout_option("Seconds for one run of CMD, to step N.", default=600.0)
@output_options
def command(cmd: tuple[str, ...], steps: int, timeout: float) -> int:
    """Run CMD undisturbed twice, then end it by SIGTERM and by kill -9, and compare after N steps, bit for bit.

    Each run ends after step N without what comes after the loop. Its stores are the rehearsal's own, whatever CMD
    says, without peers, and are deleted at the end. Memory gets a checkpoint every N/5 steps; the signals come in the
    middle. CMD's output goes to a file, of which the end is shown if CMD fails.

    Exit codes: 0 identical, 4 different, 5 CMD is not deterministic, 1 CMD cannot be rehearsed.
    """
    from scarctl.rehearse.rehearsal import Rehearsal
    from scarctl.store.verdict import Verdict, short

    found = Rehearsal(cmd, timeout, note).run(steps)
    verdict = Verdict(found.verdict, found.steps, found.at, short(found.cmd))
    for one in {one.digest: one for one in found.attached}.values():
        _keep(one, verdict)
    emit(found.to_json(), text="\n".join(_lines(found)))
    return {"identical": EXIT_OK, "different": EXIT_DIFFERENT}.get(found.verdict, EXIT_NOT_DETERMINISTIC)


def _lines(found: Rehearsed) -> Iterator[str]:
    """Yield the verdict in one line, then what differs, and why."""
    if found.verdict == "identical":
        ways = [f"{one.run} (continued after {one.resumed})" for one in found.runs if one.resumed is not None]
        yield (
            f"identical after {found.steps} steps: {counted(found.tensors, 'tensor')} and all extras; undisturbed "
            f"twice, {' and '.join(ways)}, sent after step {found.stop}"
        )
        return
    differing = [one for one in found.runs if one.differences or one.cause]
    if found.verdict == "not-deterministic":
        yield f"not deterministic: two undisturbed runs differ after {found.steps} steps"
        differing = differing[:1] + [one for one in differing[1:] if one.cause]
    else:
        names = " and ".join(one.run for one in differing)
        yield f"different after {found.steps} steps, of {names} after step {found.stop}"
    said: set[str] = set()
    for one in differing:
        yield from _run(one, said)


def _run(one: RehearsedRun, said: set[str]) -> Iterator[str]:
    """Yield the lines about a run. said: remedies that were shown."""
    resumed = "" if one.resumed is None else f", continued after step {one.resumed}"
    yield f"{one.run}{resumed}:"
    for difference in one.differences[:_SHOWN]:
        yield f"  {difference.name}: {difference.what}"
    if len(one.differences) > _SHOWN:
        yield f"  and {len(one.differences) - _SHOWN} more"
    if one.cause is not None:
        yield f"  likeliest reason: {one.cause.reason}"
        if one.cause.remedy not in said:
            yield f"  remedy: {one.cause.remedy}"
        said.add(one.cause.remedy)


def _keep(attached: Attached, verdict: Verdict) -> None:
    """Keep the verdict in the program's own store. If that does not exist yet, its next session brings it there."""
    from scarctl.errors import NoStore
    from scarctl.store import Store
    from scarctl.store.verdict import keep_waiting, write_verdict

    if attached.root is not None:
        try:
            write_verdict(Store.open(attached.root), verdict)
            return
        except NoStore:
            pass  # the program has not been started yet
    try:
        keep_waiting(attached.digest, verdict)
    except OSError as error:
        warn(f"the verdict is not kept for {attached.store}: {error}")
