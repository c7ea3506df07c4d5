"""`scarctl run`: run a training command alongside the host's daemon, and wait until everything is durable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from scarctl.cli.output import (
    EXIT_RUN_FAILED,
    EXIT_SIGNAL,
    arena_option,
    note,
    options_for,
    store_option,
    timeout_option,
    warn,
)
from scarctl.errors import NoStore, ScarError
from scarctl.util.process import exists
from scarctl.util.text import counted, human_bytes

if TYPE_CHECKING:
    from scarctl.daemon.status import RunStatus
    from scarctl.store.backends.address import Address

EXAMPLES = """\b
Examples:
  scarctl run -- python train.py
  scarctl run --store ckpt --restarts 3 -- torchrun --nproc-per-node 8 t.py
"""
NOT_EXECUTABLE = 126
NOT_FOUND = 127
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_BY_TERMINAL = (signal.SIGINT, signal.SIGHUP)
_SI_KERNEL = 0x80
"""The `si_code` of a signal from the kernel, not from a process."""
_HOLD_SECONDS = 600
_SOON = 10
"""Seconds before an unused daemon ends, at which the command is checked once more."""
_POLL = 0.1
_PATIENCE = 1.0
"""Seconds that one request to the daemon may take at the end: signals are noticed between requests."""


@click.command(epilog=EXAMPLES, context_settings={"allow_interspersed_args": False})
@click.argument("cmd", metavar="CMD...", nargs=-1, required=True, type=click.UNPROCESSED)
@store_option(about="Store that the sessions save to.")
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Times to run CMD again if it fails.",
)
@timeout_option("Seconds to wait at the end until all is durable.")
@arena_option
@click.option(
    "--peers",
    type=click.IntRange(min=0),
    metavar="N",
    help="Number of other hosts that keep a copy of this one's memory.",
)
@click.option("--overhead", metavar="SHARE", help="Largest share of training time for checkpoints: 0.01, 1%.")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def command(debug: bool, **options: Any) -> int:
    """Run CMD. Its sessions save through the host's daemon, which continues if CMD dies.

    Signals are forwarded to CMD. At the end, scarctl waits until everything that CMD handed over is durable. The exit
    code is CMD's, or 128+N if signal N ended it; 125 if scarctl itself fails, 126 if CMD cannot be executed, 127 if it
    is not found. SCARCTL_RESTART_COUNT has the number of earlier runs of CMD. After SIGTERM, SIGINT or SIGHUP, CMD is
    not run again.
    """
    # This comes first: numpy's import starts threads, which would take signals that are not blocked yet.
    with _Forwarding() as forwarding:
        return _run(forwarding, **options)


def _run(
    forwarding: _Forwarding,
    cmd: Sequence[str],
    store: str | None,
    restarts: int,
    timeout: float,
    arena_dir: str | None,
    peers: int | None,
    overhead: str | None,
) -> int:
    from scarctl.arena.folder import host_folder
    from scarctl.config.checks import parse_overhead
    from scarctl.daemon.client import hold
    from scarctl.store.backends.address import Address

    folder = host_folder(arena_dir)
    address = Address.parse(store, options_for(store)) if store is not None else None
    if address is not None and address.root is None:
        from scarctl.store.backends.client import check_file_system

        check_file_system(address)
    # Absolute, because CMD may change its folder before it attaches.
    given = {
        "SCARCTL_STORE": None if address is None else address.url,
        "SCARCTL_ARENA_DIR": arena_dir and os.path.abspath(arena_dir),
        "SCARCTL_PEERS": None if peers is None else str(peers),
        "SCARCTL_OVERHEAD": None if overhead is None else str(parse_overhead(overhead)),
    }
    environment = {
        **os.environ,
        "SCARCTL_DAEMON": "1",
        **{name: value for name, value in given.items() if value is not None},
    }
    started = time.time()
    hold(folder, _HOLD_SECONDS)  # until the first session comes
    unattached = _Unattached(folder, cmd[0])
    code = 0
    for count in range(restarts + 1):
        try:
            with unattached:
                code = forwarding.run(cmd, {**environment, "SCARCTL_RESTART_COUNT": str(count)})
        except OSError as error:
            note(f"{cmd[0]}: {error.strerror}")
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            break
        if code == 0 or forwarding.asked is not None or count == restarts:
            break
        note(f"{cmd[0]} ended with exit code {code}: restart {count + 1} of {restarts}")
    if code == 0 and forwarding.asked is None:
        unattached.look("has ended")
    try:
        _wait_until_durable(folder, address, timeout, forwarding, started)
    except ScarError as error:
        note(str(error))
        code = code or EXIT_RUN_FAILED
    return code


class _Unattached:
    """A context in which a command runs: warns if no session has attached to the daemon, whose patience ends."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._before = self._claims()
        self._timer: threading.Timer | None = None
        self._said = False

    def __enter__(self) -> None:
        self._timer = threading.Timer(_HOLD_SECONDS - _SOON, self.look, ("is running",))
        self._timer.daemon = True
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        assert self._timer is not None
        self._timer.cancel()

    def look(self, what: str) -> None:
        """Warn, once, if the daemon is the same as at the beginning, and no run has begun since."""
        if self._before is None or self._said or self._claims() != self._before:
            return
        self._said = True
        warn(
            f"{self._name} {what}, and no session has attached through this host's daemon: none of it is saved. "
            "Does it call scarctl.attach, without Settings(daemon=False)?"
        )

    def _claims(self) -> tuple[int, int] | None:
        """Return the daemon's process id and its number of runs so far; None if unknown."""
        from scarctl.daemon.client import ask_status

        try:
            answer = ask_status(self._folder, patience=_PATIENCE)
        except ScarError:
            return None
        return None if answer is None else (answer["pid"], answer["claims"])


class _Forwarding:
    """A context that forwards signals to the command that `run` runs."""

    def __init__(self) -> None:
        self.asked: int | None = None
        """The newest signal that requests the end."""
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._previous: dict[int, Any] = {}
        # A terminal sends key presses and its hang-up to every foreground process, so the command receives them anyway.
        self._shared = _BY_TERMINAL if _in_foreground() else ()
        self._lock = threading.RLock()
        self._listener = threading.Thread(target=self._listen, name="scarctl-signals", daemon=True)
        self._ended = False

    def __enter__(self) -> _Forwarding:
        for number in _FORWARDED:
            if (
                signal.getsignal(number) is not signal.SIG_IGN
            ):  # nohup's SIG_IGN stays, here and in the command
                self._previous[number] = signal.signal(number, self._forward)
        if self._previous:
            # Blocked in every thread, so that they wait for the listener: one that another thread takes would not be
            # handled before the command ends, because Python's handlers run in the main thread, which waits for it.
            signal.pthread_sigmask(signal.SIG_BLOCK, self._previous)
            self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener.ident is not None:
            self._ended = True
            signal.pthread_kill(self._listener.ident, next(iter(self._previous)))
            self._listener.join()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._previous)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run the command; return its exit code, 128+N if signal N ended it. Raises OSError if it cannot start."""
        if self.asked is not None:
            return EXIT_SIGNAL + self.asked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._previous)  # the command would inherit it
        try:
            process = subprocess.Popen(command, env=environment, close_fds=False)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, self._previous)
        with self._lock:
            self._process = process
            while self._early:
                process.send_signal(self._early.pop(0))
        code = process.wait()
        with self._lock:
            self._process = None
        return code if code >= 0 else EXIT_SIGNAL - code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._take(number, pass_on=number not in self._shared)

    def _listen(self) -> None:
        """Take the signals, in a thread. Where the system says who sent one, forward what the terminal did not send."""
        while True:
            if sys.platform == "linux":
                info = signal.sigwaitinfo(self._previous)
                number = info.si_signo
                # A terminal's hang-up reaches only the session's leader.
                alone = number == signal.SIGHUP and os.getsid(0) == os.getpid()
                pass_on = number not in _BY_TERMINAL or alone or info.si_code != _SI_KERNEL
            else:
                number = signal.sigwait(self._previous)
                pass_on = number not in self._shared
            if self._ended:
                return
            self._take(number, pass_on=pass_on)

    def _take(self, number: int, *, pass_on: bool) -> None:
        with self._lock:
            if number in _ENDING:
                self.asked = number
            if pass_on and self._process is not None:
                self._process.send_signal(number)
            elif pass_on:
                self._early.append(number)


def _in_foreground() -> bool:
    """Return whether this process is in the foreground of a terminal."""
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
    folder: Path, address: Address | None, timeout: float, forwarding: _Forwarding, started: float
) -> None:
    """Wait until the daemon has saved the arenas of dead sessions, for `timeout` seconds or until a signal.

    Reports the arenas that are not saved by then.
    """
    from scarctl.arena.stale import survey
    from scarctl.daemon.client import ask

    shown = None if address is None else str(address.root or address.shown)
    forwarding.asked = None
    deadline = time.monotonic() + timeout
    runs: list[RunStatus] = []
    held = True
    tried = False
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
                runs = []  # it has ended, because all was durable
            elif error.kind == "daemon-ending":
                held = False
                continue
            elif error.kind == "daemon-gone":
                silent = True  # it has been stopped, or ends just now
            else:
                raise
        waiting = [run for run in runs if shown in (None, run["store"]) and not _trainer_lives(run)]
        if forwarding.asked is not None or time.monotonic() > deadline:
            break
        if not (waiting or silent):
            if tried or address is None or not _save_queued(folder, address):
                break
            tried = True
        time.sleep(_POLL)
    if silent:
        note(f"the daemon in {folder} does not answer")
    for run in waiting:
        queued = f"{human_bytes(run['queued_bytes'])} are" if run["open"] else "copies are"
        note(f"{run['store']}: {queued} not durable yet; the daemon continues to save them")
    for arena in survey(folder, frozenset(run["id"] for run in runs)):
        if arena.pending_partitions and arena.idle_seconds <= time.time() - started:
            note(
                f"{arena.folder}: {counted(arena.pending_partitions, 'partition')} only in memory; "
                "the next session of that run on this host saves them"
            )


def _save_queued(folder: Path, address: Address) -> bool:
    """Have a new daemon save this store's queued copies, even after one has died. Return whether any were queued."""
    from scarctl.arena.stale import survey
    from scarctl.daemon.client import adopt
    from scarctl.store import Store
    from scarctl.store.backends.address import portable_options

    queued = {arena.id for arena in survey(folder) if not (arena.durable or arena.foreign or arena.aside)}
    try:
        if not queued:
            return False
        own = Store.open(address.url, storage_options=address.options).run_id
        # A run's id is that of the store; a rank's is followed by the number of its shard.
        found = [run for run in sorted(queued) if run == own or run.startswith(f"{own}-")]
        for run in found:
            shard = run.removeprefix(own).removeprefix("-")
            options = portable_options(address, address.options, os.environ)
            adopt(folder, address.url, options, int(shard) if shard else None)
        if not found:
            return False
    except NoStore:
        return False
    except ScarError as error:
        note(str(error))
        return False
    return True


def _trainer_lives(run: RunStatus) -> bool:
    """Return whether a run's training process lives. The daemon notices a death only after a moment."""
    if (
        run["phase"] != "attached" or run["pid"] == os.getpid()
    ):  # this process trains nothing: see `_save_queued`
        return False
    return not run["pid"] or exists(run["pid"])
