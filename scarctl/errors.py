"""Every error that scarctl raises on purpose, grouped by what the caller can do next.

    ScarError                    exit  1   something failed
    ├── UsageError                     2   the call is wrong: nothing was read or written
    │   ├── LayoutMismatch             2   the model is not the one in the store
    │   └── SettingsConflict           2   settings contradict the store's
    ├── NoStore                       10   there is no scarctl store there
    ├── Contention                    11   another live writer has the store
    ├── AccessDenied                  12   permissions
    ├── Corruption                    13   bytes are not what was written
    ├── MissingGuarantee              14   the store cannot do what a commit needs
    ├── Fenced                        15   a newer writer has taken over
    ├── NoIntactCopy                  16   a lost partition has no copy to restore
    └── Unavailable                   17   the store does not answer or is full: try again

`kind` is a stable, kebab-case name for programs. `hint` says what to do next. Exit codes are part of the
command-line contract.
"""

from __future__ import annotations

from typing import ClassVar

from scarctl.printable import printable


class ScarError(Exception):
    """Base of all scarctl errors: a message, a stable `kind`, and a `hint` that says what to do next.

    Both are one printable line, whatever names and foreign texts they were made from.
    """

    kind: str = "error"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "", kind: str | None = None) -> None:
        self.message = printable(message)
        self.hint = printable(hint)
        super().__init__(self.message)
        if kind is not None:
            self.kind = printable(kind)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(ScarError):
    """The call or its arguments are wrong. Nothing was read or written."""

    kind = "usage"
    exit_code = 2


class LayoutMismatch(UsageError):
    """The model's tensors are not those of the store."""

    kind = "layout-mismatch"


class SettingsConflict(UsageError):
    """Settings given now contradict those fixed when the store was created."""

    kind = "settings-conflict"


class NoStore(ScarError):
    """No scarctl store at that place (`kind` "foreign-store": something else lies there)."""

    kind = "no-store"
    exit_code = 10


class Contention(ScarError):
    """Another live process writes to the store."""

    kind = "contention"
    exit_code = 11
    retryable = True


class AccessDenied(ScarError):
    """The operating system or the object store refuses access."""

    kind = "access-denied"
    exit_code = 12


class Corruption(ScarError):
    """Stored bytes are not what was written, or a file is not what it claims to be."""

    kind = "corruption"
    exit_code = 13


class MissingGuarantee(ScarError):
    """The store lacks a guarantee (exclusive creation) that commits rely on."""

    kind = "missing-guarantee"
    exit_code = 14


class Fenced(ScarError):
    """A newer writer opened the store; this one may not commit any more."""

    kind = "fenced"
    exit_code = 15


class NoIntactCopy(ScarError):
    """A lost partition has no intact copy on any tier. Nothing was changed."""

    kind = "no-intact-copy"
    exit_code = 16


class Unavailable(ScarError):
    """The store does not answer, has no space left, or fails on input and output."""

    kind = "unavailable"
    exit_code = 17
    retryable = True


class Overwritten(ScarError):
    """A partition changed in the arena while it was written: the segment was discarded, a newer copy follows."""

    kind = "overwritten"
    retryable = True


def by_kind(kind: str) -> type[ScarError]:
    """The class whose errors have this `kind`; `ScarError` when none has it by itself."""
    classes = [ScarError]
    for known in classes:
        classes += known.__subclasses__()
        if known.kind == kind:
            return known
    return ScarError
