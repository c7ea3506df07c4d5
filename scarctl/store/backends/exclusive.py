"""List the file systems whose implementation creates files exclusively; a test cannot show it.

fsspec's own creation checks whether the file exists, and then writes it. Two processes may both find it absent, but in
a test that is rare. So a file system counts as exclusive only if it is known to create with one conditional request.
`scarctl.store.backends.probe` then tests that its server obeys the condition.
"""

from __future__ import annotations

from typing import Any

CONDITIONAL = frozenset(
    {
        ("s3fs.core", "S3FileSystem"),
        ("gcsfs.core", "GCSFileSystem"),
        ("adlfs.spec", "AzureBlobFileSystem"),
        # Other processes cannot see its files, and the threads of this process take turns.
        ("fsspec.implementations.memory", "MemoryFileSystem"),
    }
)
"""Module and name of the classes whose `pipe_file(mode="create")` is one request that the server decides."""


def why_not_exclusive(scheme: str) -> str | None:
    """Return why the file system of a scheme does not create exclusively; None if it does. Sends no request.

    Raises as `fsspec.get_filesystem_class` does.
    """
    import fsspec
    from fsspec.asyn import AsyncFileSystem

    found: Any = fsspec.get_filesystem_class(scheme)
    method = "_pipe_file" if issubclass(found, AsyncFileSystem) else "pipe_file"
    owner = next(cls for cls in found.__mro__ if method in vars(cls))
    if (owner.__module__, owner.__qualname__) in CONDITIONAL:
        return None
    if owner.__module__.startswith("fsspec."):
        return f"{found.__name__} checks whether the file exists, and then writes it: two processes can both create it"
    return f"{found.__name__} is not known to create a file by one conditional request"
