"""Carry out a rehearsal inside the program: replace its stores, record its steps, interrupt it, and end it.

The process ends by `os._exit` once all of its sessions have made the last step, so nothing after the loop runs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from scarctl.adapter import Adapter
from scarctl.arena.folder import host_folder
from scarctl.config import SessionSettings
from scarctl.lint import UNSAVED
from scarctl.rehearse import records, state
from scarctl.rehearse.records import Attached, Difference, Final, Line
from scarctl.rehearse.run import Run
from scarctl.session.peers import Together
from scarctl.session.steps import Follower
from scarctl.state.caveats import Caveats
from scarctl.store.backends.address import Address

STATE = "state"
"""Ending of the file with a session's last state, in the first run."""
_PATIENCE = 300.0
"""Seconds for which a rank waits for the others to record their last states."""
_POLL = 0.02
_SLOW = 0.2
"""Seconds that a step takes longer after the signal: a short loop on a busy machine would end before its effect."""


class Watched(Protocol):
    """The parts of a session that a rehearsal uses."""

    settings: SessionSettings
    follower: Follower | None
    caveats: Caveats
    _together: Together

    @property
    def head_step(self) -> int: ...


class Watcher:
    """A rehearsal, as seen by one process of the program."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.folder = Path(run.folder)
        self.interrupted = run.signalled.exists()
        """This process was started after the signal."""
        self.sent = False
        """This process has sent itself the signal."""
        self.parts: list[Part] = []
        self._addresses: dict[str, Address] = {}
        """The addresses that the program gave, by the store in their place."""

    def settings(self, given: SessionSettings) -> SessionSettings:
        """Return the settings that the rehearsal uses in place of the program's, and make the folder for its memory."""
        address = Address.parse(given.store, given.storage_options)
        arena = host_folder(given.arena_dir).parent / self.run.arena
        # Noted before it is made, so that the command can remove it in any case.
        (self.folder / f"{address.digest}.arena").write_text(str(arena))
        arena.mkdir(mode=0o700, exist_ok=True)
        store = self.folder / f"store-{address.digest}"
        self._addresses[str(store)] = address
        return dataclasses.replace(
            given,
            store=str(store),
            storage_options=None,
            assume_single_writer=False,
            arena_dir=str(arena),
            daemon=False,
            peers=0,
            grace=None,
            interval=self.run.interval,
            max_bandwidth=None,
        )

    def follow(self, session: Watched, adapter: Adapter, model: object, optimizers: Iterable[Any]) -> None:
        """Record the session's steps from now on. adapter: of all that this process has, not of a rank's share."""
        address, together = self._addresses[session.settings.store], session._together
        record = Attached(
            f"{address.digest}.{together.rank or 0}",
            address.shown,
            address.digest,
            None if address.root is None else str(address.root),
            dist.get_world_size() if together.several else 1,
        )
        records.write(self.folder, record.name, record)
        part = Part(self, session, record, adapter, list(optimizers))
        self.parts.append(part)
        session.follower = part
        if isinstance(model, nn.Module):
            for name, module in model.named_modules():
                part.names[module] = name or type(module).__name__
                # Before hooks of others, which may gather or cast what is read here.
                module.register_forward_pre_hook(part.called, prepend=True, with_kwargs=True)
                module.register_forward_hook(part.returned)

    def interrupt(self) -> None:
        """Send this process the signal, once."""
        self.sent = True
        self.run.signalled.touch()
        os.kill(os.getpid(), self.run.signal)

    def end(self) -> None:
        """End the process if all of its sessions are at the end, and all of their ranks."""
        if not all(part.done for part in self.parts):
            return
        deadline = time.monotonic() + _PATIENCE
        while not self._all_ranks() and time.monotonic() < deadline:
            time.sleep(_POLL)
        self.exit()

    def exit(self) -> None:
        """End the process, without anything that the program does at its end."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _all_ranks(self) -> bool:
        found = (len(list(self.folder.glob(f"{part.digest}.*.final.json"))) for part in self.parts)
        return all(count >= part.ranks for count, part in zip(found, self.parts, strict=True))


class Part:
    """One session of a rehearsed program."""

    def __init__(
        self, watcher: Watcher, session: Watched, record: Attached, adapter: Adapter, optimizers: list[Any]
    ) -> None:
        self.done = False
        """Whether its last state is recorded."""
        self.step = 0
        self.names: dict[nn.Module, str] = {}
        """Names of all modules, for display."""
        self.digest, self.ranks, self._name = record.digest, record.ranks, record.name
        self._watcher, self._session = watcher, session
        self._adapter, self._optimizers = adapter, optimizers
        self._pid = os.getpid()
        self._begin()

    def _begin(self) -> None:
        self._running: nn.Module | None = None
        """The outermost module that is running."""
        self._before: Mapping[str, str] | None = None
        self._inputs: list[dict[str, str]] = []

    @torch.no_grad()
    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the arguments of a call from outside of modules, and before the first one in a step the state."""
        if (
            torch.compiler.is_compiling()
            or self.done
            or os.getpid() != self._pid
            or self._running is not None
        ):
            return
        self._running = module
        if (
            not self._inputs and self._session.head_step
        ):  # before the first step parameters may have no values yet
            self._before = state.digests(self._adapter)
        names = [*inspect.signature(module.forward).parameters]
        given = {names[n] if n < len(names) else str(n): value for n, value in enumerate(args)} | kwargs
        found = {}
        for name, value in given.items():
            digest = xxhash.xxh3_64()
            state.feed(digest, value)
            found[f"{name} of {self.names[module]}"] = digest.hexdigest()
        self._inputs.append(found)

    def returned(self, module: nn.Module, *_: object) -> None:
        """Note that a module has ended."""
        if not torch.compiler.is_compiling() and module is self._running:
            self._running = None

    def stepped(self) -> None:
        """Record a step that has ended; interrupt or end the program after it."""
        watcher, run, step = self._watcher, self._watcher.run, self._session.head_step
        if self.done:
            return
        self.step = step
        rates = state.rates(self._optimizers)
        line = Line(step, self._before, self._inputs, rates, state.digests(self._adapter))
        records.append(watcher.folder, self._name, line, again=watcher.interrupted)
        self._begin()
        if run.stop and not watcher.interrupted:
            self._interrupted(step)
        elif step >= run.steps:
            self._finish(Final(step))

    def _interrupted(self, step: int) -> None:
        """Send the signal once all sessions have made its step, and let it end the process before the last one.

        Each rank sends it to itself, as a scheduler does that ends a job: what one rank loses that dies alone is not
        the program's fault.
        """
        watcher, run = self._watcher, self._watcher.run
        if not watcher.sent and (self.ranks > 1 or not run.signalled.exists()):
            if all(part.step >= run.stop for part in watcher.parts) or step >= run.steps - 1:
                watcher.interrupt()
        elif step >= run.steps:
            run.survived.touch()
            watcher.exit()
        else:
            time.sleep(_SLOW)

    def doomed(self) -> None:
        """Wait for the signal's effect: the loop would go on to its end, and beyond."""
        while self._pid == os.getpid():
            time.sleep(_POLL)

    def closing(self, *, failed: bool) -> None:
        """End the program here if it closes the session itself. failed: an exception ends it."""
        run = self._watcher.run
        if failed:
            self._watcher.parts.remove(self)
        elif not (self.done or (run.stop and not self._watcher.interrupted)):
            self._finish(Final(self._session.head_step, early=True))

    def _finish(self, final: Final) -> None:
        watcher, first = self._watcher, self._watcher.run.reference
        path = Path(first or watcher.folder, f"{self._name}.{STATE}")
        if final.early:
            text = f"the program ends after step {final.step}, not {watcher.run.steps}"
            final = dataclasses.replace(final, differences=(Difference("steps", text),))
        elif not first:
            final = dataclasses.replace(final, tensors=state.keep(self._adapter, path))
        elif not path.exists():
            other = Difference("store", "its address is another one than in the first run", tensor=False)
            final = dataclasses.replace(final, differences=(other,))
        else:
            final = dataclasses.replace(final, differences=state.compare(self._adapter, path))
        said = [one.message for one in self._session.caveats if one.kind == UNSAVED]
        records.write(watcher.folder, self._name, dataclasses.replace(final, unsaved="".join(said)))
        self.done = True
        watcher.end()


def watcher_of(environ: Mapping[str, str]) -> Watcher | None:
    """Return this process's rehearsal, if `scarctl rehearse` runs it. Raises UsageError for a broken variable."""
    run = Run.of(environ)
    return None if run is None else _watcher(run, os.getpid())


@functools.cache
def _watcher(run: Run, pid: int) -> Watcher:
    """Return the one rehearsal of this process."""
    return Watcher(run)
