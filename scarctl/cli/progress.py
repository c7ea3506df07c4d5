"""Show the progress of long work on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

from scarctl.cli.output import note
from scarctl.util.text import human_bytes

_TERMINAL_PAUSE = 0.5
_PAUSE = 30.0


class Progress:
    """Show an amount on stderr: in place on a terminal twice a second, otherwise as a line every 30 seconds.

    Short work shows nothing.
    """

    def __init__(self, verb: str, shown: Callable[[int], str] = human_bytes) -> None:
        """verb: what was done with the bytes, such as "verified". shown: returns an amount in words."""
        self._verb, self._amount = verb, shown
        self._terminal = sys.stderr.isatty()
        self._pause = _TERMINAL_PAUSE if self._terminal else _PAUSE
        self._next = time.monotonic() + self._pause
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        """Note that `done` of `total` are done."""
        if time.monotonic() < self._next and not (self._shown and done >= total):
            return
        self._next = time.monotonic() + self._pause
        text = f"{self._verb} {self._amount(done)} of {self._amount(total)}"
        if not self._terminal:
            note(text)
            return
        click.echo(f"\r\x1b[K{'' if done >= total else text}", err=True, nl=False)
        self._shown = done < total
