"""Test that the daemon survives peers that send nonsense, are many or silent, or belong to another user."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from pathlib import Path

import pytest

from scarctl.daemon import client, protocol
from scarctl.daemon import server as server_module
from scarctl.daemon.server import Daemon
from scarctl.errors import AccessDenied, Unavailable
from tests.daemon.trainer import Trainer, status
from tests.support.waiting import wait_until

NO_PROCESS = 0x7FFFFFF0


class TestHostilePeers:
    def test_garbage_never_stops_the_daemon(self, daemon: Daemon, trainer: Trainer) -> None:
        rng = random.Random(11)
        whole = b'{"v":1,"op":"status"}'
        texts = [
            b'{"v":1,"op":["status"]}',
            b'{"v":1,"op":{"a":1}}',
            b'{"v":1,"op":"claim","store":{}}',
            b'{"v":1,"op":"claim","pid":549755813887,"store":"/"}',
            b'{"v":1,"op":"watch","run":[1]}',
            b'{"v":1,"op":"notify"}',
            b'{"v":1,"op":"drain","milliseconds":1e999}',
            b'{"v":1,"op":"open","again":"yes"}',
            b'{"v":1,"op":"roll_back","seq":99999999999999999999999}',
            b"[" * 60000,
            b'{"v":1,"op":"' + b"x" * 60000 + b'"}',
            b"1" * 60000,
            b'{"v":NaN}',
            b"\x00" * 100,
        ]
        for number in range(150):
            with protocol.connect(daemon.folder, 10) as connection:
                kind = number % 5
                with contextlib.suppress(OSError):
                    if kind == 0:
                        connection.sendall(rng.randbytes(rng.randrange(1, 2000)))
                    elif kind == 1:
                        connection.sendall(struct.pack(">I", rng.randrange(1 << 32)) + rng.randbytes(50))
                    elif kind == 2:
                        connection.sendall((struct.pack(">I", 21) + whole)[: rng.randrange(25)])
                    else:
                        text = texts[number % len(texts)]
                        connection.sendall(struct.pack(">I", len(text)) + text)
                        if kind == 3 and b"notify" not in text:
                            connection.recv(10)
        trainer.save(trainer.everything, 1)
        trainer.close()
        assert set(trainer.stored()[0]) == {1}

    def test_many_connections(
        self, daemon: Daemon, arena_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(client.connect(daemon.folder, begin=False)) for _ in range(200)]
            trainer = Trainer(tmp_path / "store", arena_dir)
            trainer.save(trainer.everything, 1)
            for peer in peers:
                assert len(client.request(peer, "status")["runs"]) == 1
            trainer.close()
            monkeypatch.setattr(server_module, "most_connections", lambda: 200)
            with protocol.connect(daemon.folder, 10) as one_more:
                assert protocol.receive(one_more)["error"]["kind"] == "daemon-full"
                with pytest.raises((protocol.Closed, OSError)):
                    protocol.receive(one_more)
        assert wait_until(lambda: status(daemon.folder)) is not None, "there is room again"

    def test_a_peer_that_says_nothing_is_not_waited_for(
        self, daemon: Daemon, arena_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server_module, "_PATIENCE", 0.2)
        trainer = Trainer(tmp_path / "store", arena_dir)
        with protocol.connect(daemon.folder, 10) as silent, protocol.connect(daemon.folder, 10) as half:
            half.sendall(b"\0")
            for connection in (silent, half):
                with pytest.raises((protocol.Closed, OSError)):
                    protocol.receive(connection)
        trainer.save(trainer.everything, 1)
        trainer.close()  # a session may be silent for as long as it likes

    def test_a_peer_of_another_user_gets_no_answer(
        self, daemon: Daemon, connection: socket.socket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def foreign(connection: socket.socket) -> int:
            raise AccessDenied("another user")

        with pytest.MonkeyPatch.context() as patch:
            client.request(connection, "status")
            patch.setattr(protocol, "check_peer", foreign)
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(10)
                stranger.connect(str(daemon.folder / protocol.SOCKET))
                with contextlib.suppress(OSError):
                    protocol.send(stranger, {"v": protocol.VERSION, "op": "stop"})
                with pytest.raises((protocol.Closed, OSError)):
                    protocol.receive(stranger)
        assert client.request(connection, "status")["runs"] == []

    def test_a_listener_that_fails_now_and_then(
        self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failures = iter([OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
        accept = daemon._accept

        def failing(connection: socket.socket) -> None:
            error = next(failures, None)
            if error is not None:
                connection.close()
                raise error
            accept(connection)

        monkeypatch.setattr(daemon, "_accept", failing)
        for _ in range(2):
            with pytest.raises((Unavailable, OSError)):
                client.ask(daemon.folder, "status")
        assert status(daemon.folder) is not None
