"""Test what commands show about copies of memory on other hosts."""

from __future__ import annotations

import secrets
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scarctl.arena.folder import arena_folder
from scarctl.arena.owner import Owner, write_owner
from scarctl.peers.host import Host
from scarctl.peers.tls import Tls
from tests.cli.conftest import Run
from tests.support.certificates import Authority
from tests.support.ranks import RankStore

pytestmark = pytest.mark.leaves_arena


@pytest.fixture
def replica(tmp_path: Path) -> RankStore:
    """Return a store of two ranks, sealed at step 3. This host has a copy of rank 1's memory of step 9, for host
    "east".
    """
    made = RankStore(tmp_path / "ckpt", 2)
    made.save(3)
    arena = made.arena(tmp_path, 1, 9)
    arena.take_over(0)
    write_owner(arena_folder(str(tmp_path), made.view(1).run_id), Owner("east", "11" * 16, 1))
    arena.close()
    return made.close()


def test_inspect_says_whose_memory_it_is(run: Run, replica: RankStore, tmp_path: Path) -> None:
    arguments = ("inspect", "--store", "ckpt", "--arena-dir", tmp_path)
    lines = run(*arguments, "--json").document["ranks"]
    assert [(line["replica_of"], line["head_step"], line["copies"]) for line in lines] == [
        (None, None, []),
        ("east", 9, []),
    ]
    text = run(*arguments).stdout
    assert "copy of east" in text
    assert "ranks of other hosts whose memory is copied to this host: 1" in text
    assert "alive" not in text, "no process of this job was on this host"


def test_recover_says_that_copies_are_from_a_peer(run: Run, replica: RankStore, tmp_path: Path) -> None:
    arguments = (
        "recover",
        "--store",
        "ckpt",
        "--lost",
        "rank:1",
        "--arena-dir",
        tmp_path,
        "--output",
        "out.pt",
    )
    planned = run(*arguments, "--dry-run", "--json").document
    assert set(planned["tiers"]) == {"peer"}
    done = run(*arguments, "--json").document
    assert done["tiers"] == planned["tiers"]
    assert {shard["newest_step"] for shard in done["shards"]} == {9}
    assert torch.load(tmp_path / "out.pt", weights_only=True)
    text = run(
        "recover", "--store", "ckpt", "--lost", "rank:1", "--arena-dir", tmp_path, "--output", "2.pt"
    ).stdout
    assert f"({done['tiers']['peer']} from peer)" in text


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[int]:
    """Yield the port at which a daemon keeps replicas."""
    (tmp_path / "west").mkdir(mode=0o700)
    host = Host(tmp_path / "west")
    yield host.admit("11" * 16, secrets.token_bytes(32), "ab" * 16, "127.0.0.1", 0)
    host.close()


def test_doctor_finds_a_daemon_that_keeps_copies(run: Run, daemon: int) -> None:
    found = run("doctor", "--peer", f"127.0.0.1:{daemon}", "--json").document
    assert (found["address"], found["port"], found["source"]) == ("127.0.0.1", daemon, "127.0.0.1")
    assert 0 < found["connect_seconds"] < 10
    assert "reachable" in run("doctor", "--peer", f"127.0.0.1:{daemon}").stdout


def test_doctor_finds_that_something_else_listens(run: Run) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        done = run("doctor", "--peer", f"127.0.0.1:{listener.getsockname()[1]}", "--json", code=13)
        thread.join()
    assert done.error["kind"] == "no-peer"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls_daemon(tmp_path: Path, authority: Authority, request: pytest.FixtureRequest) -> Iterator[int]:
    """Yield the port at which a daemon keeps replicas, given a certificate; parameter: the newest version of TLS."""
    (tmp_path / "north").mkdir(mode=0o700)
    host = Host(tmp_path / "north")
    tls = Tls(authority.host("north"))
    tls._server.maximum_version = getattr(request, "param", ssl.TLSVersion.TLSv1_3)
    yield host.admit("11" * 16, secrets.token_bytes(32), "ab" * 16, "127.0.0.1", 0, tls)
    host.close()


def test_doctor_finds_a_daemon_that_uses_tls(
    run: Run, tls_daemon: int, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("doctor", "--peer", f"127.0.0.1:{tls_daemon}")
    files = list(authority.host("east"))
    assert run(*asked, "--peer-tls", ",".join(files), "--json").document["port"] == tls_daemon
    monkeypatch.setenv("SCARCTL_PEER_TLS", ", ".join(files))
    assert "reachable" in run(*asked).stdout
    monkeypatch.delenv("SCARCTL_PEER_TLS")
    (tmp_path / "scarctl.toml").write_text(f"peer_tls = {files}\n")
    assert "reachable" in run(*asked).stdout


@pytest.mark.parametrize("tls_daemon", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], indirect=True)
def test_doctor_says_that_a_certificate_is_needed(run: Run, tls_daemon: int) -> None:
    error = run("doctor", "--peer", f"127.0.0.1:{tls_daemon}", "--json", code=17).error
    assert (error["kind"], error["hint"]) == ("peer-tls", "give --peer-tls CERT,KEY,CA")
    assert "asks for a certificate" in error["message"]
