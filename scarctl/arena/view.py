"""Read an arena without its lock: the partitions' fields of a run that may be alive."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.folder import arena_folder, check_both
from scarctl.arena.header import FIELDS, FIELDS_AT, FILE, SHARED, read_header, read_place
from scarctl.arena.line import Word, noted
from scarctl.arena.slot import differing, newest_of
from scarctl.errors import AccessDenied, Corruption, ScarError
from scarctl.state.layout import Layout
from scarctl.state.version import NEVER, step_of
from scarctl.util.process import exists

log = logging.getLogger("scarctl")


@dataclass(frozen=True, slots=True)
class ArenaView:
    """Copies of an arena's small arrays at one moment (`scarctl.arena.arena`). The state itself is not read."""

    layout: Layout
    size: int
    """Bytes of the file."""
    epoch: int
    head_step: int
    pid: int
    errors: int
    """See `Fields.errors`."""
    failed_saves: int
    """See `Fields.failed_saves`."""
    interval: int | None
    """Iterations between two checkpoints; None if unknown."""
    overhead: float | None
    """Measured share of training time that checkpoints take; None if unknown."""
    sealed: int
    """Version of the newest state that the store has as a whole."""
    moment: int
    """Moment of the current slot; 0 without a state. The arrays are those of this slot."""
    head: int
    """Version of the state in it; -1 without one."""
    whole: bool
    """Whether the copies in it are of one state."""
    kept: int
    """See `Fields.kept`."""
    line: Word | None
    """See `Arena.line`."""
    place: str
    """Address of the store, for display; "" if unknown."""
    moments: NDArray[np.int64]
    version: NDArray[np.int64]
    durable: NDArray[np.int64]
    saved: NDArray[np.int64]
    distance: NDArray[np.float64]
    encoding_error: NDArray[np.float64]

    @property
    def alive(self) -> bool:
        """Whether a process with the run's process id exists."""
        return exists(self.pid)

    @property
    def newest(self) -> NDArray[np.int64]:
        """The newest version whose values each copy has: see `Slot.newest`."""
        return newest_of(self.moments, self.version, self.head if self.whole else NEVER)

    @property
    def pending(self) -> int:
        """Number of partitions with a pending copy."""
        return int(differing(self.moments, self.saved).sum())

    @property
    def lacking(self) -> bool:
        """Whether the store lacks something of this state: copies, or the extras."""
        return self.moment != self.kept or self.pending > 0

    @property
    def ended(self) -> bool:
        """Whether the process is gone, and the store has all of its newest step, sealed."""
        return (
            not self.alive
            and not self.lacking
            and self.sealed >= 0
            and step_of(self.sealed) == self.head_step
        )


def peek(base: str | None, run_id: str) -> ArenaView | None:
    """Read the arena of a run on this host; None if there is no arena, or it cannot be read.

    Takes no lock, so the numbers of a live run may be of slightly different moments. `kinship.view_of` also checks
    that the arena belongs to its store. `base` as for `arena_folder`.
    """
    return peek_in(arena_folder(base, run_id), run_id)


def peek_in(folder: Path, run_id: str) -> ArenaView | None:
    """Read the arena in `folder`: see `peek`."""
    path = folder / FILE
    try:
        check_both(folder)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be read: %s", path, error.strerror)
        return None
    except ScarError as error:
        log.warning("%s", error)
        return None
    try:
        layout, geometry = read_header(fd, path, run_id)
        place = read_place(fd)
        n = layout.partitions
        fields = np.frombuffer(_read(fd, path, FIELDS_AT, 8 * len(FIELDS)), np.int64)
        named = dict(zip(FIELDS, fields.tolist(), strict=True))
        found = _read(fd, path, geometry.arrays_at, 8 * n * len(SHARED))
        shared = dict(zip(SHARED, np.frombuffer(found, np.int64).reshape(-1, n), strict=True))
        slot = named["current"]
        at = geometry.slot_arrays_at[slot]
        moments, version = np.frombuffer(_read(fd, path, at, 16 * n), np.int64).reshape(2, n)
    except (AccessDenied, Corruption) as error:
        log.warning("%s", error)
        return None
    finally:
        os.close(fd)
    return ArenaView(
        layout,
        geometry.size,
        named["epoch"],
        named["head_step"],
        named["pid"],
        named["errors"],
        named["failed_saves"],
        named["interval"] if named["interval"] > 0 else None,
        (named["overhead"] - 1) / 1e6 if named["overhead"] > 0 else None,
        named["sealed"],
        named[f"moment_{slot}"],
        named[f"head_{slot}"],
        bool(named[f"whole_{slot}"] or named[f"whole_low_{slot}"]),
        named["kept"],
        noted(folder),
        place,
        moments=moments,
        version=version,
        durable=shared["durable"],
        saved=shared["saved"],
        distance=shared["distance"].view(np.float64),
        encoding_error=shared["encoding_error"].view(np.float64),
    )


def _read(fd: int, path: Path, at: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0:
        part = os.pread(fd, min(size, 1 << 26), at)
        if not part:
            raise Corruption(f"{path} ends too early", hint="the store is not affected")
        parts.append(part)
        at, size = at + len(part), size - len(part)
    return b"".join(parts)
