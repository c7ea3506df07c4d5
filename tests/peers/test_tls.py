"""Test links with mutual TLS: both ends verify, and each invalid certificate is refused with its reason."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.header import FILE
from scarctl.errors import AccessDenied, ScarError, UsageError
from scarctl.peers import channel as channels
from scarctl.peers import host as hosts
from scarctl.peers.channel import Channel, readable
from scarctl.peers.frames import MAX_STRANGER, Kind, encode
from scarctl.peers.handshake import Hello, answer
from scarctl.peers.host import Host
from scarctl.peers.sender import Sender
from scarctl.peers.tls import Tls
from tests.peers.test_host import (
    RUN,
    SECRET,
    START,
    STORE,
    arena,
    ends,
    follow,
    replica,
    save,
    senders,
    wait_until,
    west,
)
from tests.support.certificates import Authority
from tests.support.frames import joined
from tests.support.relay import Relay

__all__ = ["arena", "senders", "west"]
pytestmark = pytest.mark.leaves_arena


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("others"), "other")


def listen(west: Host, authority: Authority) -> int:
    return west.admit(START, SECRET, STORE, "127.0.0.1", 0, Tls(authority.host("west")))


def test_it_follows_and_nothing_is_readable_on_the_way(
    west: Host, arena: Arena, senders: list[Sender], tmp_path: Path, authority: Authority
) -> None:
    with Relay() as tapped:
        tapped.target = listen(west, authority)
        sender, warned = follow(senders, arena, tapped.port, tls=Tls(authority.host("east")))
        for step in (2, 3):
            wait_until(lambda: sender.describe() == "host0: following, up to date")
            assert replica(tmp_path).memory().tobytes() == arena.memory().tobytes()
            save(arena, step)
        wait_until(lambda: sender.describe() == "host0: following, up to date")
        sender.close(done=True, patience=30.0)
    assert warned == []
    assert len(tapped.seen) > arena.layout.nbytes
    for clear in (RUN.encode(), b'"nonce"', START.encode(), bytes(arena.memory()[:64])):
        assert clear not in tapped.seen


def test_both_ends_use_at_least_tls_1_2(west: Host, authority: Authority) -> None:
    port = listen(west, authority)
    certificate, key, ca = authority.host("east")
    for version, accepted in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(ca)
        context.load_cert_chain(certificate, key)
        context.set_ciphers("ALL:@SECLEVEL=0")
        deprecated = pytest.warns(DeprecationWarning, match="TLSv1_1")
        with contextlib.nullcontext() if accepted else deprecated:
            context.minimum_version = context.maximum_version = version
        with socket.create_connection(("127.0.0.1", port)) as plain:
            if accepted:
                with context.wrap_socket(plain) as secured:
                    assert secured.version() == "TLSv1.2"
            else:
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    context.wrap_socket(plain)


def refused(senders: list[Sender], arena: Arena, port: int, **other: Any) -> str:
    """Return the message of a sender about a host that it cannot reach."""
    _, warned = follow(senders, arena, port, **other)
    wait_until(lambda: warned)
    return warned[0]


def test_an_expired_certificate_is_refused_at_once(authority: Authority) -> None:
    with pytest.raises(
        UsageError, match="other hosts would not accept it: certificate has expired"
    ) as caught:
        Tls(authority.host("late", days=-1))
    assert caught.value.kind == "peer-tls"


def test_a_certificate_that_expires_while_the_job_runs_is_refused(
    west: Host, arena: Arena, senders: list[Sender], authority: Authority, tmp_path: Path
) -> None:
    """Each end was right when it started."""
    port = listen(west, authority)
    for seconds in (2, 10, 60):
        made = time.monotonic()
        files = authority.host("brief", days=seconds / 86400)
        with contextlib.suppress(UsageError):  # it has already expired, because this machine is busy
            tls = Tls(files)
            break
    time.sleep(max(0.0, made + seconds + 1.0 - time.monotonic()))
    said = refused(senders, arena, port, tls=tls)
    assert re.search("does not accept this host's certificate: .*expired", said), said
    assert list((tmp_path / "west").iterdir()) == []


def test_an_authority_of_others_is_refused_by_both_ends(
    west: Host, arena: Arena, senders: list[Sender], authority: Authority, other: Authority, tmp_path: Path
) -> None:
    port = listen(west, authority)
    said = refused(senders, arena, port, tls=Tls(other.host("stranger")))
    assert "certificate is not accepted" in said
    assert "same authority" in said
    # One that would accept any host: the host does not accept it.
    certificate, key, _ = other.host("intruder")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for shown in (True, False):
        if shown:
            context.load_cert_chain(certificate, key)
        else:
            context = ssl._create_unverified_context()
        with socket.create_connection(("127.0.0.1", port)) as plain, context.wrap_socket(plain) as secured:
            channel = Channel(secured)
            channel.send(encode(Kind.HELLO, Hello.new(START, RUN, 1).to_json()))
            with pytest.raises(AccessDenied, match="does not accept this host's certificate"):
                channel.expect(Kind.CHALLENGE)
    assert list((tmp_path / "west").iterdir()) == []


def test_a_host_without_tls_and_one_with_it_do_not_talk(
    west: Host, arena: Arena, senders: list[Sender], authority: Authority, tmp_path: Path
) -> None:
    secured = listen(west, authority)
    assert "is not kept up to date" in refused(senders, arena, secured)
    plain = west.admit("22" * 16, SECRET, "ee" * 16, "127.0.0.1", 0)
    assert plain != secured, "jobs with and without TLS do not share a port"
    said = refused(senders, arena, plain, tls=Tls(authority.host("east")))
    assert "TLS with it failed" in said
    assert "on all hosts, or on none" in said
    assert [path for path in (tmp_path / "west").rglob("*") if path.name == FILE] == []


def test_a_start_with_tls_is_not_reached_without(west: Host, authority: Authority) -> None:
    """Another job of the same user opens a port without TLS, but cannot take part."""
    listen(west, authority)
    plain = west.admit("22" * 16, SECRET, "ee" * 16, "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", plain)) as connection:
        channel = Channel(connection)
        channel.send(encode(Kind.HELLO, Hello.new(START, RUN, 1).to_json()))
        with pytest.raises(ScarError) as caught:
            channel.expect(Kind.CHALLENGE)
    assert caught.value.kind == "unknown-start"


def test_a_host_of_the_authority_cannot_stand_in_between(west: Host, authority: Authority) -> None:
    """It relays the proofs, and both ends see another certificate than they have proved."""
    port = listen(west, authority)
    middle, east = Tls(authority.host("middle")), Tls(authority.host("east"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        passed = threading.Thread(target=pass_on, args=(listener, middle, port))
        passed.start()
        with socket.create_connection(listener.getsockname()) as plain:
            secured = east.secure(plain, server=False, seconds=30.0)
            with secured:
                channel, hello = Channel(secured), Hello.new(START, RUN, 1)
                channel.send(encode(Kind.HELLO, hello.to_json()))
                head, _ = channel.expect(Kind.CHALLENGE)
                with pytest.raises(AccessDenied, match="secret"):
                    answer(SECRET, hello, head, east.binding(secured, server=False))
        passed.join(30)


def pass_on(listener: socket.socket, middle: Tls, port: int) -> None:
    """Relay a greeting and its answer between two ends."""
    connection, _ = listener.accept()
    plain = socket.create_connection(("127.0.0.1", port))
    with (
        middle.secure(connection, server=True, seconds=30.0) as near,
        middle.secure(plain, server=False, seconds=30.0) as far,
    ):
        far.sendall(near.recv(MAX_STRANGER))
        near.sendall(far.recv(MAX_STRANGER))


def test_who_does_not_finish_the_handshake_is_not_waited_for(
    west: Host, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "STRANGER_SECONDS", 0.3)
    monkeypatch.setattr(channels, "STRANGER_SECONDS", 0.3)
    port = listen(west, authority)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        began = time.monotonic()
        connection.sendall(b"\x16")
        assert ends(connection)
        assert time.monotonic() - began < 20


def test_what_is_buffered_inside_of_tls_counts_as_readable(authority: Authority) -> None:
    """A refusal that arrived together with an answer is no longer seen by the system."""
    near, far = socket.socketpair()
    made: list[Any] = []
    thread = threading.Thread(
        target=lambda: made.append(Tls(authority.host("a")).secure(near, server=True, seconds=30.0))
    )
    thread.start()
    with Tls(authority.host("b")).secure(far, server=False, seconds=30.0) as secured:
        thread.join()
        with made[0] as sending:
            frame = joined(encode(Kind.ACK, {}))
            sending.sendall(frame + frame)
            connection = Channel.__new__(Channel)
            assert not connection_ready(connection, secured, False)
            for left in (True, False):
                assert secured.recv(len(frame)) == frame
                assert connection_ready(connection, secured, left)


def connection_ready(channel: Channel, secured: ssl.SSLSocket, expected: bool) -> bool:
    channel._connection = secured
    return readable(channel) is expected


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda files, _: (files[0] + ".gone", *files[1:]), "No such file"),
        (lambda files, _: (files[0], files[2], files[2]), "not a key and a certificate"),
        (lambda files, other: (files[0], other.host("odd")[1], files[2]), "is not the key of"),
        (lambda files, other: (*files[:2], str(other.file)), "would not accept it"),
        (lambda files, _: (*files[:2], files[1]), "no certificate of an authority"),
    ],
)
def test_files_that_do_not_fit_are_named(
    authority: Authority, other: Authority, spoil: Any, said: str
) -> None:
    files = spoil(authority.host("east"), other)
    with pytest.raises(UsageError, match=said) as caught:
        Tls(files)
    assert "peer_tls" in str(caught.value)
    assert "PRIVATE KEY" not in str(caught.value)
