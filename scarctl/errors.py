"""Define every error that scarctl raises on purpose, grouped by what the caller can do next.

    ScarError                    exit  1   something failed
    ├── UsageError                     2   the call is wrong: nothing was read or written
    │   ├── LayoutMismatch             2   the model differs from the one in the store
    │   └── SettingsConflict           2   settings contradict the store's
    ├── NoStore                       10   the path or address holds no scarctl store
    ├── Contention                    11   another live process writes to the store
    ├── AccessDenied                  12   permissions are missing
    ├── Corruption                    13   stored bytes differ from those written
    ├── MissingGuarantee              14   the store lacks a guarantee that commits need
    ├── Fenced                        15   a newer writer has taken over
    ├── NoIntactCopy                  16   a lost partition has no intact copy
    └── Unavailable                   17   the store does not answer or is full: try again

`kind` is a stable, kebab-case name for programs. `hint` says what to do next. Exit codes are part of the
command-line contract.
"""

from __future__ import annotations

from typing import ClassVar

from scarctl.util.text import printable


class ScarError(Exception):
    """Base of all scarctl errors: a message, a stable `kind`, and a `hint` that says what to do next.

    Message and hint are one printable line each, even if they quote names and foreign texts.
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
    """The model's tensors differ from those in the store."""

    kind = "layout-mismatch"


class SettingsConflict(UsageError):
    """The given settings contradict those fixed when the store was created."""

    kind = "settings-conflict"


class NoStore(ScarError):
    """The path or address holds no scarctl store (`kind` "foreign-store": it holds something else)."""

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
    """Stored bytes differ from those written, or a file contradicts itself."""

    kind = "corruption"
    exit_code = 13


class MissingGuarantee(ScarError):
    """The store lacks a guarantee (exclusive creation) that commits need."""

    kind = "missing-guarantee"
    exit_code = 14


class Fenced(ScarError):
    """A newer writer opened the store; this one may no longer commit."""

    kind = "fenced"
    exit_code = 15


class NoIntactCopy(ScarError):
    """A lost partition has no intact copy on any tier. Nothing was changed."""

    kind = "no-intact-copy"
    exit_code = 16


class Unavailable(ScarError):
    """The store does not answer, is full, or fails to read or write."""

    kind = "unavailable"
    exit_code = 17
    retryable = True


class Overwritten(ScarError):
    """A partition changed in the arena while it was being written. Its segment was discarded; a newer copy follows."""

    kind = "overwritten"
    retryable = True


def by_kind(kind: str) -> type[ScarError]:
    """Return the class whose default `kind` this is; `ScarError` if no class has it."""
    classes = [ScarError]
    for known in classes:
        classes += known.__subclasses__()
        if known.kind == kind:
            return known
    return ScarError


def error_fields(error: ScarError) -> dict[str, str]:
    """Return an error as JSON values for another process: `type` names its class, `kind` may be more precise."""
    return {"type": type(error).kind, "kind": error.kind, "message": error.message, "hint": error.hint}


def error_from(fields: object) -> ScarError:
    """Return the error of `error_fields`. Raise Corruption if `fields` are not those of an error."""
    names = ("type", "kind", "message", "hint")
    if not isinstance(fields, dict) or not all(isinstance(fields.get(name), str) for name in names):
        raise Corruption("another process sent an error without its fields")
    return by_kind(fields["type"])(fields["message"], hint=fields["hint"], kind=fields["kind"])
