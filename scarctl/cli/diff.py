"""`scarctl diff`: compare two checkpoints tensor by tensor."""

from __future__ import annotations

import math
from typing import Any

import click

from scarctl.cli.checkpoints import difference_lines
from scarctl.cli.inspect import Limit
from scarctl.cli.output import (
    EXIT_DIFFERENT,
    EXIT_OK,
    EXIT_PARTLY,
    emit,
    note,
    options_for,
    output_options,
    warn,
)
from scarctl.cli.progress import Progress
from scarctl.errors import UsageError

EXAMPLES = """\b
Examples:
  scarctl diff before.safetensors after.safetensors
  scarctl diff ckpt@best ckpt
  scarctl diff ckpt@1200 model.pt --ignore '*/exp_avg*'
  scarctl diff float32.safetensors bfloat16.safetensors --rtol 0.01 --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("a")
@click.argument("b")
@click.option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Leave out tensors with such names, such as '*.bias'. May be repeated.",
)
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, metavar="X", help="Relative tolerance.")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, metavar="X", help="Absolute tolerance.")
@click.option(
    "--limit",
    type=Limit(),
    default="20",
    show_default=True,
    metavar="N|all",
    help="Differences that are shown as text; --json lists all.",
)
@output_options
def command(a: str, b: str, ignore: tuple[str, ...], rtol: float, atol: float, limit: int | None) -> int:
    """Compare the checkpoints A and B tensor by tensor, the largest change first.

    Each is a safetensors or .pt file, a DCP folder, or a folder of safetensors files with an index. STORE is the newest
    copies in a store, STORE@NAME a snapshot, STORE@STEP a sealed state.

    The relative change is the norm of B - A divided by the norm of A. Values within --atol + --rtol * |A| count as
    equal; without both every byte counts.

    Exit codes: 0 equal, 4 different, 3 equal but an older copy than the newest one had to be taken from a store.
    """
    from scarctl.ops.diff import Tolerance, compare
    from scarctl.ops.store_source import open_any

    if not (math.isfinite(rtol) and math.isfinite(atol)):
        raise UsageError("--rtol and --atol are finite numbers")
    sources = [open_any(name, options_for(name)) for name in (a, b)]
    found = compare(*sources, ignore=ignore, tolerance=Tolerance(rtol, atol), progress=Progress("compared"))
    for source in sources:
        for problem in source.problems:
            warn(problem)
    fields: dict[str, Any] = {
        "a": {"checkpoint": sources[0].where, "format": sources[0].format, "tensors": len(sources[0].specs)},
        "b": {"checkpoint": sources[1].where, "format": sources[1].format, "tensors": len(sources[1].specs)},
        **found.to_json(),
        "differences": [one.to_json() for one in found.differences],
    }
    lines = difference_lines(found, sources[0].where, sources[1].where, limit)
    emit(fields, text="\n".join(lines))
    if not found.equal:
        return EXIT_DIFFERENT
    if any(source.problems for source in sources):
        note("exit code 3: the newest copy of something is damaged, an older one was compared")
        return EXIT_PARTLY
    return EXIT_OK
