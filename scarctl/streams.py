"""Copies beside training on a GPU: on streams of their own, which begin where the optimizer's step ends.

What the training thread queues later, the next forward and backward, neither waits for a copy nor is waited for. The
next change of parameters is queued only once the copy has ended: the session holds the training thread until then.
Without this a copy would be queued on the worker thread's usual stream: behind all of the next forward and backward
where training uses the same one, and in no order at all where it does not.

On the host there are no streams, and nothing to do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping

import torch

Marks = Mapping[torch.device, torch.cuda.Event]
"""By GPU, what was queued when they were made."""


class Streams:
    """One stream for each GPU that has some of the state."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._trains: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = threading.get_ident()

    def follow(self) -> None:
        """This thread, the one that trains, has ended a step: on the streams that are its current ones."""
        self._thread = threading.get_ident()
        self._trains = {device: torch.cuda.current_stream(device) for device in self._streams}

    def mark(self) -> Marks:
        """What the thread that trains has queued by now on the GPUs that are known. In any thread."""
        here = threading.get_ident() == self._thread
        return {device: _mark(device, None if here else self._trains.get(device)) for device in self._streams}

    def complete(self, marks: Marks, tensors: Iterable[torch.Tensor]) -> Marks:
        """With marks for the GPUs of all these tensors, which are known from now on."""
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        for device in devices - self._streams.keys():
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return {device: marks.get(device) or _mark(device) for device in devices}

    @contextlib.contextmanager
    def beside(self, marks: Marks) -> Iterator[None]:
        """What is done within comes after the marks, and is finished at the end. In any thread."""
        with contextlib.ExitStack() as stack:
            for device, mark in marks.items():
                stream = self._streams[device]
                stream.wait_event(mark)
                stack.enter_context(torch.cuda.stream(stream))
                stack.callback(stream.synchronize)
            yield


def _mark(device: torch.device, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream or torch.cuda.current_stream(device))
    return event
