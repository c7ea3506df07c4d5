"""Keep a store's files on S3, or a compatible server, through s3fs.

A small file is one PUT. A large one is a multipart upload, which becomes visible only when it is completed. So a writer
that fails leaves no partial file. s3fs and botocore do not retry requests here: `FsspecBlobs` does, because it has to
notice lost answers.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from scarctl.errors import ScarError, Unavailable, UsageError
from scarctl.store.backends.base import BlobWriter, Buffer, InDoubt, as_bytes
from scarctl.store.backends.client import Refused
from scarctl.store.backends.remote import FsspecBlobs
from scarctl.store.backends.remote_errors import Fault, Meaning, Patience, fault_error
from scarctl.store.format import is_hex

PART = 8 << 20
"""Bytes of a part; S3 requires at least 5 MiB for all but the last."""
IN_FLIGHT = 4
"""Most parts that are sent at once: a writer holds at most one more in memory."""
MAX_PARTS = 10_000
_GROWTH = ((2_000, 4), (6_000, 32))
"""(index of a part, factor): larger parts from that one on, so that 10,000 parts are enough for a terabyte."""
SINGLE_PUT = 64 << 20
"""Largest file that is created exclusively by one request. A larger one is sent in parts."""
OPEN_SECONDS = 30.0
PAGE = 1_000
"""Entries per page of a listing."""
_ABORT_SECONDS = 1.0  # beyond the deadline; the next writer aborts the rest
_VARIABLES = re.compile(r"(AWS|BOTO|REQUESTS|SSL|S3FS|FSSPEC)_.*|HOME|USERPROFILE|.*_PROXY", re.IGNORECASE)
"""Environment variables that botocore, aiohttp and s3fs may read."""


class S3Blobs(FsspecBlobs):
    """See `FsspecBlobs`."""

    def _root(self, fs: Any) -> str:
        return self.address.path

    def _host(self) -> str:
        return "s3"  # one client has all buckets; keys in the address are options by now

    def _reads(self, variable: str) -> bool:
        return _VARIABLES.fullmatch(variable) is not None

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

    def _size(self, name: str, patience: Patience | None = None) -> int:
        try:
            found = self._request("call_s3", "head_object", **self._key(name), patience=patience)
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
            except Refused as refused:
                fault = refused.fault
                if fault.meaning is Meaning.ABSENT:  # only the bucket can be absent
                    fault = Fault(Meaning.NO_PLACE, fault.detail)
                raise fault_error(fault, self.where(folder), "list") from None
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

    def create_exclusive(self, name: str, parts: Sequence[Buffer]) -> None:
        if sum(as_bytes(part).nbytes for part in parts) <= SINGLE_PUT:
            super().create_exclusive(name, parts)
            return
        # Only an index can be this large, and every writer of a record's index writes the same bytes.
        with self.writer(name) as out:
            for part in parts:
                out.write(part)
            out.commit()

    def _create_once(self, name: str, path: str, data: bytes, patience: Patience) -> None:
        if self.exclusive:
            # One PUT for any length, because some servers do not support a conditional completion of an upload.
            self._once("pipe_file", path, data, mode="create", chunksize=5 << 30, patience=patience)
        else:
            super()._create_once(name, path, data, patience)

    def writer(self, name: str) -> AbstractContextManager[BlobWriter]:
        return self._upload(name)

    @contextmanager
    def _upload(self, name: str) -> Iterator[BlobWriter]:
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
        self._sending: deque[Future[dict[str, Any]]] = deque()
        self._sent = 0
        self._completing = self._committed = False

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
        blobs, name = self._blobs, self._name
        patience = Patience(blobs.address.timeout)
        if self._id is None:
            self._put_whole()
            self._committed = True
            return
        if self._part:
            self._send()
        while self._sending:
            self._receive()
        with contextlib.suppress(
            FileNotFoundError
        ):  # some servers ignore the condition when an upload is completed
            blobs._size(name, patience)
            raise FileExistsError(errno.EEXIST, "already exists", blobs.where(name))
        self._complete(patience)
        if (size := blobs._size(name, patience)) != self._length:
            raise Unavailable(f"{blobs.where(name)}: {size} bytes after writing {self._length}")
        self._committed = True

    def _put_whole(self) -> None:
        if not self._part:
            self._ask("write", "put_object", Body=b"")
            return
        try:
            self._blobs._create(self._name, bytes(self._part))
        except InDoubt as error:
            # No record names the file yet, so at worst it is an orphan.
            raise Unavailable(error.message, hint="retry; acknowledged commits are safe") from None

    def close(self) -> None:
        """Delete uncommitted parts, if possible: remaining parts are invisible, but cost money."""
        for sending in self._sending:
            sending.cancel()
        self._sending.clear()
        self._part = bytearray()
        if self._committed or self._id is None:
            return
        patience = Patience(min(_ABORT_SECONDS, self._blobs.address.timeout))
        with contextlib.suppress(Refused, ScarError):
            self._blobs._request(
                "call_s3", "abort_multipart_upload", **self._key, UploadId=self._id, patience=patience
            )
        if self._completing:
            # The completion may have succeeded although its answer was lost.
            with contextlib.suppress(Refused, ScarError):
                self._blobs._request("call_s3", "delete_object", **self._key, patience=patience)

    def _ask(self, doing: str, method: str, **kwargs: Any) -> Any:
        try:
            return self._blobs._request("call_s3", method, **self._key, **kwargs)
        except Refused as refused:
            fault = refused.fault
        if fault.meaning is Meaning.ABSENT:
            fault = Fault(Meaning.NO_PLACE, fault.detail)
        raise fault_error(fault, self._blobs.where(self._name), doing)

    def _send(self) -> None:
        if self._id is None:
            self._id = self._ask("write", "create_multipart_upload")["UploadId"]
        while len(self._sending) >= IN_FLIGHT:
            self._receive()
        self._sent += 1
        if self._sent > MAX_PARTS:
            raise UsageError(
                f"{self._blobs.where(self._name)}: this file is too large for one upload",
                hint="save a smaller fraction at a time, or from several ranks or members",
            )
        work = self._put_part(self._sent, bytes(self._part))
        self._sending.append(self._blobs._start(work))
        self._part_size = PART * max([1, *(factor for after, factor in _GROWTH if self._sent >= after)])
        self._part = bytearray()

    async def _put_part(self, number: int, data: bytes) -> dict[str, Any]:
        asked = {**self._key, "UploadId": self._id, "PartNumber": number, "Body": data}
        answer = await self._blobs._insist(
            lambda: self._blobs._fs._call_s3("upload_part", **asked), Patience(self._blobs.address.timeout)
        )
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def _receive(self) -> None:
        sending = self._sending.popleft()
        try:
            # The request has its own deadline. This one is for a thread that has died.
            self._parts.append(sending.result(2 * self._blobs.address.timeout))
            return
        except Refused as refused:
            fault = refused.fault
        except Exception as error:
            fault = Fault(Meaning.BROKEN, type(error).__name__)
        finally:
            sending.cancel()
        if fault.meaning is Meaning.ABSENT:
            fault = Fault(Meaning.NO_UPLOAD, fault.detail)
        raise fault_error(fault, self._blobs.where(self._name), "write")

    def _complete(self, patience: Patience) -> None:
        blobs = self._blobs
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if blobs.exclusive else {}
        self._completing = True
        try:
            blobs._request(
                "call_s3",
                "complete_multipart_upload",
                **self._key,
                **condition,
                UploadId=self._id,
                MultipartUpload={"Parts": self._parts},
                patience=patience,
            )
            return
        except Refused as refused:
            fault = refused.fault
        if fault.meaning in (Meaning.NO_UPLOAD, Meaning.ABSENT, Meaning.EXISTS) and self._is_there(patience):
            return  # the first answer was lost
        if fault.meaning is Meaning.EXISTS:
            self._completing = False  # another writer's file must not be deleted
            raise FileExistsError(errno.EEXIST, "already exists", blobs.where(self._name))
        if fault.meaning is Meaning.ABSENT:
            fault = Fault(Meaning.NO_UPLOAD, fault.detail)
        raise fault_error(fault, blobs.where(self._name), "write")

    def _is_there(self, patience: Patience) -> bool:
        """Return whether the existing file is this one, by its tag, which is computed from the tags of the parts."""
        digests = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in self._parts if _is_md5(part))
        tag = f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(self._parts)}"
        try:
            found = self._blobs._request("call_s3", "head_object", **self._key, patience=patience)
        except Refused:
            return False
        return bool(found["ContentLength"] == self._length and found.get("ETag", "").strip('"') == tag)


def _is_md5(part: dict[str, Any]) -> bool:
    return is_hex(part["ETag"].strip('"'), 32)
