"""Classify an error of a remote file system, and compute the pauses of retries.

Messages are made from status, code and class of an error, never from its text. The text may hold an address with a
password, a signature or a key. For the same reason scarctl errors are not chained to their causes.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from scarctl.errors import AccessDenied, MissingGuarantee, ScarError, Unavailable, UsageError
from scarctl.store.backends.base import InDoubt

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
# A separate generator: the global one belongs to the training, whose random numbers must not change.
_random = random.Random()

_SAFE = "acknowledged commits are safe"


class Meaning(Enum):
    """Classes of errors, by the outcome of the request."""

    ABSENT = "absent"
    EXISTS = "exists"
    DENIED = "denied"
    WRONG = "wrong"
    """The request can never succeed."""
    UNSUPPORTED = "unsupported"
    BUSY = "busy"
    """The request may have been carried out or not: retry."""
    BROKEN = "broken"
    """The outcome is unknown; a retry may help."""
    NO_PLACE = "no-place"
    """The bucket does not exist."""
    EMPTY = "empty"
    """The requested range has no bytes."""
    NO_UPLOAD = "no-upload"


@dataclass(frozen=True, slots=True)
class Fault:
    meaning: Meaning
    detail: str

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later."""
        return self.meaning in (Meaning.BUSY, Meaning.BROKEN)


_CODES = {
    "NoSuchKey": Meaning.ABSENT,
    "NoSuchVersion": Meaning.ABSENT,
    "NoSuchBucket": Meaning.NO_PLACE,
    "NoSuchUpload": Meaning.NO_UPLOAD,
    "PreconditionFailed": Meaning.EXISTS,
    "InvalidRange": Meaning.EMPTY,
    "NotImplemented": Meaning.UNSUPPORTED,
    "InvalidBucketName": Meaning.WRONG,
    "PermanentRedirect": Meaning.WRONG,
    "AuthorizationHeaderMalformed": Meaning.WRONG,
    "IllegalLocationConstraintException": Meaning.WRONG,
    "RequestTimeout": Meaning.BUSY,
    "SlowDown": Meaning.BUSY,
    "ConditionalRequestConflict": Meaning.BUSY,
    "OperationAborted": Meaning.BUSY,
    "InvalidAccessKeyId": Meaning.DENIED,
    "SignatureDoesNotMatch": Meaning.DENIED,
    "ExpiredToken": Meaning.DENIED,
    "InvalidToken": Meaning.DENIED,
    "RequestTimeTooSkewed": Meaning.DENIED,
}
_STATUS = {
    301: Meaning.WRONG,
    307: Meaning.WRONG,
    401: Meaning.DENIED,
    403: Meaning.DENIED,
    404: Meaning.ABSENT,
    409: Meaning.BUSY,
    412: Meaning.EXISTS,
    416: Meaning.EMPTY,
    429: Meaning.BUSY,
    501: Meaning.UNSUPPORTED,
}
# botocore's classes are listed by name, because importing it takes a third of a second.
_CLASSES = {
    "NoCredentialsError": Meaning.DENIED,
    "PartialCredentialsError": Meaning.DENIED,
    "CredentialRetrievalError": Meaning.DENIED,
    "TokenRetrievalError": Meaning.DENIED,
    "UnauthorizedSSOTokenError": Meaning.DENIED,
    "ProfileNotFound": Meaning.WRONG,
    "NoRegionError": Meaning.WRONG,
    "ConfigParseError": Meaning.WRONG,
    "ParamValidationError": Meaning.WRONG,
    "InvalidRegionError": Meaning.WRONG,
}


def understand(error: BaseException) -> Fault:
    """Classify an error from a file system."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return _of_response(response)
    name = type(error).__name__
    if name in _CLASSES:
        return Fault(_CLASSES[name], name)
    if isinstance(error, FileNotFoundError):
        return Fault(Meaning.ABSENT, name)
    if isinstance(error, FileExistsError):
        return Fault(Meaning.EXISTS, name)
    if isinstance(error, PermissionError):
        return Fault(Meaning.DENIED, name)
    if isinstance(error, NotImplementedError):
        return Fault(Meaning.UNSUPPORTED, name)
    if isinstance(error, ValueError | TypeError | KeyError):
        return Fault(Meaning.WRONG, name)
    code = errno.errorcode.get(getattr(error, "errno", None) or 0)
    return Fault(Meaning.BROKEN, f"{name}, {code}" if code else name)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _of_response(response: dict[str, object]) -> Fault:
    metadata, details = response.get("ResponseMetadata"), response.get("Error")
    status = metadata.get("HTTPStatusCode") if isinstance(metadata, dict) else None
    code = str(details.get("Code", "")) if isinstance(details, dict) else ""
    status = status if isinstance(status, int) else int(code) if code.isdecimal() and len(code) == 3 else 0
    named = code if code.isalnum() and not code.isdecimal() else ""
    detail = " ".join(filter(None, [f"HTTP {status}" if status else "", named[:60]])) or "an error"
    meaning = _CODES.get(code) or _STATUS.get(status)
    if meaning is None:
        meaning = Meaning.BUSY if status >= 500 else Meaning.BROKEN
    return Fault(meaning, detail)


def fault_error(fault: Fault, what: str, doing: str) -> ScarError:
    """Return the scarctl error for a failed request."""
    reason = f"{what}: cannot {doing}: {fault.detail}"
    match fault.meaning:
        case Meaning.DENIED:
            hint = "check the credentials, their permissions, and this machine's clock"
            return AccessDenied(reason, hint=hint)
        case Meaning.WRONG:
            return UsageError(reason, hint="check the store's address, the region and the storage options")
        case Meaning.UNSUPPORTED:
            return MissingGuarantee(reason, hint="this store lacks an operation that commits need")
        case Meaning.NO_PLACE | Meaning.ABSENT:  # files that are written or listed need not exist
            return Unavailable(
                reason,
                hint=f"the bucket was deleted or never created; {_SAFE} if it exists",
                kind="no-bucket",
            )
    retry = "check the address and the endpoint, and retry" if "Connect" in fault.detail else "retry"
    return Unavailable(reason, hint=f"{retry}; {_SAFE}")


def in_doubt(what: str, detail: str) -> InDoubt:
    """Return the error for a request that may have been carried out."""
    return InDoubt(
        f"{what}: it is not known whether it was created ({detail})",
        hint=f"{_SAFE}; the next commit settles this one",
    )


class Patience:
    """Time limit of one operation: growing pauses between attempts, and a deadline."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._pause = FIRST_PAUSE

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self.seconds - (self._deadline - time.monotonic())

    @property
    def left(self) -> float:
        """Remaining seconds, always above 0."""
        return max(0.01, self._deadline - time.monotonic())

    def pause(self) -> float | None:
        """Return the seconds to wait before the next attempt; None if the deadline allows no further attempt."""
        pause = self._pause * _random.uniform(0.5, 1.0)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return pause if time.monotonic() + pause < self._deadline else None
