"""Answer at once while a training process waits for an answer, although the daemon is nice otherwise.

On a busy host a nice process runs so seldom that a few milliseconds of work take seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from scarctl.util.niceness import POLITE, set_session

URGENT = frozenset({"claim", "open", "pause", "resume", "roll_back", "watch"})
"""Operations for which a session waits when it starts or recovers. Waiting for the store takes long, and stays nice."""


class Urgency:
    """The niceness of the daemon's session. A training process lowers it itself before it asks: see `DaemonSaver`.

    So only the system knows it: a process that dies before it asks leaves it lowered.
    """

    def __init__(self, pid: int) -> None:
        """Take the daemon's process id; 0: it has no session of its own, and no niceness is changed."""
        self._pid = pid
        self._lock = threading.Lock()
        self._answering = 0

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Run the block at a training process's priority."""
        with self._lock:
            self._answering += 1
            set_session(0, self._pid)
        try:
            yield
        finally:
            with self._lock:
                self._answering -= 1

    def rest(self) -> None:
        """Be nice again, unless an answer is due. Call it now and then: the system may refuse a change at first."""
        with self._lock:
            if not self._answering:
                set_session(POLITE, self._pid)
