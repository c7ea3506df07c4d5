"""Copy concurrently with training on a GPU, on separate streams that wait only for the optimizer's step.

The next forward and backward pass, queued later by the training thread, is independent of the copy. The next change of
parameters is queued only when the copy has ended: the session holds the training thread until then. Without separate
streams a copy would use the worker thread's current stream. If training uses the same stream, the copy would wait for
the whole next forward and backward pass. If not, their order would be undefined.

The host has no streams, so nothing happens there.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterable, Iterator, Mapping

import torch

Marks = Mapping[torch.device, torch.cuda.Event]
"""An event for each GPU, which completes when the work queued before it is done."""


_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: captures of other threads do not matter."""


def is_capturing() -> bool:
    """Return whether this thread's GPU work is only recorded, in a CUDA graph. An event of it waits for nothing."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()


def ignore_captures() -> None:
    """Let this thread use GPUs while another thread captures a CUDA graph.

    By default that ends the capture with an error: `torch.cuda.graph` forbids most calls to all threads.
    """
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return  # not a GPU of NVIDIA
    exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


class Streams:
    """One stream for each GPU that holds part of the state."""

    def __init__(self) -> None:
        self.known: dict[torch.device, torch.cuda.Stream] = {}
        """The streams, by GPU."""
        self._trains: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = threading.get_ident()

    def follow(self) -> None:
        """Note that a step has ended in this thread, which becomes the training thread, on its current streams."""
        self._thread = threading.get_ident()
        if self.known:
            self._trains = {device: torch.cuda.current_stream(device) for device in self.known}

    def mark(self) -> Marks:
        """Mark the work that the training thread has queued so far on all known GPUs. Call it in any thread."""
        if not self.known:
            return {}
        here = threading.get_ident() == self._thread
        return {device: _mark(device, None if here else self._trains.get(device)) for device in self.known}

    def complete(self, marks: Marks, among: Iterable[torch.device]) -> Marks:
        """Return marks for the GPUs among these devices, which become known; missing marks are made."""
        devices = {device for device in among if device.type == "cuda"}
        for device in devices - self.known.keys():
            # Of high priority: streams of one priority may share a hardware queue, in which a copy would wait for
            # all that training has queued.
            self.known[device] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            if threading.get_ident() == self._thread:
                self._trains[device] = torch.cuda.current_stream(device)
        return {device: marks.get(device) or _mark(device) for device in devices}

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Queue what a thread does inside after training's work, on its streams. A new thread has the default ones."""
        with contextlib.ExitStack() as stack:
            if threading.get_ident() != self._thread:
                for stream in self._trains.values():
                    stack.enter_context(torch.cuda.stream(stream))
            yield

    def times(self) -> Marks:
        """Mark the present moment on the streams that train, with events that keep its time.

        Returns {} in another thread, because training continues meanwhile, and in a capture, whose events have no time.
        """
        made: dict[torch.device, torch.cuda.Event] = {}
        if threading.get_ident() != self._thread or is_capturing():
            return made
        for device in self.known:
            made[device] = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            made[device].record(self._trains.get(device) or torch.cuda.current_stream(device))
        return made

    @contextlib.contextmanager
    def alongside(self, marks: Marks) -> Iterator[None]:
        """Run the work inside after the marks, and wait for it at exit. Call it in any thread."""
        with contextlib.ExitStack() as stack:
            for device, mark in marks.items():
                stream = self.known[device]
                stream.wait_event(mark)
                stack.enter_context(torch.cuda.stream(stream))
                stack.callback(stream.synchronize)
            yield


class Waits:
    """Measures how long GPUs have nothing to do because the training thread waits."""

    def __init__(self, streams: Streams) -> None:
        self.known = streams
        self._began: Marks = {}
        self._open: list[tuple[Marks, Marks]] = []

    def begin(self) -> None:
        """Note that the training thread begins to wait."""
        self._began = self.known.times()

    def end(self) -> bool:
        """Note that it has waited. Return whether GPUs are measured: then its waiting is not time lost."""
        if self._began:
            self._open.append((self._began, self.known.times()))
        return bool(self._began)

    def idle(self) -> float:
        """Return the seconds lost in waits that the GPUs have left behind since the last call."""
        done, total = 0, 0.0
        for before, after in self._open:
            if not all(event.query() for event in after.values()):  # type: ignore[no-untyped-call]
                break
            done += 1
            total += max(event.elapsed_time(after[device]) for device, event in before.items()) / 1e3
        del self._open[:done]
        return total


def _mark(device: torch.device, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream or torch.cuda.current_stream(device))
    return event
