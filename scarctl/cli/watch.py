"""Implement `scarctl inspect --watch`: repeat a survey while a run on this host is alive."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from scarctl.cli.inspect_view import line, page
from scarctl.cli.output import emit, note, wants_json
from scarctl.ops.surveyed import Survey

Look: TypeAlias = Callable[[], Survey]


def watch(look: Look, every: float, *, on_screen: bool, limit: int | None) -> None:
    """Show the result of `look` every `every` seconds until the run has ended.

    With `--json`, every look is a line of JSON with at most `limit` partitions (None: all). With `on_screen`, one page
    is refreshed in place. Otherwise every look is a line of text. Ctrl-C raises KeyboardInterrupt.
    """
    if wants_json():
        _follow(look, every, lambda view: emit(view.to_json(limit)))
    elif on_screen:
        _follow_on_screen(look, every)
    else:
        _follow(look, every, lambda view: emit({}, text=line(view)))


def _follow(look: Look, every: float, show: Callable[[Survey], None]) -> None:
    turns = 0

    def turn() -> bool:
        nonlocal turns
        view = look()
        show(view)
        turns += 1
        if view.run is None or not view.run.alive:
            note("no run is alive on this host" if turns == 1 else "the run has ended")
            return True
        return False

    repeat(every, turn)


def repeat(every: float, turn: Callable[[], bool | None]) -> None:
    """Call `turn` every `every` seconds until it returns True."""
    started = time.monotonic()
    turns = 0
    while not turn():
        # At fixed times, because reading a large store takes time, too.
        turns = max(turns + 1, int((time.monotonic() - started) / every))
        time.sleep(max(0.0, started + turns * every - time.monotonic()))


def _follow_on_screen(look: Look, every: float) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        _follow(look, every, lambda view: live.update(Group(*page(view, console.width)), refresh=True))
