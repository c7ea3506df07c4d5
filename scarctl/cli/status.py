"""Define `scarctl status`: show problems, what a loss would cost now, and what to do next."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from scarctl.cli.given import named_store, refuse
from scarctl.cli.output import (
    EXIT_OK,
    EXIT_PARTLY,
    Seconds,
    arena_option,
    emit,
    open_store,
    output_options,
    store_argument,
    wants_json,
)
from scarctl.errors import NoStore, ScarError

if TYPE_CHECKING:
    from scarctl.daemon.status import DaemonStatus
    from scarctl.ops.health import Health

EXAMPLES = """\b
Examples:
  scarctl status
  scarctl status ckpt
  scarctl status ckpt --watch --every 10
"""


@click.command(epilog=EXAMPLES)
@store_argument
@click.option("--watch", "follow", is_flag=True, help="Repeat until Ctrl-C.")
@click.option(
    "--every",
    type=Seconds(at_least=0.1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="With --watch.",
)
@arena_option
@output_options
def command(place: str | None, store: str | None, follow: bool, every: float, arena_dir: str | None) -> int:
    """Show problems, worst first, what would be lost now, and what to do next.

    Without STORE: all stores that this host's daemon and memory know. Exit code 3: there are problems; 10: no store is
    known here; the error's code if STORE cannot be read.
    """
    from scarctl.cli.status_view import page

    if not follow:
        refuse("every", why="requires --watch")
    wanted = named_store(place, store)

    def look() -> list[Health]:
        return _look(wanted, arena_dir)

    if not follow:
        found = look()
        width = _width()
        emit(_fields(found), text="\n".join(page(found, width)))
        return _code(found, wanted)
    if wants_json():
        repeat(every, lambda: emit(_fields(look())))
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        _on_screen(look, every)
    else:
        repeat(every, lambda: emit({}, text="\n".join([*page(look(), _width()), ""])))
    return EXIT_OK


def _look(wanted: str | None, arena_dir: str | None) -> list[Health]:
    """Return the health of the wanted store, or of all known here, worst first. Raises NoStore, AccessDenied."""
    from scarctl.ops.health import LOSING, Finding, gone, health_of, unreadable, worst_first
    from scarctl.ops.known import daemon_here, known_stores, place_of, runs_at, runs_of, say_once
    from scarctl.ops.survey import survey
    from scarctl.store.verdict import read_verdict

    daemon: DaemonStatus | None = None
    silent: ScarError | None = None
    try:
        daemon = daemon_here(arena_dir)
    except ScarError as error:
        silent = error
    places, lost = ([wanted], []) if wanted is not None else known_stores(daemon, arena_dir)
    if not places and not lost:
        raise NoStore(
            "no run on this host saves to a store, and none has left copies in its memory",
            hint="name a store: `scarctl status STORE`",
            kind="nothing-known",
        )
    found = []
    for place in places:
        try:
            opened = open_store(place)
            found.append(
                health_of(survey(opened, arena_dir), runs_of(daemon, opened.run_id), read_verdict(opened))
            )
        except ScarError as error:
            runs = runs_at(daemon, place_of(place))
            found.append(unreadable(place, error, remembered=wanted is None, runs=runs))
    if silent is not None:
        finding = Finding(LOSING, silent.kind, str(silent), "scarctl daemon status")
        found = [one.with_finding(finding) for one in found]
    for one in lost:
        found.append(gone(one.url, one.why, one.pid))
        say_once(one)
    return list(worst_first(found))


def _code(found: list[Health], wanted: str | None) -> int:
    if wanted is not None and found[0].exit_code:
        return found[0].exit_code
    return EXIT_OK if all(one.well for one in found) else EXIT_PARTLY


def _fields(found: list[Health]) -> dict[str, object]:
    return {"well": all(one.well for one in found), "stores": [one.to_json() for one in found]}


def _width() -> int:
    """Return the columns of the terminal; 80 without one."""
    import shutil

    return max(40, shutil.get_terminal_size((80, 24)).columns)


def _on_screen(look: Callable[[], list[Health]], every: float) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from scarctl.cli.status_view import page

    console = Console()
    with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        repeat(every, lambda: live.update(Group(*map(Text, page(look(), console.width))), refresh=True))


def repeat(every: float, turn: Callable[[], bool | None]) -> None:
    """Call `turn` every `every` seconds until it returns True."""
    started = time.monotonic()
    turns = 0
    while not turn():
        # At fixed times, because reading a large store takes time, too.
        turns = max(turns + 1, int((time.monotonic() - started) / every))
        time.sleep(max(0.0, started + turns * every - time.monotonic()))
