"""Evacuate a host: have its sessions flush, and its daemon save as much as the time allows."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scarctl.arena.arena import Arena
from scarctl.arena.folder import host_folder
from scarctl.arena.header import FILE
from scarctl.arena.kinship import ASIDE
from scarctl.arena.owner import read_owner
from scarctl.arena.stale import is_at, run_folders
from scarctl.arena.view import peek
from scarctl.daemon import client
from scarctl.daemon.request import Request
from scarctl.daemon.status import RunStatus
from scarctl.errors import ScarError, UsageError
from scarctl.ops.known import daemon_here, place_of, require_store, runs_at
from scarctl.persist.evacuated import Evacuated, rework_of_all, why_mixed_ranks
from scarctl.persist.evacuation import before, not_evacuated
from scarctl.recovery.label import MEMBERS, NO_COMMIT
from scarctl.state.label import Label, Labelled
from scarctl.theory.rework import Rework

log = logging.getLogger("scarctl")

_FLUSH_SHARE = 0.4
"""Largest fraction of the time spent waiting for the sessions' flushes, which wait a third for a running step."""
_POLL = 0.05
NOT_SHOWN = ("points", "commit_name", "caveats", "common")
"""Fields of a process's report from which those of its store are computed."""
_SILENT = "not all of its processes have answered"
_PATIENCE = 5.0
"""Seconds to wait for one answer of the daemon: a host that shuts down may be busy."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process that saves to a store, alive or dead, and the result of evacuating its part of the state."""

    store: str
    rank: int | None
    pid: int
    found: Evacuated | None
    """None if neither an answer nor the memory on this host says anything: `error` says why no answer came."""
    error: str | None = None
    member: bool = False
    """Whether `rank` is the number of a member."""

    @property
    def name(self) -> str:
        """Return its name among others: "rank 2", "member 2" or "process 812"."""
        if self.rank is None:
            return f"process {self.pid}"
        return f"{'member' if self.member else 'rank'} {self.rank}"

    @property
    def safe(self) -> bool:
        return self.found is not None and self.found.safe

    def to_json(self) -> dict[str, Any]:
        fields = {"store": self.store, "rank": self.rank, "pid": self.pid, "safe": self.safe}
        report = {} if self.found is None else self.found.to_json()
        shown = {name: value for name, value in report.items() if name not in NOT_SHOWN}
        return {**fields, **shown, "error": self.error or report.get("error")}


@dataclass(frozen=True, slots=True)
class Store(Labelled):
    """The result of evacuating one store's state: all its processes on this host."""

    url: str
    processes: tuple[Process, ...]

    @property
    def safe(self) -> bool:
        """Whether losing this host would lose nothing of this state."""
        return all(process.safe for process in self.processes)

    @property
    def label(self) -> Label:
        """The label of what outlives this host, in the store or on other hosts."""
        found = self._reports
        label = replace(Label.over([one.label for one in found]), caveats=())
        if len(found) < len(self.processes):
            return replace(label, mixed=(_SILENT,))
        if len({(one.step, one.commit_name) for one in found}) > 1:
            label = label.because(MEMBERS if self.processes[0].member else NO_COMMIT)
        return replace(label, caveats=why_mixed_ranks(found)) if label.of_one else label

    @property
    def _reports(self) -> list[Evacuated]:
        return [process.found for process in self.processes if process.found is not None]

    @property
    def rework(self) -> Rework:
        """Predicted rework, in iterations, after the loss of this host."""
        reports = self._reports
        if len(reports) < len(self.processes):
            return Rework(None, reason=_SILENT)
        return rework_of_all(reports)

    def to_json(self) -> dict[str, Any]:
        return {
            "store": self.url,
            "safe": self.safe,
            **self.label.to_json(),
            "rework": self.rework.to_json(),
            "processes": [process.to_json() for process in self.processes],
        }


@dataclass(frozen=True, slots=True)
class Host:
    """The result of evacuating this host."""

    stores: tuple[Store, ...]
    in_memory: tuple[str, ...] = ()
    """Folders of arenas, of dead or live processes, with copies that wait and that no daemon saves."""
    folder: str = ""
    """Folder of the daemon and of the arenas."""

    @property
    def safe(self) -> bool:
        """Whether losing this host would lose nothing known here."""
        return not self.in_memory and all(store.safe for store in self.stores)


def evacuate_host(
    seconds: float,
    *,
    arena_dir: str | None = None,
    store: str | None = None,
    to: str | None = None,
    before_it: Callable[[Sequence[RunStatus]], None] = lambda _: None,
) -> Host:
    """Evacuate all processes that save through this host's daemon, in `seconds` at most. Return what is safe.

    store: to evacuate only its processes, all of its ranks. to: see `Session.evacuate`. before_it: called with the
        runs, before anything is done.

    Raises UsageError (`kind` "no-session") if none of them saves to that store, unless copies for it wait in memory;
    NoStore if it is not there either.
    Raises UsageError (`kind` "unknown-host") if none of them can use `to`; AccessDenied.
    """
    deadline = time.monotonic() + seconds
    folder, place = host_folder(arena_dir), place_of(store)
    runs = runs_at(client.ask_status(folder, patience=max(min(0.2 * seconds, _PATIENCE), _POLL)), place)
    before_it(runs)
    flushed = _flush(folder, [run for run in runs if run["phase"] == "attached"], deadline, seconds)
    processes = _evacuate(folder, runs, flushed, before(deadline, seconds), to)
    by_store: dict[str, list[Process]] = {}
    for process in processes:
        by_store.setdefault(process.store, []).append(process)
    known = frozenset(run["id"] for run in runs)
    waiting = _only_in_memory(folder, known, place)
    if store is not None and not runs and not waiting:
        require_store(store)
        raise UsageError(
            "no running session saves to this store through this host's daemon",
            hint="copies in the store are safe; `scarctl status` shows all stores that this host knows",
            kind="no-session",
        )
    return Host(tuple(Store(url, tuple(found)) for url, found in by_store.items()), waiting, str(folder))


def _flush(folder: Path, runs: Sequence[RunStatus], deadline: float, seconds: float) -> dict[str, bool]:
    """Have all sessions flush their newest step into memory at once. Return by run whether they have.

    A session that has ended meanwhile counts as flushed: its memory is evacuated like a dead process's.
    """
    token = secrets.token_hex(16)
    """Has the session flush once, although a request whose answer is late is repeated."""
    waiting = {run["id"]: 0 for run in runs}
    """Numbers of the requests, by run; 0: not requested yet."""
    flushed = dict.fromkeys(waiting, False)
    until = deadline - (1 - _FLUSH_SHARE) * seconds
    while waiting and time.monotonic() < until:
        for name, number in list(waiting.items()):
            patience = max(_POLL, min(_PATIENCE, until - time.monotonic()))
            try:
                if not number:
                    request = Request("flush", seconds=max(_POLL, deadline - time.monotonic())).to_json()
                    asked = client.ask(
                        folder, "ask", patience=patience, store=name, request=request, token=token
                    )
                    waiting[name] = int(asked["number"])
                    continue
                replied = client.ask(folder, "answered", patience=patience, store=name, number=number)
            except ScarError as error:
                # The daemon may be busy, or another one may be taking its place: ask again.
                if error.kind == "no-session":
                    waiting[name] = 0
                    if _has_ended(folder, name):
                        flushed[name] = True
                        del waiting[name]
                continue
            if replied["answer"] is not None:
                flushed[name] = replied["answer"].get("flushed") is True
                del waiting[name]
        time.sleep(_POLL)
    return flushed


def _evacuate(
    folder: Path, runs: Sequence[RunStatus], flushed: dict[str, bool], deadline: float, to: str | None
) -> list[Process]:
    """Have the daemon evacuate all runs at once. Return them without those that ended with everything durable."""
    made: dict[str, Process] = {}
    unknown: list[ScarError] = []

    def attempt(run: RunStatus) -> None:
        who: dict[str, Any] = {"store": run["store"], "rank": run.get("rank"), "pid": run["pid"]}
        who["member"] = run.get("member", False)
        try:
            one(run, who)
        except Exception as error:  # otherwise it would count as released
            log.exception("evacuating failed unexpectedly")
            made[run["id"]] = Process(**who, found=None, error=repr(error)[:200])

    def one(run: RunStatus, who: dict[str, Any]) -> None:
        def gone() -> bool:
            return run["phase"] == "closing" or _has_ended(folder, run["id"])

        try:
            seconds = max(0.0, deadline - time.monotonic())
            found = client.evacuate(folder, run["id"], seconds, to, ended=gone)
            found = replace(found, flushed=flushed.get(run["id"], True))
            made[run["id"]] = Process(**who, found=found)
        except ScarError as error:
            released = error.kind in (*client.UNKNOWN, "not-saving")
            if released and gone() and not _waits(folder / run["id"]):
                return  # the daemon has saved all of it meanwhile
            found = None
            if error.kind == "unknown-host":
                unknown.append(error)
            else:
                found = _unanswered(folder / run["id"], error, flushed=flushed.get(run["id"], True))
            made[run["id"]] = Process(**who, found=found, error=error.message)

    threads = [
        threading.Thread(target=attempt, args=(run,), name="scarctl-evacuate", daemon=True) for run in runs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if unknown and len(unknown) == len(made):
        raise unknown[0]
    return [made[run["id"]] for run in runs if run["id"] in made]


def _unanswered(path: Path, error: ScarError, *, flushed: bool) -> Evacuated | None:
    """Return what the arena in a folder says about a run whose daemon did not answer; None if it says nothing."""
    try:
        arena = Arena.share(path, run_id=path.name)
    except ScarError:
        arena = None
    if arena is None:
        return None
    return replace(not_evacuated(arena, error), flushed=flushed)


def _has_ended(folder: Path, run_id: str) -> bool:
    """Return whether the training process of a run on this host has ended: its arena or its owner is gone."""
    try:
        view = peek(str(folder.parent), run_id)
    except ScarError:
        return False
    return view is None or not view.alive


def _waits(path: Path) -> bool:
    """Return whether the arena in a folder may have copies or extras that exist nowhere else. Takes no lock."""
    if read_owner(path) is not None:
        return False  # a replica: its owner's host has them
    view = peek(str(path.parents[1]), path.name)
    if view is None:
        return (path / FILE).exists()  # an unreadable arena counts as unsaved
    return view.lacking


def evacuees(arena_dir: str | None, store: str | None) -> tuple[list[RunStatus], tuple[str, ...]]:
    """Return the runs that `evacuate_host` would evacuate, and the folders of `Host.in_memory` now. Changes nothing.

    Raises Unavailable if the daemon does not answer; NoStore if there are none, and no store.
    """
    place = place_of(store)
    runs = runs_at(daemon_here(arena_dir), place)
    waiting = _only_in_memory(host_folder(arena_dir), frozenset(run["id"] for run in runs), place)
    if store is not None and not runs and not waiting:
        require_store(store)
    return runs, waiting


def _only_in_memory(folder: Path, known: frozenset[str], place: str | None) -> tuple[str, ...]:
    """Return the folders of arenas with waiting copies, except those of `known` runs and those set aside."""
    return tuple(
        str(path)
        for path in run_folders(folder)
        if path.name not in known
        and not path.name.endswith(ASIDE)
        and (place is None or is_at(path.name, place))
        and _waits(path)
    )
