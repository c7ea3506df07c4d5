"""Decide whether an arena belongs to a store in the store's present state.

An arena notes what its process has saved: the id of its term, and its newest acknowledged record that has changed the
state (`scarctl.arena.line`). It belongs to the store if the newest record there that changed the state is of this
term, and not older; or if nothing has changed the state since the term began. So a replica of another host's arena may
be older than the store. Processes that claimed a term, and died before they saved, do not count.

The run may have continued on another host. The store may have been rolled back there, copied, or replaced by its own
backup. Then the newest such record is of another term, or older, and the arena is not believed.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder, folder_error
from scarctl.arena.header import FILE
from scarctl.arena.line import Word, fit
from scarctl.arena.owner import disown, read_owner
from scarctl.arena.view import ArenaView, peek
from scarctl.errors import AccessDenied, Contention, Corruption, Fenced, ScarError, Unavailable
from scarctl.state.layout import Layout
from scarctl.store import Store
from scarctl.store.store import Found

log = logging.getLogger("scarctl")

T = TypeVar("T")

_ON_THE_WAY = 0.5
"""Seconds in which the line of a living owner reaches a replica, if their link is not behind."""
_PAUSE = 0.02
ASIDE = ".aside"
"""Suffix of a folder whose arena no longer belongs to its store."""


def belongs(line: Callable[[], Word | None], store: Store) -> bool:
    """Return whether an arena is on the store's line.

    line: reads the line that the arena has noted. A live run may change them at any time.

    Raises Corruption, AccessDenied, or Unavailable if the store does not answer.
    """
    before = line()
    there = store.line()
    after = line()
    return fit(before, there) or fit(after, there) or before != after


def descends(noted: Word | None, store: Store) -> bool:
    """Return whether an arena on another host, with this line, belongs to the store. Raises as `belongs` does."""
    return fit(noted, store.line())


def is_kin(arena: Arena, store: Store) -> bool:
    """Return whether an arena of a dead run belongs to the store. Raises as `belongs` does."""
    return _is_blank(arena) or belongs(lambda: arena.line, store)


def require_kinship(arena: Arena, line: Found | None, store: Store, *, again: bool) -> None:
    """Raise Fenced unless an arena is of the store's current line.

    again: the process that made its copies is alive. If it is dead, an arena without copies fits any store.
    """
    if not fit(arena.line, line) and (again or not _is_blank(arena)):
        raise _overtaken(store)


def require_same_line(arena: Arena, store: Store) -> None:
    """Raise Fenced unless the store, whose copies were just read, is on the line of a live run's arena."""
    if not belongs(lambda: arena.line, store):
        raise _overtaken(store)


def _overtaken(store: Store) -> Fenced:
    return Fenced(
        f"{store.url}: another process has saved to this store meanwhile, or it has been rolled back or replaced",
        hint="stop one of the two processes; this one's copies stay in memory",
    )


def view_of(base: str | None, store: Store) -> ArenaView | None:
    """Read the arena of this store's run on this host; None if there is no arena, or it cannot be read.

    An arena that does not belong to the store is ignored, with a warning. `base` as for `arena_folder`.
    """
    found = peek(base, store.run_id)
    if found is None or not (found.moments > 0).any():
        return found
    views = [found]

    def line() -> Word | None:
        newest = peek(base, store.run_id)
        if newest is not None:
            views.append(newest)
        return views[-1].line

    try:
        if fit(found.line, store.line()) or belongs(line, store):
            return views[-1]
    except Corruption as error:
        log.warning("%s", _unproven(error, "copies in this host's memory are not shown"))
        return None
    owner = read_owner(arena_folder(base, store.run_id))
    if owner is not None and (followed := _followed(base, found, store)) is not None:
        return followed
    if owner is None:
        log.warning("%s", _stranger(store, "copies in this host's memory are not shown"))
    else:
        log.warning(
            "%s: the copy of %s's memory on this host is not shown: it is too old to be compared with the store's "
            "newest records, or another process has continued there",
            store.url,
            owner.host,
        )
    return None


def _followed(base: str | None, found: ArenaView, store: Store) -> ArenaView | None:
    """Return the view of a replica if the store continues it; None if not.

    Right after the owner has begun a term, its line is still on its way, so a replica is read again for a moment.
    """
    until = time.monotonic() + _ON_THE_WAY
    while not fit(found.line, store.line()):
        if time.monotonic() > until:
            return None
        time.sleep(_PAUSE)
        found = peek(base, store.run_id) or found
    return found


def open_stopped(base: str | None, store: Store) -> Arena | None:
    """Return the arena of a stopped run of this store on this host; None if there is no arena, or its run is alive.

    Logs a warning and returns None if the arena is damaged, belongs to another user, or does not belong to the store.
    The same if damaged records hide whether it belongs. The caller then uses the store alone.
    """
    try:
        arena = Arena.open_existing(arena_folder(base, store.run_id), run_id=store.run_id)
    except Contention:
        return None
    except (AccessDenied, Corruption) as error:
        log.warning("%s", error)
        return None
    try:
        return believed(arena, store)
    except Corruption as error:
        log.warning("%s", _unproven(error, "the copies in this host's memory are not used"))
        return None


def believed(arena: Arena | None, store: Store, *, set_aside: bool = False) -> Arena | None:
    """Return an open arena, if it belongs to the store; otherwise log a warning, close it, and return None.

    set_aside: rename the folder of an arena that does not belong to the store.
    """
    if arena is None:
        return None
    what = f"the copies in {arena.folder} are ignored"
    try:
        if is_kin(arena, store):
            owner = read_owner(arena.folder)
            arena.replica_of = None if owner is None else owner.host
            return arena
        if set_aside:
            what = f"the copies in memory are not used, and set aside in {put_aside(arena.folder)}"
    except BaseException:
        arena.close()
        raise
    log.warning("%s", _stranger(store, what))
    arena.close()
    return None


def take(folder: Path, store: Store) -> Arena | None:
    """Return the arena of a dead run of this store in `folder`, to continue with; None if there is no arena.

    An arena that is damaged, or does not belong to the store, is set aside, with a warning. Raises Contention,
    AccessDenied, and as reading the store does.
    """
    try:
        arena = Arena.open_existing(folder, run_id=store.run_id)
    except Corruption as error:
        aside = put_aside(folder)
        log.warning("%s. It is set aside in %s: only the store is used", error.message, aside)
        return None
    if arena is None:
        _report_others(folder, store)
    return believed(arena, store, set_aside=True)


def arena_for(folder: Path, layout: Layout, store: Store, *, sparse: bool = False) -> Arena:
    """Open a run's arena: that of a dead process, or a new one. sparse: see `Arena.create`; pages are mapped later.

    Raises as `take` and `Arena.create` do.
    """
    arena = take(folder, store)
    if arena is not None and arena.layout == layout:
        try:
            if not arena.intact().any():
                # The process that created it may have died before it reserved the rows' space.
                arena.reserve_rows()
            arena.settle()
            disown(folder)
            arena.take_over()
        except BaseException:
            arena.close()
            raise
        return arena
    if arena is not None:
        log.warning("the arena in %s has another layout, and is replaced", folder)
        arena.remove()
    return _create(folder, layout, store, sparse=sparse)


def _create(folder: Path, layout: Layout, store: Store, *, sparse: bool) -> Arena:
    """Create an arena. If there is no room, delete an arena that was set aside."""
    return with_room(
        folder,
        lambda: Arena.create(
            folder,
            layout,
            run_id=store.run_id,
            epoch=1,
            place=store.where,
            populate=not sparse,
            sparse=sparse,
        ),
    )


def with_room(folder: Path, make: Callable[[], T]) -> T:
    """Return the result of `make`, which needs room for an arena in `folder`.

    If there is no room (Unavailable, `kind` "arena-full"), delete an arena that was set aside there, and repeat it.
    """
    try:
        return make()
    except Unavailable as error:
        aside = _aside_of(folder)
        if error.kind != "arena-full" or not aside.exists():
            raise
        log.warning("%s was removed, to make room for the arena", aside)
        shutil.rmtree(aside)
        return make()


def _is_blank(arena: Arena) -> bool:
    """Return whether an arena holds no copies."""
    return not arena.intact().any()


def _stranger(store: Store, what: str) -> str:
    return (
        f"{store.url}: since this host's memory was written, another host has saved to the store or rolled it back, or "
        f"the store was replaced by another copy: {what}. Only the store is used"
    )


def _unproven(error: Corruption, what: str) -> str:
    return f"{error.message}. So it is not known whether this host's memory belongs to the store: {what}"


def _aside_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ASIDE)


def put_aside(folder: Path, successor: Path | None = None) -> Path:
    """Rename an arena's folder. An earlier folder of that name is deleted: a run has at most one.

    successor: a folder that takes the arena's place. If it cannot, the arena stays.
    """
    aside = _aside_of(folder)
    try:
        if os.path.lexists(aside):
            shutil.rmtree(aside)
        if successor is None:
            os.rename(folder, aside)
        else:
            replace_folder(folder, successor, aside)
    except OSError as error:
        raise folder_error(error, aside) from error
    return aside


def replace_folder(folder: Path, successor: Path, former: Path) -> None:
    """Rename `folder` to `former`, and `successor` to `folder`. If that fails, both stay. Raises OSError.

    A process that is killed meanwhile leaves one of them in the place. Without `exchange` it may leave none.
    """
    from scarctl.util.exchange import exchange

    if exchange(folder, successor):
        try:
            os.rename(successor, former)
        except OSError:
            exchange(folder, successor)
            raise
        return
    os.rename(folder, former)
    try:
        os.rename(successor, folder)
    except OSError:
        os.rename(former, folder)
        raise


def _report_others(folder: Path, store: Store) -> None:
    """Log other arenas of the same store, which are not used although they may have pending copies."""
    for path in _others(folder, store):
        view = peek(str(path.parents[1]), path.name)
        if view is None or view.alive or not (view.moments > 0).any():
            continue
        try:
            ours = view.line is None or fit(view.line, store.line())
        except ScarError:
            ours = True
        if ours:
            log.warning(
                "%s: the copies in %s are not used: they are of the store in %s, step %d. If this store was moved from "
                "there, move it back to continue from them",
                store.url,
                path,
                view.place or "another place",
                view.head_step,
            )


def _others(folder: Path, store: Store) -> Iterator[Path]:
    """Yield the folders of arenas of the same store and shard, at other places."""
    shard = "" if store.part is None else f"-{store.part.shard}"
    if not folder.parent.is_dir():
        return
    for path in sorted(folder.parent.glob(f"{store.id}*")):
        place, _, of_shard = path.name[len(store.id) :].partition("-")
        same = (f"-{of_shard}" if of_shard else "") == shard and not place.endswith(ASIDE)
        if same and path != folder and (path / FILE).exists():
            yield path
