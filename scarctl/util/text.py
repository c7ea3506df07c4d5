"""Escape control characters in paths and foreign messages before they reach a terminal or a log."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` on one line, with every character that is not printable escaped as in Python."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """Return `text` with every line made printable; line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))
