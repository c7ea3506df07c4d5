"""Provide places for stores that a test can read without the code under test."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment


class Raw(Protocol):
    """A store's files, by name, without scarctl."""

    def names(self) -> list[str]: ...

    def get(self, name: str) -> bytes: ...

    def put(self, name: str, data: bytes) -> None: ...

    def remove(self, name: str) -> None: ...


@dataclass(frozen=True)
class Place:
    """A place where a store may be made, and the raw access to it."""

    url: str
    raw: Raw
    options: Mapping[str, Any] = field(default_factory=dict)
    lasting: bool = True
    """Whether another process sees it."""


class Folder:
    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> list[str]:
        return sorted(str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file())

    def get(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(data)

    def remove(self, name: str) -> None:
        (self.root / name).unlink()


class Memory:
    def __init__(self, root: str) -> None:
        import fsspec

        self.root = root
        self.fs = fsspec.filesystem("memory")

    def names(self) -> list[str]:
        return sorted(name.removeprefix(f"{self.root}/") for name in self.fs.find(self.root))

    def get(self, name: str) -> bytes:
        data: bytes = self.fs.cat_file(f"{self.root}/{name}")
        return data

    def put(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{name}", data)

    def remove(self, name: str) -> None:
        self.fs.rm_file(f"{self.root}/{name}")


class Bucket:
    """A bucket of an S3 server, through boto3."""

    def __init__(self, client: Any, bucket: str, folder: str) -> None:
        self.client = client
        self.bucket = bucket
        self.folder = folder

    def names(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{self.folder}/"
        )
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return sorted(key.removeprefix(f"{self.folder}/") for key in keys)

    def get(self, name: str) -> bytes:
        answer = self.client.get_object(Bucket=self.bucket, Key=f"{self.folder}/{name}")
        data: bytes = answer["Body"].read()
        return data

    def put(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.folder}/{name}", Body=data)

    def remove(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.folder}/{name}")

    def uploads(self) -> list[str]:
        """Return the keys of uploads that were begun and neither completed nor aborted."""
        answer = self.client.list_multipart_uploads(Bucket=self.bucket)
        return [upload["Key"] for upload in answer.get("Uploads", ())]


def one_request_at_a_time(app: WSGIApplication) -> WSGIApplication:
    """Return `app` so that it serves requests one after the other, each once its body has arrived."""
    serving = threading.Lock()

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        length = environ.get("CONTENT_LENGTH")
        if length or environ.get("wsgi.input_terminated"):  # the latter: sent in chunks
            # A client that stalls or leaves halfway delays no other; the application sees how much arrived.
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(length) if length else -1))
        with serving:
            return app(environ, start_response)

    return serve


KEY, SECRET = "AKIAPLANTEDKEY000001", "planted/secret+of/the/tests"


@contextmanager
def s3_server(host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Run an S3 server at an address of this host, on a free port unless one is given; yield its URL.

    It is moto's, without the layer that moto puts in front of all its services, which is slower than a request. Moto
    checks for an object and puts one in two steps. S3 does it in one step, and so does this server.
    """
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    class Quiet(MotoRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept

        def log_request(self, *_: Any) -> None: ...

    app = one_request_at_a_time(create_backend_app("s3"))
    server = make_server(host, port, app, threaded=True, request_handler=Quiet)
    server.daemon_threads = True  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def s3_client(endpoint: str) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )
