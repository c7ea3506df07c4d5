"""Test two daemons' ends of a link over the loopback interface: admission, refusals, and the cost of a lost link."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.header import FILE
from scarctl.errors import AccessDenied, ScarError, Unavailable
from scarctl.peers.channel import Channel, Gone
from scarctl.peers.frames import Kind, encode
from scarctl.peers.handshake import SECRET_BYTES, Hello, answer
from scarctl.peers.host import Host
from scarctl.peers.link import State
from scarctl.peers.sender import Candidate, Sender, Source
from scarctl.state.version import pack
from tests.daemon.rig import copy_into, fill, small_layout
from tests.support.waiting import wait_until

pytestmark = pytest.mark.leaves_arena
STORE = "ab" * 16 + "." + "cd" * 8
RUN = f"{STORE}-3"
START, SECRET = "11" * 16, secrets.token_bytes(SECRET_BYTES)
LAYOUT = small_layout()
EVERYTHING = np.arange(LAYOUT.partitions)


@pytest.fixture
def west(tmp_path: Path) -> Iterator[Host]:
    (tmp_path / "west").mkdir(mode=0o700)
    host = Host(tmp_path / "west")
    yield host
    host.close()
    wait_until(lambda: not host.busy)


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    """Return the arena of a run on another host."""
    (tmp_path / "east").mkdir(mode=0o700)
    made = Arena.create(tmp_path / "east" / RUN, LAYOUT, run_id=RUN, epoch=1)
    made.close()  # the lock
    save(made, 1)
    return made


def save(arena: Arena, step: int, *, flush: bool = True) -> None:
    version, whole = pack(1, step), f"{step:032x}"
    assert copy_into(arena, EVERYTHING, version, step, whole=whole, extras={"step": step}, flush=flush)
    arena.reach(step)


def source(**other: Any) -> Source:
    known = {"run": RUN, "store": "", "host": "east", "start": START, "secret": SECRET, "rate": None}
    return Source(**{**known, **other})


@pytest.fixture
def senders() -> Iterator[list[Sender]]:
    made: list[Sender] = []
    yield made
    for sender in made:
        sender.close(done=False, patience=30.0)


def follow(senders: list[Sender], arena: Arena, *ports: int, **other: Any) -> tuple[Sender, list[str]]:
    warned: list[str] = []
    candidates = [Candidate(f"host{n}", "127.0.0.1", port) for n, port in enumerate(ports)]
    sender = Sender(source(**other), candidates, arena, warned.append)
    senders.append(sender)
    sender.start()
    return sender, warned


def replica(tmp_path: Path, run: str = RUN) -> Arena:
    found = Arena.share(tmp_path / "west" / run, run_id=run)
    assert found is not None
    return found


def test_it_follows(
    west: Host, arena: Arena, senders: list[Sender], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0)
    sender, warned = follow(senders, arena, port)
    for step in (2, 3, 4):
        wait_until(lambda: sender.describe() == "host0: following, up to date")
        assert replica(tmp_path).slot.memory().tobytes() == arena.slot.memory().tobytes()
        assert [one["head_step"] for one in west.status()] == [step - 1]
        save(arena, step)
    wait_until(lambda: sender.describe() == "host0: following, up to date")
    sender.close(done=True, patience=30.0)
    wait_until(lambda: not west.busy)
    assert list((tmp_path / "west").iterdir()) == []
    assert warned == []
    assert SECRET.hex() not in caplog.text + repr(source())
    assert repr(SECRET) not in caplog.text + repr(source())


def test_a_link_that_is_lost_comes_back(
    west: Host, arena: Arena, senders: list[Sender], tmp_path: Path
) -> None:
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0)
    sender, warned = follow(senders, arena, port)
    wait_until(lambda: "up to date" in sender.describe())
    west.close()
    wait_until(lambda: sender.state is State.LOST)
    save(arena, 2)
    assert replica(tmp_path).intact().all()
    again = Host(tmp_path / "west")
    assert again.admit(START, SECRET, STORE, "127.0.0.1", port) == port
    wait_until(lambda: "up to date" in sender.describe())
    assert replica(tmp_path).slot.memory().tobytes() == arena.slot.memory().tobytes()
    assert any("not kept up to date" in text for text in warned)
    again.close()


def test_another_process_of_the_same_start_sends_everything_again(
    west: Host, arena: Arena, senders: list[Sender], tmp_path: Path
) -> None:
    """Members have one start for ever. After the store's backup was put back, an epoch's number comes again."""
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0)
    first, _ = follow(senders, arena, port, process="aa" * 16)
    wait_until(lambda: "up to date" in first.describe())
    first.close(done=False, patience=30.0)
    moments = arena.moments.copy()
    fill(arena, EVERYTHING, 9)  # the other process's copies, under the same moments and versions
    second, _ = follow(senders, arena, port, process="bb" * 16)
    wait_until(lambda: "up to date" in second.describe())
    assert (replica(tmp_path).moments == moments).all()
    assert replica(tmp_path).slot.memory().tobytes() == arena.slot.memory().tobytes()


@pytest.mark.parametrize("process", ["x" * 32, "a" * 31, None])
def test_a_process_without_a_good_name_is_refused(west: Host, arena: Arena, process: Any) -> None:
    channel = meet(west.admit(START, SECRET, STORE, "127.0.0.1", 0))
    about = {"host": "x", "store": "", "base_epoch": 1, "process": process}
    with pytest.raises(ScarError, match="process"):
        begin(channel, encode(Kind.LAYOUT, about, arena.layout_json()))


def test_an_earlier_start_of_the_job_is_not_let_in_again(
    west: Host, arena: Arena, senders: list[Sender]
) -> None:
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0)
    west.admit("22" * 16, secrets.token_bytes(SECRET_BYTES), STORE, "127.0.0.1", 0)
    sender, _ = follow(senders, arena, port)
    wait_until(lambda: sender.state is State.LOST)
    assert not west.status()


def test_the_next_host_is_asked_if_the_first_hasno_room(
    west: Host, arena: Arena, senders: list[Sender], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Host(tmp_path / "full")
    monkeypatch.setattr(full, "_begin", no_room)
    sender, warned = follow(
        senders,
        arena,
        full.admit(START, SECRET, STORE, "127.0.0.1", 0),
        west.admit(START, SECRET, STORE, "127.0.0.1", 0),
    )
    wait_until(lambda: sender.describe() == "host1: following, up to date")
    assert any("no room" in text for text in warned)
    full.close()


def no_room(*_: object) -> Any:
    raise Unavailable("no room", kind="arena-full")


# -- strangers -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def dialled() -> Iterator[None]:
    """Close the channels that a test has opened by `dial`."""
    yield
    while _dialled:
        _dialled.pop().close()


_dialled: list[socket.socket] = []


def dial(port: int) -> Channel:
    _dialled.append(socket.create_connection(("127.0.0.1", port)))
    return Channel(_dialled[-1])


def meet(port: int, hello: Hello | None = None, secret: bytes = SECRET) -> Channel:
    """Greet as an honest sender does, up to its proof."""
    greeting = hello or Hello.new(START, RUN, 1)
    channel = dial(port)
    channel.send(encode(Kind.HELLO, greeting.to_json()))
    head, _ = channel.expect(Kind.CHALLENGE)
    channel.send(encode(Kind.PROOF, answer(secret, greeting, head)))
    channel.trust(30.0)
    return channel


def begin(channel: Channel, frame: Any) -> None:
    channel.send(frame)
    channel.expect(Kind.ACK)


def ends(connection: socket.socket) -> bool:
    """Return whether the other side closes the channel, whatever it still sends."""
    connection.settimeout(30.0)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_a_wrong_proof_opens_nothing(west: Host, tmp_path: Path) -> None:
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0)
    with pytest.raises(AccessDenied):  # the host's own proof is of another secret: it is not believed either
        meet(port, secret=secrets.token_bytes(SECRET_BYTES))
    greeting = Hello.new(START, RUN, 1)
    channel = dial(port)
    channel.send(encode(Kind.HELLO, greeting.to_json()))
    channel.expect(Kind.CHALLENGE)
    channel.send(encode(Kind.PROOF, {"proof": "00" * 32}))
    with pytest.raises(Gone):
        channel.expect(Kind.ACK)
    assert list((tmp_path / "west").iterdir()) == []


def test_a_run_of_another_store_is_refused(west: Host, tmp_path: Path) -> None:
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0)
    for run in ("ef" * 16 + "-1", "../" + RUN, STORE):
        channel = meet(port, Hello.new(START, run, 1))
        about = {"host": "x", "store": "", "base_epoch": 1}
        with pytest.raises((Gone, ScarError)):
            begin(channel, encode(Kind.LAYOUT, about, b"{}"))
    assert [path for path in (tmp_path / "west").rglob("*") if path.name == FILE] == []


def test_a_busy_port_is_not_insisted_on(west: Host) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        assert west.admit(START, SECRET, STORE, "127.0.0.1", port) != port


def test_an_address_of_another_host_is_refused(west: Host) -> None:
    with pytest.raises(Unavailable) as caught:
        west.admit(START, SECRET, STORE, "192.0.2.1", 0)
    assert caught.value.kind == "no-address"


def test_a_rate_is_kept_by_the_system(west: Host, arena: Arena, senders: list[Sender]) -> None:
    """The kernel paces the connection, and reports the requested rate."""
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0)
    sender, _ = follow(senders, arena, port, rate=1_000_000.0)
    wait_until(lambda: "up to date" in sender.describe())
    channel = sender._channel
    assert channel is not None
    assert channel._connection.getsockopt(socket.SOL_SOCKET, 47) == 1_000_000
