"""`scarctl inspect --watch`: the same view again and again, for as long as a run on this host is alive."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from scarctl.cli.output import emit, human_bytes, note

if TYPE_CHECKING:
    from scarctl.cli.inspect import Survey

Look = Callable[[], "Survey"]


def watch(look: Look, every: float, *, as_json: bool, limit: int | None) -> None:
    """Show what `look` sees every `every` seconds until the run has ended.

    On a terminal one page is refreshed in place; with `as_json` it is a line of JSON each time, elsewhere a line of
    text. Ctrl-C raises KeyboardInterrupt, as everywhere.
    """
    if as_json:
        _follow(look, every, lambda view: emit(view.to_json(limit), as_json=True))
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        _follow_on_screen(look, every)
    else:
        _follow(look, every, lambda view: emit({}, as_json=False, text=line(view)))


def _follow(look: Look, every: float, show: Callable[[Survey], None]) -> None:
    started = time.monotonic()
    turns = 0
    while True:
        view = look()
        show(view)
        if view.run is None or not view.run["alive"]:
            note("no run is alive on this host" if turns == 0 else "the run has ended")
            return
        # On a fixed beat: looking at a large store takes a while itself.
        turns = max(turns + 1, int((time.monotonic() - started) / every))
        time.sleep(max(0.0, started + turns * every - time.monotonic()))


def _follow_on_screen(look: Look, every: float) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from scarctl.cli.screen import page

    console = Console()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        _follow(look, every, lambda view: live.update(Group(*page(view, console.width)), refresh=True))


def line(view: Survey) -> str:
    """What matters of a view in one line."""
    if view.layout is None:
        return "nothing is saved yet"
    parts = [f"step {view.step}{' or later' if view.age.is_lower_bound else ''}"]
    if view.run is not None:
        waiting, lag = view.run["pending_partitions"], view.run["lag_steps"]
        parts.append(
            f"{waiting} of {view.layout.partitions} partitions not durable yet, "
            f"the oldest copied {lag} steps ago"
            if waiting
            else "all that was copied is durable"
        )
    stalest = int(view.staleness.max(initial=0))
    never = int((view.saved_step < 0).sum())
    parts.append(f"{never} never saved" if never else f"oldest saved {view.age.at_least(stalest)} steps ago")
    parts += [str(view.age), f"{human_bytes(view.usage['bytes'])} on disk"]
    if view.run is not None:
        parts.append(f"{view.run['errors']} errors")
    return ", ".join(parts)
