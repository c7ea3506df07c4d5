"""Keep a store's files on S3, or a compatible server, through s3fs.

A record or claim is one conditional PUT. No other writer uses the name of a segment, so it needs no condition: it is
one PUT, or a multipart upload, which becomes visible only when it is completed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scarctl.errors import ScarError, Unavailable, UsageError
from scarctl.store.backends.base import Buffer, as_bytes
from scarctl.store.backends.client import Call, Refused
from scarctl.store.backends.remote import FsspecBlobs
from scarctl.store.backends.remote_errors import Meaning, Patience, fault_error

PART = 8 << 20
"""Bytes of a part; S3 requires at least 5 MiB for all but the last."""
IN_FLIGHT = 4
"""Most parts that are sent at once: a writer holds at most one more in memory."""
MAX_PARTS = 10_000
_GROWTH = ((2_000, 4), (6_000, 32))
"""(index of a part, factor): larger parts from that one on, so that 10,000 parts are enough for a terabyte."""
OPEN_SECONDS = 30.0
PAGE = 1_000
"""Entries per page of a listing."""
_ABORT_SECONDS = 1.0  # beyond the deadline; the next writer aborts the rest


class S3Blobs(FsspecBlobs):
    """See `FsspecBlobs`."""

    def _root(self, fs: Any) -> str:
        return self.address.path

    def _host(self) -> str:
        return "s3"  # one client has all buckets; keys in the address are options by now

    def _open_filesystem(self) -> Any:
        import fsspec
        import fsspec.asyn

        options = dict(self.address.options)
        config = dict(options.pop("config_kwargs", None) or {})
        config["retries"] = {"mode": "standard", "total_max_attempts": 1}
        config.setdefault("connect_timeout", min(5.0, self.address.timeout))
        config.setdefault("read_timeout", min(15.0, self.address.timeout))
        config.setdefault("max_pool_connections", 32)
        given = {**options, "use_listings_cache": False, "skip_instance_cache": True}
        fs = fsspec.filesystem("s3", config_kwargs=config, **given)
        fs.retries = 1
        # Done before the first request, because loading and fetching credentials would use up its deadline.
        fsspec.asyn.sync(fs.loop, fs.set_session, timeout=OPEN_SECONDS)
        return fs

    def _key(self, name: str) -> dict[str, Any]:
        bucket, _, key = self._path(name).partition("/")
        return {"Bucket": bucket, "Key": key}

    def _size(self, name: str) -> int:
        try:
            found = self._request("call_s3", "head_object", **self._key(name))
        except Refused as refused:
            raise self._error(refused, name, "look at") from None
        return int(found["ContentLength"])

    def _list(self, folder: str, *, whole: bool = True) -> list[tuple[str, int, str]]:
        bucket, _, prefix = self._folder(folder).partition("/")
        asked: dict[str, Any] = {"Bucket": bucket, "Prefix": f"{prefix}/" if prefix else "", "Delimiter": "/"}
        asked["MaxKeys"] = PAGE
        found: list[tuple[str, int, str]] = []
        while True:
            try:
                page = self._request("call_s3", "list_objects_v2", **asked)
            except Refused as refused:  # only the bucket can be absent
                raise fault_error(refused.fault, self.where(folder), "list") from None
            start = len(asked["Prefix"])
            found += [(entry["Prefix"][start:-1], -1, "") for entry in page.get("CommonPrefixes", ())]
            found += [
                (entry["Key"][start:], entry["Size"], str(entry.get("ETag", "")))
                for entry in page.get("Contents", ())
            ]
            if not (whole and page.get("IsTruncated")):
                return [one for one in found if one[0]]
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def uploads(self) -> list[tuple[str, str]]:
        bucket, _, prefix = self._folder("").partition("/")
        prefix = f"{prefix}/" if prefix else ""
        asked: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
        found: list[tuple[str, str]] = []
        while True:
            try:
                page = self._request("call_s3", "list_multipart_uploads", **asked)
            except Refused as refused:
                if not refused.fault.passing:
                    return []
                raise fault_error(refused.fault, self.where(""), "list the uploads of") from None
            found += [(entry["Key"], entry["UploadId"]) for entry in page.get("Uploads", ())]
            if not (page.get("IsTruncated") and page.get("NextKeyMarker")):
                break
            asked["KeyMarker"] = page["NextKeyMarker"]
            asked["UploadIdMarker"] = page.get("NextUploadIdMarker", "")
        return [(key.removeprefix(prefix), token) for key, token in found if key.startswith(prefix)]

    def abort(self, name: str, token: str) -> None:
        try:
            self._request("call_s3", "abort_multipart_upload", **self._key(name), UploadId=token)
        except Refused as refused:
            if refused.fault.meaning not in (Meaning.NO_UPLOAD, Meaning.ABSENT):
                raise self._error(refused, name, "abort the upload of") from None

    def prepare(self, folder: str, *, known: bool = False) -> None:
        """Do nothing, because S3 has no folders."""

    def _create_once(self, name: str, path: str, data: bytes, patience: Patience) -> None:
        if self.exclusive:
            # One PUT for any length, because some servers do not support a conditional completion of an upload.
            self._once("pipe_file", path, data, mode="create", chunksize=5 << 30, patience=patience)
        else:
            super()._create_once(name, path, data, patience)

    @contextmanager
    def writer(self, name: str) -> Iterator[_Upload]:
        upload = _Upload(self, name)
        try:
            yield upload
        finally:
            upload.close()


class _Upload:
    """A file being written: one PUT if it is short, otherwise parts that are sent while the next one is filled."""

    def __init__(self, blobs: S3Blobs, name: str) -> None:
        self._blobs = blobs
        self._name = name
        self._key = blobs._key(name)
        self._part = bytearray()
        self._part_size = PART
        self._length = 0
        self._id: str | None = None
        self._parts: list[dict[str, Any]] = []
        self._sending: deque[tuple[dict[str, Any], Call]] = deque()
        self._sent = 0
        self._committed = self._finishing = False

    def write(self, buffer: Buffer) -> None:
        view = as_bytes(buffer)
        self._length += len(view)
        while len(view):
            taken = min(len(view), self._part_size - len(self._part))
            self._part += view[:taken]
            view = view[taken:]
            if len(self._part) == self._part_size:
                self._send()

    def commit(self) -> None:
        if self._id is not None:
            if self._part:
                self._send()
            while self._sending:
                self._receive()
        self._finishing = True
        if self._id is not None:
            self._complete(self._id)
        else:
            self._ask("put_object", Body=bytes(self._part))
        self._committed = True

    def _complete(self, upload: str) -> None:
        blobs = self._blobs
        parts = {"Parts": self._parts}
        try:
            blobs._request(
                "call_s3", "complete_multipart_upload", **self._key, UploadId=upload, MultipartUpload=parts
            )
        except Refused as refused:
            gone = refused.fault.meaning in (Meaning.NO_UPLOAD, Meaning.ABSENT)
            if not gone or not blobs.has(self._name):  # if it is there, the first answer was lost
                raise fault_error(refused.fault, blobs.where(self._name), "write") from None
        if (size := blobs._size(self._name)) != self._length:
            raise Unavailable(f"{blobs.where(self._name)}: {size} bytes after writing {self._length}")

    def close(self) -> None:
        """Delete what is not committed, if possible: parts are invisible, but cost money."""
        for _, call in self._sending:
            call.future.cancel()
        self._sending.clear()
        if self._committed:
            return
        patience = Patience(min(_ABORT_SECONDS, self._blobs.address.timeout))
        with contextlib.suppress(Refused, ScarError):
            if self._id is not None:
                asked = {**self._key, "UploadId": self._id}
                self._blobs._request("call_s3", "abort_multipart_upload", **asked, patience=patience)
        # A request whose answer was lost may have succeeded.
        with contextlib.suppress(Refused, ScarError):
            if self._finishing:
                self._blobs._request("call_s3", "delete_object", **self._key, patience=patience)

    def _ask(self, method: str, **kwargs: Any) -> Any:
        try:
            return self._blobs._request("call_s3", method, **self._key, **kwargs)
        except Refused as refused:
            raise fault_error(refused.fault, self._blobs.where(self._name), "write") from None

    def _send(self) -> None:
        if self._id is None:
            self._id = self._ask("create_multipart_upload")["UploadId"]
        while len(self._sending) >= IN_FLIGHT:
            self._receive()
        self._sent += 1
        if self._sent > MAX_PARTS:
            raise UsageError(
                f"{self._blobs.where(self._name)}: this file is too large for one upload",
                hint="save a smaller fraction at a time, or from several ranks or members",
            )
        asked = {"UploadId": self._id, "PartNumber": self._sent, "Body": bytes(self._part)}
        self._sending.append((asked, self._blobs._start("call_s3", "upload_part", **self._key, **asked)))
        self._part_size = PART * max([1, *(factor for after, factor in _GROWTH if self._sent >= after)])
        self._part = bytearray()

    def _receive(self) -> None:
        asked, begun = self._sending.popleft()
        answer = self._ask("upload_part", begun=begun, **asked)
        self._parts.append({"PartNumber": asked["PartNumber"], "ETag": answer["ETag"]})
