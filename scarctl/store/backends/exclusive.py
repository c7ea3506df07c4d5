"""List the file systems that create a file exclusively: by how they are built, never by a race that went well.

fsspec's own creation looks whether the file is there and then writes it. Two processes may both find it absent, and
the moment between is so short that a probe seldom sees it. So a file system counts as exclusive only if it is known to
create with one conditional request. That its server obeys the condition is then found out by
`scarctl.store.backends.probe`.
"""

from __future__ import annotations

from typing import Any

CONDITIONAL = frozenset(
    {
        ("s3fs.core", "S3FileSystem"),
        ("gcsfs.core", "GCSFileSystem"),
        ("adlfs.spec", "AzureBlobFileSystem"),
        # No other process sees its files; the threads of this one create in turn.
        ("fsspec.implementations.memory", "MemoryFileSystem"),
    }
)
"""Module and name of the classes whose `pipe_file(mode="create")` is one request that the server decides."""


def why_not_exclusive(scheme: str) -> str | None:
    """Return why the file system of a scheme does not create exclusively; None if it does. Asks no server.

    Raises what `fsspec.get_filesystem_class` raises.
    """
    import fsspec
    from fsspec.asyn import AsyncFileSystem

    found: Any = fsspec.get_filesystem_class(scheme)
    method = "_pipe_file" if issubclass(found, AsyncFileSystem) else "pipe_file"
    owner = next(cls for cls in found.__mro__ if method in vars(cls))
    if (owner.__module__, owner.__qualname__) in CONDITIONAL:
        return None
    if owner.__module__.startswith("fsspec."):
        return f"{found.__name__} looks whether the file is there, and then writes it: two processes can both create it"
    return f"{found.__name__} is not known to create a file by one conditional request"
