"""Format text for people: numbers with their nouns, and foreign text without control characters."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` on one line, with every character that is not printable escaped as in Python."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """Return `text` with every line made printable; line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun: "1 partition", "2 partitions". plural: for nouns that take more than an s."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
