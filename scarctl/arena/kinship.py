"""Decide whether an arena belongs to a store in the store's present state.

Its run may have continued on another host, its store may have been rolled back there, copied, or replaced by an older
copy of itself. Then what the arena has, and what it calls durable, is of a state that is not this store's. So an arena
notes the store's line (`scarctl.store.line`) with every record, and is believed only where the store still says it.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder, folder_error
from scarctl.arena.header import FILE
from scarctl.arena.lines import Noted, fit
from scarctl.arena.queue import HandOverQueue
from scarctl.arena.view import ArenaView, peek
from scarctl.errors import AccessDenied, Contention, Corruption, Fenced, ScarError, Unavailable
from scarctl.state.layout import Layout
from scarctl.store import Store

log = logging.getLogger("scarctl")

ASIDE = ".aside"
"""Ending of a folder's name whose arena belongs to no store any more."""


def belongs(lines: Callable[[], Noted], store: Store) -> bool:
    """Return whether an arena is of the store's line. `lines` reads what it has noted: of a live run that changes
    meanwhile.

    Raises Corruption, AccessDenied, Unavailable when the store does not answer.
    """
    before = lines()
    there = store.lines()
    after = lines()
    return fit(before, there) or fit(after, there) or before != after


def require_kinship(arena: Arena, lines: Mapping[int, int], store: Store, *, again: bool) -> None:
    """Raise Fenced unless an arena is of the lines that a store has now.

    again: the process that made its copies lives. Else one without copies may belong to any store.
    """
    if not fit(arena.lines, lines) and (again or not _is_blank(arena)):
        raise _overtaken(store)


def require_same_line(arena: Arena, store: Store) -> None:
    """Raise Fenced unless what was just read from a store is of the line of a live run's arena."""
    if not belongs(lambda: arena.lines, store):
        raise _overtaken(store)


def _overtaken(store: Store) -> Fenced:
    return Fenced(
        f"{store.url}: another process has saved to this store meanwhile, or it has been rolled back or replaced",
        hint="stop one of the two; what this one has in memory stays there",
    )


def view_of(base: str | None, store: Store) -> ArenaView | None:
    """Read what the arena of this store's run on this host says; None if there is none to read.

    One that does not belong to the store is none; a warning says so. `base` as for `arena_folder`.
    """
    found = peek(base, store.run_id)
    if found is None or not (found.version >= 0).any():
        return found
    views = [found]

    def lines() -> Noted:
        newest = peek(base, store.run_id)
        if newest is not None:
            views.append(newest)
        return views[-1].lines

    if fit(found.lines, store.lines()) or belongs(lines, store):
        return views[-1]
    log.warning("%s", _stranger(store, "what is in this host's memory is not shown"))
    return None


def open_stopped(base: str | None, store: Store) -> Arena | None:
    """Return the arena that a stopped run of this store left on this host.

    None when there is none, when its run is alive, or, with a warning, when it is damaged, not ours, or does not belong
    to the store as it is: the caller has the store to fall back on.
    """
    try:
        arena = Arena.open_existing(arena_folder(base, store.run_id), run_id=store.run_id)
    except Contention:
        return None
    except (AccessDenied, Corruption) as error:
        log.warning("%s", error)
        return None
    return believed(arena, store)


def believed(arena: Arena | None, store: Store, *, set_aside: bool = False) -> Arena | None:
    """Return an arena that was opened, if it belongs to the store; else log a warning, close it, and return None.

    set_aside: give a folder that does not belong to the store another name.
    """
    if arena is None:
        return None
    what = f"what {arena.folder} has is not used"
    try:
        if _is_kin(arena, store):
            return arena
        if set_aside:
            what = f"what was in memory is not used, and set aside in {_set_aside(arena.folder)}"
    except BaseException:
        arena.close()
        raise
    log.warning("%s", _stranger(store, what))
    arena.close()
    return None


def take(folder: Path, store: Store) -> Arena | None:
    """Return the arena that a run of this store left in `folder`, to continue with; None if there is none.

    One that does not belong to the store is set aside, and a warning says so. Raises what `Arena.open_existing` raises,
    and what reading the store raises.
    """
    arena = Arena.open_existing(folder, run_id=store.run_id)
    if arena is None:
        _report_others(folder, store)
    return believed(arena, store, set_aside=True)


def arena_for(folder: Path, layout: Layout, store: Store, *, populate: bool = True) -> Arena:
    """Open a run's arena: the one that a process left when it died, or a new one. populate: see `map_file`.

    Raises what `take` and `Arena.create` raise.
    """
    arena = take(folder, store)
    if arena is not None and arena.layout == layout:
        arena.take_over()
        return arena
    if arena is not None:
        log.warning("the arena in %s is of another layout: replaced", folder)
        HandOverQueue(folder).clear()
        arena.remove()
    return _create(folder, layout, store, populate=populate)


def _create(folder: Path, layout: Layout, store: Store, *, populate: bool) -> Arena:
    """Create an arena. What was set aside gives way."""

    def make() -> Arena:
        return Arena.create(
            folder, layout, run_id=store.run_id, epoch=1, place=store.where, populate=populate
        )

    try:
        return make()
    except Unavailable as error:
        aside = _aside_of(folder)
        if error.kind != "arena-full" or not aside.exists():
            raise
        log.warning("%s is removed: there is no room for it", aside)
        shutil.rmtree(aside)
        return make()


def _is_kin(arena: Arena, store: Store) -> bool:
    return _is_blank(arena) or belongs(lambda: arena.lines, store)


def _is_blank(arena: Arena) -> bool:
    """Return whether an arena holds neither copies nor hand-overs."""
    return not (arena.version >= 0).any() and not HandOverQueue(arena.folder).numbers()


def _stranger(store: Store, what: str) -> str:
    return (
        f"{store.url}: since this host's memory was written, the store was saved to or rolled back from elsewhere, or "
        f"replaced by another copy of it: {what}. The store alone says how far the run is"
    )


def _aside_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ASIDE)


def _set_aside(folder: Path) -> Path:
    """Give an arena's folder another name; what had it before is deleted: of each run there is one at most."""
    aside = _aside_of(folder)
    try:
        if os.path.lexists(aside):
            shutil.rmtree(aside)
        os.rename(folder, aside)
    except OSError as error:
        raise folder_error(error, aside) from error
    return aside


def _report_others(folder: Path, store: Store) -> None:
    """Say which arenas of the same store's runs are not used, though they may have what the store has not."""
    for path in _others(folder, store):
        view = peek(str(path.parents[1]), path.name)
        if view is None or view.alive or not (view.version >= 0).any():
            continue
        try:
            ours = not view.lines or fit(view.lines, store.lines())
        except ScarError:
            ours = True
        if ours:
            whose = f"of the store in {view.place}" if view.lines else "of an earlier version of scarctl"
            log.warning(
                "%s: what %s has in memory is not used: it is %s, step %d",
                store.url,
                path,
                whose,
                view.head_step,
            )


def _others(folder: Path, store: Store) -> Iterator[Path]:
    """Yield the folders of arenas of the same store and shard, at other places or by earlier versions."""
    shard = "" if store.part is None else f"-{store.part.shard}"
    if not folder.parent.is_dir():
        return
    for path in sorted(folder.parent.glob(f"{store.id}*")):
        place, _, of_shard = path.name[len(store.id) :].partition("-")
        same = (f"-{of_shard}" if of_shard else "") == shard and not place.endswith(ASIDE)
        if same and path != folder and (path / FILE).exists():
            yield path
