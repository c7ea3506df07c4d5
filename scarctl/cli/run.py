"""`scarctl run`: a training command, with the host's daemon beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import click

from scarctl.cli.output import EXIT_RUN_FAILED, EXIT_SIGNAL, arena_option, human_bytes, note, options_for
from scarctl.errors import ScarError

EXAMPLES = """\b
Examples:
  scarctl run -- python train.py
  scarctl run --store ckpt --restarts 3 -- torchrun --nproc-per-node 8 train.py
"""
NOT_EXECUTABLE = 126
NOT_FOUND = 127
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HOLD_SECONDS = 600
_POLL = 0.1
_PATIENCE = 1.0
"""Seconds that one question to the daemon may take at the end: a signal is noticed between two."""


@click.command(epilog=EXAMPLES, context_settings={"allow_interspersed_args": False})
@click.argument("cmd", metavar="CMD...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--store", metavar="URL", envvar="SCARCTL_STORE", help="The store that the sessions save to.")
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    envvar="SCARCTL_RESTARTS",
    help="How often to run CMD again when it fails.",
)
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    envvar="SCARCTL_WAIT",
    help="How long to wait at the end until all is durable.",
)
@arena_option
@click.option("--debug", is_flag=True, envvar="SCARCTL_DEBUG", help="Show a traceback when something fails.")
def command(
    cmd: tuple[str, ...], store: str | None, restarts: int, wait: float, arena_dir: str | None, debug: bool
) -> int:
    """Run CMD; its sessions save through the host's daemon, which goes on when CMD dies.

    SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 go to CMD. At the end it waits until what CMD handed over is durable.

    The exit code is CMD's, 128+N when signal N ended it; 125 when scarctl itself fails, 126 when CMD cannot be
    executed, 127 when it is not found. CMD finds in SCARCTL_RESTART_COUNT how often it was run before. After a
    SIGTERM, SIGINT or SIGHUP it is not run again.
    """
    from scarctl.daemon.client import hold
    from scarctl.daemon.folder import host_folder
    from scarctl.store.address import Address

    folder = host_folder(arena_dir)
    address = Address.parse(store, options_for(store)) if store is not None else None
    root = None if address is None else str(address.root or address.shown)
    # Absolute: CMD may go to another folder before it attaches.
    given = {
        "SCARCTL_STORE": None if address is None else address.url,
        "SCARCTL_ARENA_DIR": arena_dir and os.path.abspath(arena_dir),
    }
    environment = {
        **os.environ,
        "SCARCTL_DAEMON": "1",
        **{name: value for name, value in given.items() if value is not None},
    }
    started = time.time()
    with _Forwarding() as forwarding:
        hold(folder, _HOLD_SECONDS)  # until the first session comes
        code = 0
        for count in range(restarts + 1):
            try:
                code = forwarding.run(cmd, {**environment, "SCARCTL_RESTART_COUNT": str(count)})
            except OSError as error:
                note(f"{cmd[0]}: {error.strerror}")
                code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
                break
            if code == 0 or forwarding.asked is not None or count == restarts:
                break
            note(f"{cmd[0]} ended with exit code {code}: restart {count + 1} of {restarts}")
        try:
            _wait_until_durable(folder, root, wait, forwarding, started)
        except ScarError as error:
            note(str(error))
            code = code or EXIT_RUN_FAILED
    return code


class _Forwarding:
    """Context: signals go to the command that `run` runs."""

    def __init__(self) -> None:
        self.asked: int | None = None
        """The newest signal that asks to end."""
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._previous: dict[int, Any] = {}
        # Keys and the hang-up of a terminal reach everything in its foreground, the command too: once is enough.
        self._shared = (signal.SIGINT, signal.SIGHUP) if _in_foreground() else ()

    def __enter__(self) -> _Forwarding:
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's stays, here and in the command
                self._previous[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run the command; returns its exit code, 128+N when signal N ended it. Raises OSError if it cannot start."""
        if self.asked is not None:
            return EXIT_SIGNAL + self.asked
        self._process = subprocess.Popen(command, env=environment, close_fds=False)
        while self._early:
            self._process.send_signal(self._early.pop(0))
        code = self._process.wait()
        self._process = None
        return code if code >= 0 else EXIT_SIGNAL - code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number in _ENDING:
            self.asked = number
        if number in self._shared:
            return
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


def _in_foreground() -> bool:
    """Whether this process is in the foreground of a terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _wait_until_durable(
    folder: Path, root: str | None, wait: float, forwarding: _Forwarding, started: float
) -> None:
    """Wait until the daemon has saved what dead sessions left, at most `wait` seconds or until a signal; say what
    is left then.
    """
    from scarctl.daemon.client import ask
    from scarctl.daemon.stale import survey

    forwarding.asked = None
    deadline = time.monotonic() + wait
    runs: list[dict[str, Any]] = []
    held = True
    while True:
        patience = min(_PATIENCE, max(_POLL, deadline - time.monotonic()))
        silent = False
        try:
            if held:
                ask(folder, "hold", patience=patience, seconds=0)
                held = False
            runs = ask(folder, "status", patience=patience)["runs"]
        except ScarError as error:
            if error.kind == "no-daemon":
                runs = []  # it has nothing to do any more
            elif error.kind == "daemon-ending":
                held = False
                continue
            elif error.kind == "daemon-gone":
                silent = True  # it has been stopped, or ends just now
            else:
                raise
        waiting = [run for run in runs if root in (None, run["store"]) and not _trainer_lives(run)]
        if not (waiting or silent) or forwarding.asked is not None or time.monotonic() > deadline:
            break
        time.sleep(_POLL)
    if silent:
        note(f"the daemon in {folder} does not answer")
    for run in waiting:
        queued = f"{human_bytes(run['queued_bytes'])} are " if run["open"] else "something is "
        note(f"{run['store']}: {queued}not durable yet; the daemon goes on with it")
    for arena in survey(folder, frozenset(run["id"] for run in runs)):
        if arena.pending > 0 and arena.seconds <= time.time() - started:
            note(
                f"{arena.folder}: {arena.pending} partitions are only in memory; "
                "the next session of that run on this host saves them"
            )


def _trainer_lives(run: Mapping[str, Any]) -> bool:
    """Whether a run's training process is there. The daemon sees only after a moment that one has died."""
    if run["phase"] != "attached":
        return False
    try:
        if run["pid"]:
            os.kill(run["pid"], 0)
    except ProcessLookupError:
        return False
    return True
