"""Save on SIGTERM and SIGINT before the signals have their usual effect.

Python runs a signal's handler in the main thread, between two bytecodes. A main thread that is stuck in a C call (a
collective whose peer has died, a long kernel) never runs it. But the interpreter's own C handler writes the signal's
number to a file at once (`signal.set_wakeup_fd`), and a thread here reads it. That thread has another thread run
the callbacks of `watch`. Then it passes the signal on to the previous handler, in the main thread. Without a previous
handler, that thread ends the process by the signal.

No handler waits. So the main thread continues its work meanwhile, which callbacks may need.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

from scarctl.util.worker import Worker

log = logging.getLogger("scarctl")

SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
TOGETHER = 0.2
"""Seconds within which the same signal counts once: launchers forward signals that the whole process group received."""
REMINDER = 1.0
"""Seconds after which a signal that was passed on, and whose handler has not run, is sent once more."""
_POLL, _PASSED = 0.02, 2.0
"""Seconds between two looks of `settle`, and for which it waits for the effect of a signal that was passed on."""
LONGEST = 120.0
"""Seconds after which a signal has its effect even if callbacks still run, unless they may take longer."""

Callback = Callable[[int, bool], None]
"""Called with the signal, and with True if the signal then ends the process."""


# -- decisions: a pure state machine ----------------------------------------------------------------------------


class Phase(enum.Enum):
    """Phases of the state machine."""

    QUIET = "quiet"
    SAVING = "saving"
    """A signal came; the callbacks run."""
    PASSING = "passing"
    """Signals were passed on, and wait for the main thread to run their handlers."""


@dataclass(frozen=True, slots=True)
class Save:
    """Run the callbacks, then report `saved`."""

    signum: int


@dataclass(frozen=True, slots=True)
class Let:
    """Let these signals have their usual effect; `at_once`: a repeated signal, and the main thread may be stuck."""

    signums: tuple[int, ...]
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Remind:
    """Send these signals once more: the main thread may have begun to wait just when they came."""

    signums: tuple[int, ...]


Instruction = Save | Let | Remind


@dataclass(slots=True)
class Machine:
    """Decides how to react to signals, without I/O. Times are seconds on one monotonic clock, passed with the events.

    Every delivery of a signal appears up to twice, in this order: as a byte from the C handler (`came`; unless other
    code has taken the wakeup file), and when its Python handler runs (`ran`; unless the main thread is stuck). A signal
    that is passed on is sent once more, and appears the same way.
    """

    phase: Phase = Phase.QUIET
    waiting: list[int] = field(default_factory=list)
    """Signals that have not had their effect yet."""
    since: float = 0.0
    """Time when the phase began."""
    _seen: set[int] = field(default_factory=set)
    """Signals whose byte came and whose handler has not run yet."""
    _echoes: set[int] = field(default_factory=set)
    """Signals sent once more whose byte has not come yet."""
    patience: float = LONGEST
    """Seconds after which a signal has its effect even if callbacks still run."""
    _reminded: bool = False

    def came(self, signum: int, now: float) -> list[Instruction]:
        """React to the byte of a delivery."""
        self._seen.add(signum)
        if signum in self._echoes:
            self._echoes.discard(signum)
            return []
        return self._delivered(signum, now)

    def ran(self, signum: int, through: bool, now: float) -> list[Instruction]:
        """React to a run of the signal's handler. `through`: whether it passed the signal on."""
        known = signum in self._seen
        self._seen.discard(signum)
        if through:
            self.forget(signum)
            return []
        return [] if known else self._delivered(signum, now)

    def saved(self, now: float) -> list[Instruction]:
        """React to the end of the callbacks, or to their timeout."""
        if self.phase is not Phase.SAVING:
            return []
        self._pass_on(now)
        return [Let(tuple(self.waiting))]

    def tick(self, now: float) -> list[Instruction]:
        """React to the passing of time."""
        if self.phase is Phase.SAVING and now >= self.since + self.patience:
            return self.saved(now)
        if self.phase is Phase.PASSING and now >= self.since + REMINDER and not self._reminded:
            self._reminded = True
            return [Remind(tuple(self.waiting))]
        return []

    def sent(self, signum: int) -> None:
        """Note that a signal is about to be sent once more."""
        self._echoes.add(signum)

    def forget(self, signum: int) -> None:
        """Drop a signal that has had its effect, or that other code handles."""
        self.waiting = [s for s in self.waiting if s != signum]
        if not self.waiting and self.phase is Phase.PASSING:
            self.phase = Phase.QUIET

    def _delivered(self, signum: int, now: float) -> list[Instruction]:
        if self.phase is Phase.QUIET:
            self.phase, self.since, self.waiting = Phase.SAVING, now, [signum]
            return [Save(signum)]
        if now < self.since + TOGETHER and signum in self.waiting:
            return []
        self.waiting += [] if signum in self.waiting else [signum]
        if now < self.since + TOGETHER:
            # Another signal at the same time. If the first one has been handled, there is no flush to wait for.
            return [Let((signum,))] if self.phase is Phase.PASSING else []
        self._pass_on(now)
        return [Let(tuple(self.waiting), at_once=True)]

    def _pass_on(self, now: float) -> None:
        self.phase, self.since, self._reminded = Phase.PASSING, now, False


# -- the process's signals ---------------------------------------------------------------------------------------

# Bytes that the handler and the callbacks' thread write. Those of the interpreter are below 65.
_RAN, _RAN_THROUGH = 0x80, 0xC0
_SAVED, _STOP = 0xFF, 0xFE
_NUMBER = 0x3F


class _Watch:
    """Handlers, wakeup file and threads, from the first `watch` to the end of the last one."""

    def __init__(self) -> None:
        """Install handlers and wakeup file, and start the thread. Only in the main thread."""
        self._machine = Machine()
        self._through: set[int] = set()
        """Signals that the next run of the handler passes on."""
        self._handled = self._heard = 0
        """Counts of the handler's runs, and of those that the reader's thread knows."""
        self._fatal: set[int] = set()
        """Signals announced to the callbacks as fatal, which therefore must end the process."""
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._previous = {
            s: old
            for s in SIGNALS
            # None: a handler that Python did not install and cannot call. Ignored signals stay ignored.
            if (old := signal.getsignal(s)) not in (None, signal.SIG_IGN)
        }
        self._chained = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._saving = Worker("scarctl-flush")
        self._reader = threading.Thread(target=self._read, name="scarctl-signals", daemon=True)
        self._reader.start()
        for signum in self._previous:
            signal.signal(signum, self._handle)

    def allow(self, patience: float) -> None:
        """Allow callbacks at least `seconds` seconds."""
        self._machine.patience = max(self._machine.patience, patience + TOGETHER)

    def settle(self) -> None:
        """Wait while callbacks run for a signal that has come, and until it has had its effect. In the main thread.

        An exception of another signal's handler does not end this, and is raised afterwards.
        """
        failed: Exception | None = None
        passing = 0.0
        while self._reader.is_alive() and (
            self._heard < self._handled or self._machine.phase is not Phase.QUIET
        ):
            try:
                if self._machine.phase is Phase.PASSING:
                    passing += _POLL
                    if passing > _PASSED:
                        break
                time.sleep(_POLL)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def uninstall(self) -> None:
        """Restore everything, in the main thread. Signals still waiting take effect now."""
        ours = self._restore()
        self._write(_STOP)
        self._reader.join()
        self._saving.close()
        self._reading.close()
        self._writing.close()
        if self._machine.phase is Phase.SAVING:
            for signum in ours.intersection(self._machine.waiting):
                signal.raise_signal(signum)

    def abandon(self) -> None:
        """Restore handlers in a forked child, which lacks the threads and shares the socket with its parent."""
        self._restore(wakeup=-1)
        self._reading.close()
        self._writing.close()

    def _restore(self, wakeup: int | None = None) -> set[int]:
        """Restore handlers and wakeup file, unless other code replaced ours; return the signals restored."""
        current = signal.set_wakeup_fd(-1)
        if current != self._writing.fileno():
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        elif wakeup is None and self._chained >= 0:
            try:
                signal.set_wakeup_fd(self._chained, warn_on_full_buffer=False)
            except (OSError, ValueError):
                log.debug("the wakeup file that was there before has been closed")
        ours = {s for s in self._previous if self._is_ours(s)}
        for signum in ours:
            signal.signal(signum, self._previous[signum])
        return ours

    def _is_ours(self, signum: int) -> bool:
        return signal.getsignal(signum) == self._handle

    # -- in the main thread -------------------------------------------------------------------------------------

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        previous = self._previous[signum]
        through = signum in self._through
        self._through.discard(signum)
        self._handled += 1
        self._write((_RAN_THROUGH if through else _RAN) | signum)
        if through or not self._is_ours(signum) or not self._reader.is_alive():
            # A handler that was installed after ours and calls ours decides for itself when the process ends.
            if callable(previous):
                previous(signum, frame)
            elif self._is_ours(signum):
                _die(signum)

    def _write(self, token: int) -> None:
        try:
            self._writing.send(bytes([token]))
        except OSError as error:
            log.debug("the thread that reads signals has ended: %s", error)

    # -- in the reader's thread ---------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            self._reading.settimeout(None if self._machine.phase is Phase.QUIET else 1.0)
            try:
                tokens = self._reading.recv(4096)
            except TimeoutError:
                tokens = b""
            now = time.monotonic()
            for token in tokens:
                if token == _STOP:
                    return
                self._obey(self._event(token, now))
                self._heard += token not in (_SAVED, _STOP) and bool(token & _RAN)
            self._obey(self._machine.tick(now))

    def _event(self, token: int, now: float) -> list[Instruction]:
        if token == _SAVED:
            return self._machine.saved(now)
        if token & _RAN:
            through = token & _RAN_THROUGH == _RAN_THROUGH
            return self._machine.ran(token & _NUMBER, through, now)
        if token in self._previous:
            return self._machine.came(token, now)
        self._forward(token)
        return []

    def _obey(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Save):
                signum = instruction.signum
                if self._is_ours(signum) and not callable(self._previous[signum]):
                    self._fatal.add(signum)
                self._saving.submit(partial(self._save, signum, signum in self._fatal))
            elif isinstance(instruction, Let):
                for signum in instruction.signums:
                    self._let(signum, instruction.at_once)
            else:
                # The interpreter looks for signals, then waits: one that comes between the two interrupts nothing.
                for signum in self._through.intersection(instruction.signums):
                    self._send(signum)

    def _let(self, signum: int, at_once: bool) -> None:
        previous = self._previous[signum]
        self._forward(signum)
        if signum in self._fatal:
            _die(signum)
        elif not self._is_ours(signum):
            self._machine.forget(signum)  # the handler that took our place has run
        elif not callable(previous) or (at_once and previous is signal.default_int_handler):
            _die(signum)
        else:
            self._through.add(signum)
            self._send(signum)

    def _send(self, signum: int) -> None:
        self._machine.sent(signum)
        # To the main thread itself, so that a call that it waits in is interrupted.
        signal.pthread_kill(_main_thread(), signum)

    def _forward(self, signum: int) -> None:
        """Pass a byte on to the previous reader of the wakeup file (an event loop)."""
        if self._chained >= 0:
            try:
                os.write(self._chained, bytes([signum]))
            except BlockingIOError:
                pass  # the previous reader is woken up anyway
            except OSError as error:
                log.debug("the earlier wakeup file no longer has a reader: %s", error)
                self._chained = -1

    # -- in the callbacks' thread -------------------------------------------------------------------------------

    def _save(self, signum: int, fatal: bool) -> None:
        try:
            for callback in list(_callbacks.values()):
                try:
                    callback(signum, fatal)
                except Exception:
                    log.exception("saving before a signal takes effect failed")
        finally:
            self._write(_SAVED)


_callbacks: dict[int, Callback] = {}
_numbers = itertools.count()
_watch: _Watch | None = None


def watch(callback: Callback, *, patience: float = 0.0) -> Callable[[], None]:
    """Call `callback(signum, fatal)`, in a thread, before SIGTERM or SIGINT takes effect; return a function to end it.

    patience: seconds that the callback may take, if more than usual.

    Call it in the main thread: elsewhere nothing is installed, and the callback is never called. Ignored signals stay
    ignored. If a signal has just come, the returned function may raise its handler's exception.
    """
    global _watch
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    if _watch is None:
        _watch = _Watch()
    _watch.allow(patience)
    number = next(_numbers)
    _callbacks[number] = callback
    return lambda: _end(number)


def settle() -> None:
    """Wait in the main thread while callbacks run for a signal: a loop that fails must not cut them short."""
    if _watch is not None and threading.current_thread() is threading.main_thread():
        _watch.settle()


def _end(number: int) -> None:
    global _watch
    _callbacks.pop(number, None)
    # Handlers can only be restored in the main thread: otherwise they stay, and pass everything on.
    if not _callbacks and _watch is not None and threading.current_thread() is threading.main_thread():
        last, _watch = _watch, None
        last.uninstall()


def _die(signum: int) -> None:
    """End the process by this signal, from any thread: Python can reset handlers only in the main thread."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signum, None)  # SIG_DFL
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    signal.pthread_kill(threading.get_ident(), signum)
    os._exit(128 + signum)


def _main_thread() -> int:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident


# -- forks -------------------------------------------------------------------------------------------------------

_masks = threading.local()


def _before_fork() -> None:
    # Until the child has restored its handlers, a signal to it would be written into the parent's socket.
    _masks.old = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.old)


def _after_fork_in_child() -> None:
    global _watch
    inherited, _watch = _watch, None
    _callbacks.clear()
    if inherited is not None:
        inherited.abandon()
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.old)


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
