"""Make hosts with arenas of one member, and fetch between them: each host is a folder, and what its daemon does for
others.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.arena.extras import read_extras
from scarctl.arena.folder import arena_folder, host_folder
from scarctl.arena.owner import disown
from scarctl.peers.channel import Channel
from scarctl.peers.fetch import Asker, Fetched, fetch_memory
from scarctl.peers.frames import Kind, encode
from scarctl.peers.handshake import SECRET_BYTES, Hello, challenge, verify
from scarctl.peers.host import Host
from scarctl.peers.lender import Lend, lent_without_runs
from scarctl.peers.sender import Candidate
from scarctl.peers.tls import Tls
from scarctl.persist.saver import LocalSaver
from scarctl.state.layout import Layout
from scarctl.state.version import pack, step_of
from scarctl.store import Store
from scarctl.store.members import join_members
from tests.daemon.rig import copy_into, small_layout

START, SECRET = "11" * 16, secrets.token_bytes(SECRET_BYTES)
LAYOUT = small_layout()
DEAD = 0x7FFFFFF0
"""An id that no process has."""
MEMBER = 3


class Site:
    """One host: its folder for arenas, and the daemon's end for other hosts."""

    def __init__(
        self, folder: Path, store: Path, lend: Lend = lent_without_runs, layout: Layout = LAYOUT
    ) -> None:
        folder.mkdir()
        self.layout, self.everything = layout, np.arange(layout.partitions)
        self.name, self.base = folder.name, str(folder)
        self.store = store
        self.home = host_folder(self.base)
        self.home.mkdir(mode=0o700)
        self.host = Host(self.home, lend)
        self.port = 0

    def listen(
        self,
        *,
        start: str = START,
        secret: bytes = SECRET,
        tls: Tls | None = None,
        rate: float | None = None,
    ) -> Candidate:
        runs = self.view().run_id.partition("-")[0]
        self.port = self.host.admit(start, secret, runs, "127.0.0.1", 0, tls, rate)
        return self.candidate

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.name, "127.0.0.1", self.port)

    def view(self, shard: int = MEMBER) -> Store:
        return Store.open(str(self.store)).of_shard(shard, current=True)

    @property
    def place(self) -> Path:
        return arena_folder(self.base, self.view().run_id)

    def train(self, step: int, *, durable: bool = False, copied: Callable[[], object] = lambda: None) -> None:
        """Let a process save all of `step` here, and die. It takes over an arena that is here.

        copied: called when the copies are in memory. durable: they are in the store, too.
        """
        view = self.view()
        saver = LocalSaver(view)
        saver.claim()
        arena = Arena.open_existing(self.place, run_id=view.run_id) or Arena.create(
            self.place, self.layout, run_id=view.run_id, epoch=1
        )
        disown(self.place)
        arena.take_over()
        saver.open(arena)
        whole = uuid.uuid4().hex
        version = pack(arena.epoch, step)
        assert copy_into(arena, self.everything, version, step, whole=whole, extras={"step": step})
        arena.reach(step)
        arena.ask(whole=True)
        copied()
        if durable:
            saver.resume()
            assert saver.drain(30.0), saver.fault()
        saver.close()
        view.close()
        arena.take_over(DEAD)
        arena.close()

    def fetch(self, *hosts: Candidate, **other: Any) -> Fetched | None:
        """Fetch the member's memory to this host."""
        view = self.view()
        asker = Asker(**{"start": START, "secret": SECRET, "tls": None, "seconds": 20.0, **other})
        try:
            return fetch_memory(view, self.base, hosts, asker)
        finally:
            view.close()

    def step(self) -> int:
        """Return the step of all copies in this host's arena; -1 without one. Checks bytes and extras."""
        arena = Arena.share(self.place, run_id=self.view().run_id)
        if arena is None:
            return -1
        (version,) = set(arena.version.tolist())
        assert arena.intact().all()
        step = step_of(version)
        assert np.unique(arena.rows(0, 0)).tolist() == [step % 251]
        found = read_extras(arena)
        assert found is None or found.tree in (None, {"step": step_of(found.version)})
        return step

    def files(self) -> dict[str, bytes]:
        """Return all files of this host, by their path."""
        return {
            str(path.relative_to(self.home)): path.read_bytes()
            for path in sorted(self.home.rglob("*"))
            if path.is_file()
        }


class Liar:
    """A host that has the secret, and answers FETCH as a test likes."""

    def __init__(self, answer: Callable[[Channel, Kind], object], secret: bytes = SECRET) -> None:
        self._answer, self._secret = answer, secret
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.candidate = Candidate("liar", "127.0.0.1", int(self._listener.getsockname()[1]))
        self.errors: list[Exception] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Candidate:
        return self.candidate

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30.0)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(Exception):
                channel = Channel(connection)
                hello = Hello.from_json(channel.expect(Kind.HELLO)[0])
                asked = challenge(self._secret, hello)
                channel.send(encode(Kind.CHALLENGE, asked))
                verify(self._secret, hello, asked["nonce"], channel.expect(Kind.PROOF)[0])
                channel.trust(30.0)
                self._answer(channel, channel.receive()[0])


@contextlib.contextmanager
def sites(folder: Path, *names: str, layout: Layout = LAYOUT) -> Iterator[list[Site]]:
    """Yield hosts, and a store of some members."""
    store = folder / "store"
    made_store = Store.create(str(store), shards=1)
    assert join_members(made_store, MEMBER + 1).shards[MEMBER] == MEMBER
    made_store.close()
    made = [Site(folder / name, store, layout=layout) for name in names]
    try:
        yield made
    finally:
        for site in made:
            site.host.close()
