"""Text that a terminal or a log may be given: paths and foreign messages can hold control characters."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` on one line, and moving no cursor: every character that is not printable is escaped as Python does."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines, which stay lines."""
    return "\n".join(map(printable, text.split("\n")))
