"""Run a real FTP server on the loopback interface: a place whose file system checks first, then writes.

python -m tests.support.ftp FOLDER: serves in a process of its own, which can be stopped, until its input ends.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

USER, PASSWORD = "planted", "planted-ftp-password"


@contextmanager
def ftp_server(root: Path, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve the folder `root`; yield the address of its top, with user and password, and the server's process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ftp", str(root), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        try:
            yield f"ftp://{USER}:{PASSWORD}@127.0.0.1:{port}", process
        finally:
            process.kill()


def main(root: str, port: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the event loop that newer Pythons moved to a package
        from pyftpdlib.authorizers import DummyAuthorizer
        from pyftpdlib.handlers import FTPHandler
        from pyftpdlib.servers import FTPServer

    class Handler(FTPHandler):  # type: ignore[misc]
        authorizer = DummyAuthorizer()

        def log(self, *_: Any, **__: Any) -> None: ...

    Handler.authorizer.add_user(USER, PASSWORD, root, perm="elradfmwMT")
    server = FTPServer(("127.0.0.1", port), Handler)
    print(server.address[1], flush=True)  # noqa: T201
    while True:
        server.ioloop.loop(1.0, blocking=False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
