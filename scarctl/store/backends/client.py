"""Send requests to a file system of fsspec: create the client, retry requests, keep the deadline.

fsspec is imported here and in `scarctl.store.backends.s3`, and only for a remote store. The deadline holds for all file
systems. A synchronous one cannot be cancelled: its calls run in a thread (`scarctl.store.backends.aside`). If it does
not answer, that thread is abandoned with its connection, and the next call gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
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

_GRACE = 0.5
"""Seconds that a request may take to notice that it is cancelled."""
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
        hint = "pip install 'scarctl[s3]'" if address.scheme.startswith("s3") else f"install {missing}"
        raise UsageError(f"{refused} without {missing}", hint=hint) from None
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


class Client:
    """A file system and its requests. Thread-safe."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._made: tuple[int, _Opened, str] | None = None
        self._helpers = Helpers()
        self._running: set[Future[Any]] = set()
        self._answered = self._warned = False
        """Whether the service has ever answered, and whether a warning has said that it did not."""
        self._fault = ""
        """The newest fault before its first answer."""
        self._hurry = threading.Event()

    def close(self) -> None:
        """Close connections. The next request opens new ones."""
        self._hurry.clear()
        with self._lock:
            self._made = None

    @property
    def _hurried(self) -> bool:
        return self._hurry.is_set()

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

    def _reads(self, variable: str) -> bool:
        """Return whether a client may depend on a variable of the environment."""
        return True

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
        """Abandon a connection that may be in use: the next call gets a new one."""
        opened.aside.leave()
        with self._lock:
            if self._made is not None and self._made[1] is opened:
                self._made = None

    def _shared(self) -> tuple[_Opened, str]:
        """Create a client. This is slow, so concurrent calls for the same client share it."""
        options = sorted((name, repr(value)) for name, value in self.address.options.items())
        # Clients are shared only under the same environment, which the file system reads, too.
        environment = hash(tuple(sorted(item for item in os.environ.items() if self._reads(item[0]))))
        key = (os.getpid(), self._host(), self.address.timeout, environment, *options)
        with _open_lock:
            opened = _open.get(key)
            if opened is None or opened.aside.left:
                opened = _open[key] = _Opened(self._begin())
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

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin work in the file system's own thread: `hurry` cancels it."""
        return self._note(asyncio.run_coroutine_threadsafe(work, self._fs.loop))

    def _note(self, future: Future[T]) -> Future[T]:
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def _request(self, method: str, *args: Any, patience: Patience | None = None, **kwargs: Any) -> Any:
        """Call a method of the file system, and retry after temporary faults. Raises Refused."""
        fs, patience = self._fs, patience or Patience(self.address.timeout)
        if fs.async_impl:
            call = getattr(fs, f"_{method}")
            return self._wait(self._start(self._insist(lambda: call(*args, **kwargs), patience)), patience)
        while True:
            try:
                return self._call(method, args, kwargs, patience)
            except Refused as refused:
                fault = refused.fault
            self._note_fault(fault, patience)
            pause = patience.pause() if fault.passing else None
            if pause is None or self._hurry.wait(pause):
                raise Refused(fault)

    def _once(self, method: str, *args: Any, patience: Patience, **kwargs: Any) -> None:
        """Call a method of the file system in a single attempt. Raises Refused."""
        fs = self._fs
        if not fs.async_impl:
            self._call(method, args, kwargs, patience)
            return
        try:
            call = getattr(fs, f"_{method}")
            self._wait(self._start(asyncio.wait_for(call(*args, **kwargs), patience.left)), patience)
            return
        except Refused:
            raise
        except Exception as error:
            fault = understand(error)
        raise Refused(fault)

    def _call(self, method: str, args: Any, kwargs: Any, patience: Patience) -> Any:
        """Call a method of a synchronous file system once. Raises Refused."""
        try:
            opened, _ = self._opened()
        except ScarError as error:
            raise Refused(Fault(Meaning.BROKEN, error.kind)) from None  # the file system was open before

        def call() -> Any:
            # The file system in memory checks first and then writes, so creations of all clients take turns.
            with _create_lock if kwargs.get("mode") == "create" else contextlib.nullcontext():
                return getattr(opened.fs, method)(*args, **kwargs)

        try:
            return self._wait(self._note(opened.aside.start(call)), patience)
        except Refused as refused:
            fault = refused.fault
        except Exception as error:
            fault = understand(error)
        except BaseException:
            self._release(opened)
            raise
        if fault.passing:
            self._release(opened)
        raise Refused(fault)

    async def _insist(self, call: Callable[[], Awaitable[T]], patience: Patience) -> T:
        while True:
            try:
                return await asyncio.wait_for(call(), patience.left)
            except Exception as error:
                fault = understand(error)
            self._note_fault(fault, patience)
            pause = patience.pause() if fault.passing else None
            if pause is None:
                raise Refused(fault)
            await asyncio.sleep(pause)

    def _wait(self, future: Future[T], patience: Patience) -> T:
        """Return the result of current work. Raises its error; Refused after the deadline."""
        try:
            elapsed = patience.seconds - patience.left
            if not (self._answered or self._hurried) and patience.left > _SILENT:
                wait([future], max(0.0, _SILENT - elapsed))
                if not future.done():
                    self._warn_silent(patience)
            # A later `hurry` cancels the future.
            found = future.result(_HURRIED if self._hurried else patience.left + _GRACE)
            self._answered = True
            return found
        except BaseException as error:
            if future.done() and not future.cancelled():
                raise
            future.cancel()
            if not isinstance(error, Exception):
                raise
        raise Refused(Fault(Meaning.BROKEN, "TimeoutError"))

    def _note_fault(self, fault: Fault, patience: Patience) -> None:
        """Note a failed attempt. A fault that will not pass is the service's own answer."""
        self._answered |= not fault.passing
        self._fault = fault.detail
        if not self._answered and patience.seconds - patience.left >= _SILENT:
            self._warn_silent(patience)

    def _warn_silent(self, patience: Patience) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: the service has not answered for %.0f s%s. Waiting for another %.0f s at most: if it should "
                "answer, check the address, the storage options (endpoint_url) and the network",
                self.address.shown,
                patience.seconds - patience.left,
                f" ({self._fault})" if self._fault else "",
                patience.left,
            )


_open_lock = threading.Lock()
_open: weakref.WeakValueDictionary[tuple[Any, ...], _Opened] = weakref.WeakValueDictionary()
_create_lock = threading.Lock()
"""Held while the file system in memory checks for a file and then writes it, which is fast."""
