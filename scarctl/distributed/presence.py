"""Keep this host's record in the store, so that hosts that share only the store find its daemon.

A thread of a session does it. Hosts of ranks choose each other over the process group (`scarctl.distributed.copies`),
those of members by their records (`scarctl.distributed.meeting`).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from scarctl.config import SessionSettings
from scarctl.daemon.saver import DaemonSaver
from scarctl.distributed.credentials import Credentials
from scarctl.distributed.host_address import NO_COPY, digest_of_place, domain_of, name_of, place_of
from scarctl.distributed.known_hosts import KnownHosts
from scarctl.errors import ScarError
from scarctl.state.caveats import Caveats
from scarctl.store import Store
from scarctl.store.hosts import MOST_TEXT, HostRecord
from scarctl.util.niceness import be_polite

log = logging.getLogger("scarctl")

_USUAL = 60.0
"""Seconds between two looks at this host's record."""
_FAULT = 15.0
"""Seconds until the next look after one that failed unexpectedly."""
_END = 5.0
"""Seconds that closing waits for a look."""
COPIES, _RECORD = "peers", "peer-record"
"""Kinds of the caveats: too few hosts keep copies; this host cannot be found."""


class Presence:
    """Keeps the record of one session's host. Made after its saver is open; `start` it, `close` it."""

    def __init__(
        self,
        store: Store,
        saver: DaemonSaver,
        settings: SessionSettings,
        credentials: Credentials,
        caveats: Caveats,
        address: str = "",
        chosen: tuple[str, ...] = (),
        *,
        clock: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare, without a request. address: that of this host's daemon. chosen: places of the hosts with its copies.

        clock, now: see `KnownHosts`.
        """
        self._place, self._domain = digest_of_place(place_of(settings)), domain_of(settings)
        self._hosts = KnownHosts(store, self._place, clock, now)
        self._url = store.url
        self._saver = saver
        self._settings = settings
        self._credentials = credentials
        self._caveats = caveats
        self._clock, self._now = clock, now
        self._address, self._port = address, 0
        self._chosen = chosen
        """Places of the hosts that are to keep the copies."""
        self._deaf = False
        """Whether the daemon cannot listen."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scarctl-hosts", daemon=True)

    def start(self) -> None:
        """Begin to look, in a thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. The copies, and the record, stay as they are."""
        if not self._ended.is_set():
            self._ended.set()
            self._hosts.hurry()
            if self._thread.ident is not None:
                self._thread.join(_END)

    def _run(self) -> None:
        be_polite()
        pause = 0.0
        while not self._ended.wait(pause):
            try:
                pause = self.look()
            except Exception:
                log.exception("looking for hosts that keep copies failed unexpectedly")
                pause = _FAULT
        self._hosts.close()

    def look(self) -> float:
        """Look once, and act on what is seen. Return the seconds until the next look."""
        if self._listen_at(self._address):
            self._write()
        return jittered(_USUAL)

    def _listen_at(self, address: str) -> bool:
        """Have this host's daemon listen, and learn its port. Return whether it does.

        Another daemon, with another port, may have replaced it.
        """
        own = self._credentials
        try:
            rate = self._settings.peer_bandwidth
            self._port = self._saver.admit(own.start, own.secret, address, own.files, rate, own.lasting)
        except ScarError as error:
            self._deaf = True
            self._say(COPIES, f"{NO_COPY}: {error}")
            return False
        if self._deaf:
            self._deaf = False
            self._caveats.withdraw(COPIES)
        self._address = address
        return True

    def _write(self) -> None:
        """Write this host's record. If the store cannot be written, training continues with a caveat."""
        record = HostRecord(
            self._place,
            name_of(self._settings)[:MOST_TEXT],
            self._domain,
            self._address,
            self._port,
            self._credentials.files is not None,
            int(self._clock()),
            self._chosen,
        )
        try:
            self._hosts.write(record)
        except ScarError as error:
            self._say(
                _RECORD,
                f"other hosts cannot find this one, because its record cannot be written: {error.message}. Copies that "
                "are kept already are not affected; it is tried again",
            )
        else:
            self._caveats.withdraw(_RECORD)

    def _say(self, kind: str, message: str) -> None:
        if not self._ended.is_set():
            self._caveats.say(kind, message)


def jittered(seconds: float) -> float:
    """Return a little less, at random: hosts that started together do not ask the store at once."""
    return seconds * random.uniform(0.75, 1.0)
