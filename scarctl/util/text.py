"""Format text for people: numbers with their nouns, and foreign text without control characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def printable(text: str) -> str:
    """Return `text` on one line, with every character that is not printable escaped as in Python."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """Return `text` with every line made printable; line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))


def joined(texts: Iterable[str]) -> str:
    """Return texts of untrusted origin, such as reasons that a store has, on one line."""
    return "; ".join(map(printable, texts))


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun: "1 partition", "2 partitions". plural: for nouns that take more than an s."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def human_bytes(count: int) -> str:
    """Return a readable size: 1536 -> "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def span(seconds: float) -> str:
    """Return a readable time: 0.94 -> "0.94 s", 600 -> "10 min"."""
    for unit, length, most in (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172_800.0)):
        if seconds < most:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86_400:.3g} days"


def aligned(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Return rows of cells as lines with aligned columns. The last cell of a shorter row may exceed its column."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    return [
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
