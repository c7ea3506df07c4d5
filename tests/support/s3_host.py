"""Run an S3 server at an address of its own host: `python -m tests.support.s3_host http://10.0.0.3:9000`."""

from __future__ import annotations

import sys
import threading
from urllib.parse import urlsplit

from tests.support.places import s3_client, s3_server


def main(address: str) -> None:
    place = urlsplit(address)
    with s3_server(str(place.hostname), int(place.port or 0)):
        s3_client(address).create_bucket(Bucket="bucket")
        sys.stderr.write("serves\n")
        sys.stderr.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
