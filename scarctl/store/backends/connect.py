"""Choose the backend for an address: a local folder, S3, or another file system of fsspec."""

from __future__ import annotations

from scarctl.store.backends.address import S3_SCHEMES, Address
from scarctl.store.backends.base import Blobs
from scarctl.store.backends.local import LocalBlobs


def blobs_at(address: Address, *, apart: bool = False) -> Blobs:
    """Return the files under an address. Import fsspec and s3fs only for an address that needs them.

    apart: as another process would see them, without connections and caches of this one.
    """
    if address.root is not None:
        return LocalBlobs(address.root)
    if address.scheme in S3_SCHEMES:
        from scarctl.store.backends.s3 import S3Blobs

        return S3Blobs(address, apart=apart)
    from scarctl.store.backends.remote import FsspecBlobs

    return FsspecBlobs(address, apart=apart)
