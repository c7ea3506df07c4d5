"""Name a checkpoint that may be a store or not, for the commands that take either, and show its tensors as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from scarctl.cli.output import Decorated, options_for, output_options, store_option, warn
from scarctl.errors import UsageError
from scarctl.util.text import aligned, counted, human_bytes, printable

if TYPE_CHECKING:
    from scarctl.ops.diff import Comparison, Difference
    from scarctl.ops.verify_file import VerifiedCheckpoint
    from scarctl.ops.verify_memory import MemoryCheck

_SHOWN = 100
"""Problems and tensors that are listed as text, where nothing else says how many."""
_NAME = 100
"""Characters of a name that are shown."""


def store_or_checkpoint(command: Decorated) -> Decorated:
    """Add the argument CHECKPOINT, and `--store`, `--json`, `--debug`."""
    argument = click.argument("checkpoint", required=False, metavar="[CHECKPOINT]")
    return argument(store_option()(output_options(command)))


def chosen(store: str | None, checkpoint: str | None) -> tuple[str | None, str | None]:
    """Return (store, None) or (None, checkpoint): what the command line names. CHECKPOINT may name a store.

    Raises UsageError if it names both, or neither.
    """
    if checkpoint is None:
        if store is None:
            command = click.get_current_context().command_path
            raise UsageError("name a store or a checkpoint", hint=f"such as `{command} ckpt`")
        return store, None
    source = click.get_current_context().get_parameter_source("store")
    if source is click.core.ParameterSource.COMMANDLINE:
        raise UsageError("give a CHECKPOINT or --store, not both")
    from scarctl.ops.store_source import is_store

    return (checkpoint, None) if is_store(checkpoint) else (None, checkpoint)


def inspected(checkpoint: str, values: bool, limit: int | None) -> dict[str, Any]:
    """Return the document of `scarctl inspect CHECKPOINT`. values: read and measure them. limit: tensors listed."""
    from itertools import islice

    from scarctl.ops.measure import measure
    from scarctl.ops.store_source import open_any
    from scarctl.state.group import DTYPES

    source = open_any(checkpoint, options_for(checkpoint))
    dtypes: dict[str, dict[str, int]] = {}
    for spec in source.specs.values():
        of = dtypes.setdefault(spec.dtype, {"tensors": 0, "bytes": 0})
        of["tensors"] += 1
        of["bytes"] += spec.nbytes
    listed = [
        {
            "name": name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "bytes": spec.nbytes,
            **(measure(source, name).to_json() if values else {}),
        }
        for name, spec in islice(source.specs.items(), limit)
    ]
    for problem in source.problems:
        warn(problem)
    return {
        "checkpoint": source.where,
        "format": source.format,
        "count": len(source.specs),
        "values": sum(spec.nbytes // DTYPES[spec.dtype] for spec in source.specs.values()),
        "bytes": sum(spec.nbytes for spec in source.specs.values()),
        "dtypes": dict(sorted(dtypes.items())),
        "tensors": listed,
        "omitted": len(source.specs) - len(listed),
    }


def inspected_lines(fields: dict[str, Any]) -> list[str]:
    """Return the document of `inspected` as text: a summary, then a table of tensors."""
    lines = [
        f"{shown(fields['checkpoint'])}: {fields['format']}, {counted(fields['count'], 'tensor')}, "
        f"{counted(fields['values'], 'value')}, {human_bytes(fields['bytes'])}"
    ]
    lines += [
        f"{dtype}: {counted(of['tensors'], 'tensor')}, {human_bytes(of['bytes'])}"
        for dtype, of in fields["dtypes"].items()
    ]
    measured = bool(fields["tensors"]) and "norm" in fields["tensors"][0]
    rows = [
        ("dtype", "shape", "bytes", *(("norm", "min", "max", "NaN", "Inf") if measured else ()), "tensor")
    ]
    for one in fields["tensors"]:
        numbers = (
            (*(number(one[key]) for key in ("norm", "min", "max")), str(one["nan"]), str(one["inf"]))
            if measured
            else ()
        )
        rows.append(
            (one["dtype"], str(one["shape"]), human_bytes(one["bytes"]), *numbers, shown(one["name"]))
        )
    if len(rows) > 1:
        lines += ["", *aligned(rows, "  ")]
    if fields["omitted"]:
        lines.append(f"and {fields['omitted']} more tensors: --limit all lists them")
    return lines


def verified_lines(found: VerifiedCheckpoint) -> list[str]:
    """Return the result of verifying a checkpoint as text: faults, values that are not finite, verdict."""
    lines = [
        f"{shown(fault.file)}: {shown(fault.partition) + ': ' if fault.partition is not None else ''}{fault.reason}"
        for fault in found.problems[:_SHOWN]
    ]
    if len(found.problems) > _SHOWN:
        lines.append(f"and {len(found.problems) - _SHOWN} more problems: --json names all")
    faulty = {fault.partition for fault in found.problems}
    others = [tensor for tensor in found.not_finite if tensor.name not in faulty]
    for tensor in others[:_SHOWN]:
        lines.append(f"{shown(tensor.name)}: {tensor.nan} NaN, {tensor.inf} infinite")
    if len(others) > _SHOWN:
        lines.append(f"and {len(others) - _SHOWN} more tensors with such values: --json names all")
    problems = len(found.problems)
    verdict = counted(problems, "problem") if problems else "intact"
    if found.not_finite:
        verdict += f", not finite in {counted(len(found.not_finite), 'tensor')}"
    if not found.read_data:
        verdict += ", data not read" if not problems else ", not all data read"
    looked = f"{found.format}, {counted(found.tensors, 'tensor')}, {human_bytes(found.bytes)}"
    return [*lines, f"{shown(found.checkpoint)}: {looked}: {verdict}"]


def difference_lines(found: Comparison, a: str, b: str, limit: int | None) -> list[str]:
    """Return a comparison as text: a summary, then a table of the largest `limit` differences."""
    counts = found.to_json()
    ignored = f", {found.ignored} ignored" if found.ignored else ""
    if found.equal:
        looked = f"{counted(found.tensors, 'tensor')}, {human_bytes(found.bytes)}{ignored}"
        return [f"{shown(a)} and {shown(b)} are equal: {looked}"]
    words = {
        "values": "with other values",
        "dtype": "of another dtype",
        "shape": "of another shape",
        "only_in_a": "only in A",
        "only_in_b": "only in B",
    }
    parts = [f"{counts[key]} {text}" for key, text in words.items() if counts[key]]
    lines = [f"A is {shown(a)}", f"B is {shown(b)}"]
    lines.append(
        f"{len(found.differences)} of {counted(found.tensors, 'tensor')} differ{ignored}: {', '.join(parts)}"
    )
    if counts["nan_appeared"] or counts["inf_appeared"]:
        lines.append(f"only in B: {counts['nan_appeared']} NaN, {counts['inf_appeared']} infinite")
    if counts["only_in_a"] and counts["only_in_a"] + counts["only_in_b"] == found.tensors:
        lines.append(
            "no name is in both: `scarctl export --weights` writes a store's tensors under the model's own names"
        )
    rows = [("relative", "max abs", "values", "tensor", ""), *map(_row, found.differences[:limit])]
    if len(rows) > 1:
        lines += ["", *aligned(rows, "  ")]
    omitted = len(found.differences) - len(rows) + 1
    if omitted:
        lines.append(f"and {omitted} more: --limit all lists them")
    return lines


def memory_lines(copies: Sequence[MemoryCheck]) -> list[str]:
    """Return a line for each run's copies in this host's memory, and the names of damaged ones."""
    lines = []
    for copy in copies:
        whose = "own memory" if copy.replica_of is None else f"copy of {printable(copy.replica_of)}"
        rest = [f"{copy.newer} newer than the store"] if copy.newer else []
        rest += [f"{copy.moving} without a whole copy"] if copy.moving else []
        verdict = (
            f"{copy.damaged} damaged" if copy.damaged else "intact" if copy.compared else "nothing to compare"
        )
        compared = f"{counted(copy.compared, 'partition')} compared"
        lines.append(f"{copy.folder} ({whose}, step {copy.step}): {', '.join([compared, *rest])}: {verdict}")
        lines += [
            f"  {printable(name)}: its bytes are not those that were saved" for name in copy.names[:_SHOWN]
        ]
    return lines


def _row(one: Difference) -> tuple[str, ...]:
    notes = []
    if one.kind in ("only in A", "only in B"):
        notes.append(one.kind)
    elif one.kind == "dtype" and one.a is not None and one.b is not None:
        notes.append(f"dtype {one.a.dtype} -> {one.b.dtype}")
    elif one.kind == "shape" and one.a is not None and one.b is not None:
        notes.append(f"shape {list(one.a.shape)} -> {list(one.b.shape)}")
    notes += [f"{count} {what} appeared" for count, what in ((one.nan, "NaN"), (one.inf, "Inf")) if count]
    numbers = (
        (number(one.relative), number(one.max_abs), str(one.changed)) if one.measured else ("-", "-", "-")
    )
    return (*numbers, shown(one.name), ", ".join(notes))


def number(value: float | None) -> str:
    """Return a number in a table."""
    return "-" if value is None else f"{value:.4g}"


def shown(name: str) -> str:
    """Return a name on one line, cut in the middle if it is long."""
    text = printable(name)
    return text if len(text) <= _NAME else f"{text[: _NAME // 2 - 2]}...{text[-_NAME // 2 + 1 :]}"
