"""A real FTP server on a free port of the loopback interface: a place whose file system looks first, then writes."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USER, PASSWORD = "planted", "planted-ftp-password"


@contextmanager
def ftp_server(root: Path) -> Iterator[str]:
    """Serve the folder `root`; gives the address of its top, with user and password."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the event loop that newer Pythons left to a package
        from pyftpdlib.authorizers import DummyAuthorizer
        from pyftpdlib.handlers import FTPHandler
        from pyftpdlib.servers import FTPServer

    logging.getLogger("pyftpdlib").setLevel(logging.ERROR)
    authorizer = DummyAuthorizer()
    authorizer.add_user(USER, PASSWORD, str(root), perm="elradfmwMT")

    class Handler(FTPHandler):  # type: ignore[misc]
        log_prefix = ""
        use_sendfile = False

    Handler.authorizer = authorizer
    server = FTPServer(("127.0.0.1", 0), Handler)
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            server.ioloop.loop(0.05, blocking=False)
        server.close_all()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"ftp://{USER}:{PASSWORD}@127.0.0.1:{server.address[1]}"
    finally:
        ending.set()
        thread.join()
