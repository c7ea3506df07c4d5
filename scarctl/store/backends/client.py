"""Send requests to a file system of fsspec: create the client, repeat requests, keep the deadline.

fsspec is imported here and in `scarctl.store.backends.s3`, and only for a remote store. One loop repeats requests, for
all file systems: the repetitions of s3fs and botocore know no deadline, and FTP and SFTP have none. A call of a
synchronous file system cannot be cancelled, so it runs in a thread (`scarctl.store.backends.aside`). If it does not
return in time, that thread is abandoned with its connection, and the next call gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from scarctl.errors import ScarError, UsageError
from scarctl.store.backends.address import Address
from scarctl.store.backends.aside import Aside
from scarctl.store.backends.exclusive import why_not_exclusive
from scarctl.store.backends.parallel import Helpers, no_bytes
from scarctl.store.backends.remote_errors import Fault, Meaning, Patience, fault_error, understand
from scarctl.store.format import check_name

log = logging.getLogger("scarctl")

T = TypeVar("T")
R = TypeVar("R")

_HURRIED = 0.2
"""Seconds that a request may take after `hurry`."""
_SILENT = 5.0
"""Seconds without any answer after which a new client warns: its address may be wrong."""


_NAME = re.compile(r"[a-z_]{1,40}")
_HINT = (
    "check the address and the storage options; `python -c 'import fsspec; print(fsspec.available_protocols())'` "
    "lists what can be opened"
)


def check_file_system(address: Address) -> None:
    """Raise UsageError if this Python has no file system for a remote address. Sends no request."""
    import fsspec

    refused = f"{address.shown}: cannot open {address.scheme}:// addresses"
    try:
        fsspec.get_filesystem_class(address.scheme)
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None) or error.name or "a package"
        raise UsageError(f"{refused} without {missing}", hint=f"install {missing}") from None
    except ValueError as error:
        raise UsageError(f"{refused}: {error}", hint=_HINT) from None


class Refused(Exception):
    """A request has failed permanently. Never leaves this package."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


@dataclass(eq=False)
class _Opened:
    """A file system with its connections; with a thread for its calls if it is synchronous."""

    fs: Any
    aside: Aside = field(default_factory=Aside)


@dataclass(eq=False, frozen=True, slots=True)
class Call:
    """A call that has begun, and its file system."""

    opened: _Opened
    future: Future[Any]


class Client:
    """A file system and its requests. Thread-safe."""

    def __init__(self, address: Address, *, apart: bool = False) -> None:
        """apart: share no connections and caches with other clients."""
        self.address = address
        self._apart = apart
        self._lock = threading.Lock()
        self._made: tuple[int, _Opened, str] | None = None
        self._helpers = Helpers()
        self._running: set[Future[Any]] = set()
        self._answered = self._warned = False
        """Whether the service has ever answered, and whether a warning has said that it did not."""
        self._fault = ""
        """The newest fault."""
        self._hurry = threading.Event()

    def close(self) -> None:
        """Close connections. The next request opens new ones."""
        self._hurry.clear()
        with self._lock:
            self._made = None

    def why_not_exclusive(self) -> str | None:
        """See `Blobs.why_not_exclusive`."""
        check_file_system(self.address)
        return why_not_exclusive(self.address.scheme)

    # the file system

    def _open_filesystem(self) -> Any:
        import fsspec

        fs, _ = fsspec.url_to_fs(
            self.address.url, use_listings_cache=False, skip_instance_cache=True, **self.address.options
        )
        return fs

    def _host(self) -> str:
        """Return the parts of the address that a client depends on."""
        return self.address.url

    def _root(self, fs: Any) -> str:
        """Return the path of the store in the file system."""
        return str(fs._strip_protocol(self.address.url)).rstrip("/")

    def _opened(self) -> tuple[_Opened, str]:
        with self._lock:
            # A forked child needs its own client, because the parent's threads do not exist in it.
            if self._made is None or self._made[0] != os.getpid():
                self._made = (os.getpid(), *self._shared())
            return self._made[1:]

    def _release(self, opened: _Opened) -> None:
        """Abandon the connection of a synchronous file system: it may be in use, so the next call gets a new one."""
        if opened.fs.async_impl:
            return
        opened.aside.leave()
        with self._lock:
            if self._made is not None and self._made[1] is opened:
                self._made = None

    def _shared(self) -> tuple[_Opened, str]:
        """Create a client. This is slow, so concurrent calls for the same client share it."""
        options = sorted((name, repr(value)) for name, value in self.address.options.items())
        # Clients are shared only under the same environment, which the file system may read, too.
        environment = hash(tuple(sorted(os.environ.items())))
        key = (os.getpid(), self._host(), self.address.timeout, environment, *options)
        with _open_lock:
            opened = None if self._apart else _open.get(key)
            if opened is None or opened.aside.left:
                opened = _Opened(self._begin())
                if not self._apart:
                    _open[key] = opened
            return opened, self._root(opened.fs)

    def _begin(self) -> Any:
        check_file_system(self.address)
        try:
            return self._open_in_time()
        except Exception as error:
            fault = understand(error)
            # Only names are taken from the error's text, because the rest may be a secret.
            unknown = [
                name
                for name in self.address.options
                if _NAME.fullmatch(name) and f"unexpected keyword argument '{name}'" in str(error)
            ]
        if unknown:
            raise UsageError(
                f"{self.address.shown}: {self.address.scheme}:// has no storage option {unknown[0]!r}",
                hint=f"correct or omit {unknown[0]!r}",
            )
        doing = f"open {self.address.scheme}:// addresses"
        if fault.meaning is Meaning.DENIED or fault.passing:
            raise fault_error(fault, self.address.shown, doing)
        raise UsageError(f"{self.address.shown}: cannot {doing}: {fault.detail}", hint=_HINT)

    def _open_in_time(self) -> Any:
        """Create the file system, with a deadline: some connect at once, and may wait for any time."""
        import fsspec

        if fsspec.get_filesystem_class(self.address.scheme).async_impl:
            return self._open_filesystem()
        return self._wait(self._note(Aside().start(self._open_filesystem)), Patience(self.address.timeout))

    @property
    def _fs(self) -> Any:
        return self._opened()[0].fs

    def _path(self, name: str) -> str:
        check_name(name)
        return f"{self._opened()[1]}/{name}"

    def _folder(self, name: str) -> str:
        """Return the path of a folder; "" is the store's own."""
        return self._path(name) if name else self._opened()[1]

    # requests

    def each(
        self, work: Callable[[T], R], items: Iterable[T], size: Callable[[T], int] = no_bytes
    ) -> Iterator[R]:
        """See `Blobs.each`. Runs one item at a time on a synchronous file system, which may not be thread-safe."""
        return self._helpers.each(work, items, size) if self._fs.async_impl else map(work, items)

    def hurry(self) -> None:
        """See `Blobs.hurry`."""
        self._hurry.set()
        for future in list(self._running):
            future.cancel()

    def _request(
        self,
        method: str,
        *args: Any,
        patience: Patience | None = None,
        begun: Call | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a method of the file system, and repeat it after faults that may pass, until the deadline.

        begun: the first attempt, if it has begun.

        Raises Refused.
        """
        patience = patience or Patience(self.address.timeout)
        while True:
            try:
                return self._once(method, *args, patience=patience, begun=begun, **kwargs)
            except Refused as refused:
                fault = refused.fault
            begun = None
            pause = patience.pause() if fault.passing else None
            if pause is None or self._hurry.wait(pause):
                raise Refused(fault)

    def _once(
        self, method: str, *args: Any, patience: Patience, begun: Call | None = None, **kwargs: Any
    ) -> Any:
        """Call a method of the file system once. Raises Refused."""
        try:
            call = begun or self._start(method, *args, **kwargs)
        except ScarError as error:
            raise Refused(Fault(Meaning.BROKEN, error.kind)) from None  # the file system was open before
        try:
            found = self._wait(call.future, patience)
            self._answered = True
            return found
        except Exception as error:
            fault = understand(error)
        except BaseException:
            self._release(call.opened)
            raise
        self._answered |= not fault.passing  # otherwise it is the service's own answer
        self._fault = fault.detail
        if fault.passing:
            self._release(call.opened)
        raise Refused(fault)

    def _start(self, method: str, *args: Any, **kwargs: Any) -> Call:
        """Begin a call of a method of the file system: `hurry` cancels it."""
        opened, _ = self._opened()
        fs = opened.fs
        if fs.async_impl:
            work = getattr(fs, f"_{method}")(*args, **kwargs)
            return Call(opened, self._note(asyncio.run_coroutine_threadsafe(work, fs.loop)))

        def call() -> Any:
            # The file system in memory checks first and then writes, so creations of all clients take turns.
            with _create_lock if kwargs.get("mode") == "create" else contextlib.nullcontext():
                return getattr(fs, method)(*args, **kwargs)

        return Call(opened, self._note(opened.aside.start(call)))

    def _note(self, future: Future[T]) -> Future[T]:
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def _wait(self, future: Future[T], patience: Patience) -> T:
        """Return the result of a call. Raises its error; TimeoutError after the deadline, or after `hurry`."""
        try:
            self._warn_if_silent(future, patience)
            # A later `hurry` cancels the future.
            return future.result(_HURRIED if self._hurry.is_set() else patience.left)
        except BaseException as error:
            future.cancel()  # without effect if it has ended
            if isinstance(error, Exception) and future.cancelled():
                raise TimeoutError from None
            raise

    def _warn_if_silent(self, future: Future[Any], patience: Patience) -> None:
        """Wait for the first answer of all, and warn once if it takes long."""
        if self._answered or self._warned or self._hurry.is_set():
            return
        wait([future], min(max(0.0, _SILENT - patience.elapsed), patience.left))
        if patience.elapsed < _SILENT or future.done():
            return
        self._warned = True
        log.warning(
            "%s: the service has not answered for %.0f s%s. Waiting for another %.0f s at most: if it should "
            "answer, check the address, the storage options (endpoint_url) and the network",
            self.address.shown,
            patience.elapsed,
            f" ({self._fault})" if self._fault else "",
            patience.left,
        )


_open_lock = threading.Lock()
_open: weakref.WeakValueDictionary[tuple[Any, ...], _Opened] = weakref.WeakValueDictionary()
_create_lock = threading.Lock()
"""Held while the file system in memory checks for a file and then writes it, which is fast."""
