"""Test the daemon among other users: who may connect, and who may read its files."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.folder import arena_folder
from scarctl.daemon import client, protocol
from scarctl.daemon.__main__ import LOCK, LOG
from scarctl.errors import AccessDenied, ScarError, Unavailable
from scarctl.store import Store
from tests.daemon.trainer import Trainer, status, stop

NOBODY = 65534
only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture(autouse=True)
def forked_daemons() -> None:
    """Start daemons as users do, by overriding what other tests do."""


def as_nobody(action: Callable[[], None]) -> None:
    """Run a function in a forked child as another user. Fails if it raises."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            action()
            code = 0
        except BaseException as error:
            os.write(write, repr(error).encode()[:4000])
        finally:
            os._exit(code)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, said


def denied(action: Callable[[], Any]) -> None:
    try:
        action()
    except PermissionError:
        return
    raise AssertionError("it was allowed")


@only_root
class TestOtherUsers:
    @pytest.fixture(autouse=True)
    def everybodys_base(self, arena_dir: Path) -> None:
        """Return a folder like /dev/shm, to which every user may write."""
        arena_dir.chmod(0o1777)

    def test_can_neither_connect_nor_read_nor_write(
        self, trainer: Trainer, folder: Path, arena_dir: Path
    ) -> None:
        trainer.save_durably(1)
        trainer.saver.stop()
        trainer.save(trainer.everything, 2)
        arena = arena_folder(str(arena_dir), trainer.store.run_id)
        files = [folder / name for name in (LOCK, LOG, protocol.SOCKET)] + list(arena.iterdir())
        assert len(files) == 8, "the arena, its line and site, and the extras of both slots"

        def attack() -> None:
            for path in (folder, arena):
                denied(lambda path=path: os.listdir(path))
                denied(lambda path=path: (path / "planted").touch())
            for path in files:
                denied(lambda path=path: os.open(path, os.O_RDONLY))
                denied(lambda path=path: os.open(path, os.O_WRONLY))
                denied(lambda path=path: path.unlink())
                denied(lambda path=path: os.chmod(path, 0o777))
            with socket.socket(socket.AF_UNIX) as connection:
                denied(lambda: connection.connect(str(folder / protocol.SOCKET)))
            denied(lambda: os.rename(folder, arena_dir / "moved"))
            denied(lambda: os.kill(status_before, signal.SIGTERM))

        status_before = status(folder)["pid"]  # type: ignore[index]
        as_nobody(attack)
        trainer.saver.resume()
        trainer.close()
        assert set(trainer.stored()[0]) == {2}

    def test_get_no_answer_even_where_the_folder_is_open(self, folder: Path) -> None:
        pid = client.hold(folder, 60)
        folder.chmod(0o755)
        (folder / protocol.SOCKET).chmod(0o777)

        def attack() -> None:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(10)
                connection.connect(str(folder / protocol.SOCKET))
                with contextlib.suppress(OSError):
                    protocol.send(connection, {"v": protocol.VERSION, "op": "stop"})
                try:
                    raise AssertionError(f"it answered {protocol.receive(connection)}")
                except (protocol.Closed, ConnectionError):
                    pass

        as_nobody(attack)
        folder.chmod(0o700)
        assert status(folder)["pid"] == pid  # type: ignore[index]

    def test_cannot_pretend_to_be_the_daemon(self, folder: Path) -> None:
        folder.mkdir()
        folder.chmod(0o777)
        listener = socket.socket(socket.AF_UNIX)
        read, write = os.pipe()
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setuid(NOBODY)
                listener.bind(str(folder / protocol.SOCKET))
                listener.listen()
                os.write(write, b"x")
                os.read(ready, 1)
            finally:
                os._exit(0)
        os.read(read, 1)
        folder.chmod(0o700)
        try:
            with pytest.raises(AccessDenied, match=str(NOBODY)):
                client.connect(folder)
        finally:
            os.write(go, b"x")
            os.waitpid(child, 0)
            for fd in (read, write, ready, go):
                os.close(fd)
            listener.close()

    @pytest.mark.leaves_arena
    @pytest.mark.parametrize("what", ["folder", "link"])
    def test_cannot_make_it_follow_what_they_planted(
        self, folder: Path, arena_dir: Path, tmp_path: Path, what: str
    ) -> None:
        mine = tmp_path / "mine"
        mine.mkdir(mode=0o700)
        victim = mine / "victim"
        victim.write_text("precious")

        def plant() -> None:
            if what == "link":
                folder.symlink_to(mine)
                return
            folder.mkdir(mode=0o700)
            for name in (LOCK, LOG, protocol.SOCKET):
                (folder / name).symlink_to(victim)

        as_nobody(plant)
        with pytest.raises(AccessDenied):
            client.connect(folder)
        with pytest.raises(Unavailable, match="not a folder of this user") as caught:
            client.start(folder)
        assert caught.value.kind == "daemon-not-started"
        with pytest.raises(AccessDenied):
            Trainer(tmp_path / "store", arena_dir)
        assert victim.read_text() == "precious"
        assert list(mine.iterdir()) == [victim]


@pytest.mark.parametrize("name", [LOCK, LOG, protocol.SOCKET, "arena"])
@pytest.mark.leaves_arena
def test_links_in_its_own_folder_are_not_followed_either(
    folder: Path, arena_dir: Path, tmp_path: Path, name: str
) -> None:
    folder.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 1000)
    store = Store.create(tmp_path / "store", shards=3)
    place = folder / store.run_id if name == "arena" else folder
    place.mkdir(mode=0o700, exist_ok=True)
    (place / name).symlink_to(victim)
    with contextlib.suppress(ScarError):
        Trainer(tmp_path / "store", arena_dir).close()
        assert name == protocol.SOCKET, "a socket is replaced, whatever it was; nothing else is"
    assert victim.read_bytes() == b"precious" * 1000
    stop(folder)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_who_may_read_a_store_does_not_depend_on_who_started_the_daemon(
    folder: Path, arena_dir: Path, tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(0)
    try:
        client.hold(folder, 60)
        os.umask(umask)
        (tmp_path / "store").mkdir()
        trainer = Trainer(tmp_path / "store", arena_dir)
        trainer.save_durably(1)
        trainer.close()
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "store").rglob("*")}
    files = {path.name: bits for path, bits in found.items() if path.is_file() and path.name != "lock"}
    assert set(files.values()) == {mode}, files
    assert {bits & 0o022 for bits in found.values()} == {0}
