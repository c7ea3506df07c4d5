"""Test the daemon's figures as text for Prometheus with Prometheus' own parser, for any store names."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from scarctl.daemon.metrics import FAMILIES, exposition
from scarctl.daemon.outlet import answer, parse_listen, write_file
from scarctl.daemon.status import DaemonStatus, RunStatus
from scarctl.errors import UsageError
from scarctl.util.text import printable

OPEN: RunStatus = {
    "store": "/ckpt",
    "id": "0123",
    "pid": 7,
    "phase": "attached",
    "open": True,
    "peers": [],
    "shard": 3,
    "rank": 1,
    "head_step": 41,
    "durable_step": 40,
    "oldest_durable_step": 11,
    "sealed_step": -1,
    "shards": None,
    "queued_partitions": 2,
    "queued_bytes": 8192,
    "saved_at": "2026-11-22T21:25:40+00:00",
    "saved_bytes": 1 << 40,
    "bytes_per_second": 2_500_000,
    "space": None,
    "errors": 1,
    "last_error": "full",
    "stopped": False,
}


def status(*runs: RunStatus) -> DaemonStatus:
    publishing = {"file": None, "listen": None, "ready": True, "fault": None}
    return {"pid": 5, "started": 1.5e9, "runs": list(runs), "claims": 0, "metrics": publishing}  # type: ignore[typeddict-item]


def samples(text: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return labels and values by name, as Prometheus' own parser reads them."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation
        assert family.type in ("gauge", "counter")
        for sample in family.samples:
            assert sample.timestamp is None
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def open_samples(text: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the same as OpenMetrics' own parser reads it, which is strict about names, order and the end."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in openmetrics_families(text.decode()):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_openmetrics_has_the_same_figures() -> None:
    now = status(OPEN, {**OPEN, "id": "4567", "store": 'a"b\\c\nd'})
    text = exposition(now, openmetrics=True)
    assert open_samples(text) == samples(exposition(now))
    assert text.endswith(b"# EOF\n")
    with pytest.raises(ValueError, match="Clashing name"):
        open_samples(exposition(now))


def test_every_figure_of_a_run_is_there_once() -> None:
    found = samples(exposition(status(OPEN)))
    labels = {"store": "/ckpt", "run": "0123", "rank": "1"}
    assert found.pop("scarctl_start_time_seconds") == [({}, 1.5e9)]
    assert found.pop("scarctl_runs") == [({}, 1.0)]
    assert found == {
        "scarctl_attached": [(labels, 1.0)],
        "scarctl_stopped": [(labels, 0.0)],
        "scarctl_head_step": [(labels, 41.0)],
        "scarctl_durable_step": [(labels, 40.0)],
        "scarctl_oldest_durable_step": [(labels, 11.0)],
        "scarctl_pending_partitions": [(labels, 2.0)],
        "scarctl_pending_bytes": [(labels, 8192.0)],
        "scarctl_saved_bytes_total": [(labels, float(1 << 40))],
        "scarctl_errors_total": [(labels, 1.0)],
        "scarctl_saved_timestamp_seconds": [(labels, 1795382740.0)],
        "scarctl_bandwidth_bytes_per_second": [(labels, 2.5e6)],
    }, "no step is sealed yet"
    assert {family.name for family in FAMILIES} - found.keys() == {"scarctl_sealed_step"}


def test_a_run_that_is_not_open_has_no_invented_figures() -> None:
    claimed: RunStatus = {"store": "/x", "id": "9", "pid": 0, "phase": "orphaned", "open": False, "peers": []}
    found = samples(exposition(status(claimed)))
    assert found["scarctl_attached"] == [({"store": "/x", "run": "9"}, 0.0)]
    assert set(found) == {"scarctl_start_time_seconds", "scarctl_runs", "scarctl_attached"}


def test_two_runs_at_one_address_are_two_series() -> None:
    found = samples(exposition(status(OPEN, {**OPEN, "id": "4567", "head_step": 3})))
    assert [(labels["run"], value) for labels, value in found["scarctl_head_step"]] == [
        ("0123", 41),
        ("4567", 3),
    ]
    text = exposition(status(OPEN, {**OPEN, "id": "4567"})).decode()
    assert text.count("# TYPE scarctl_head_step ") == 1


@given(st.text() | st.binary().map(os.fsdecode))
def test_hostile_names_of_stores_are_labels_and_nothing_else(name: str) -> None:
    text = exposition(status({**OPEN, "store": name}))
    found = samples(text)
    assert found.keys() == samples(exposition(status(OPEN))).keys()
    assert all(series[0]["store"] == printable(name) for series, *_ in list(found.values())[2:])
    assert open_samples(exposition(status({**OPEN, "store": name}), openmetrics=True)) == found
    assert len(text.splitlines()) == len(exposition(status(OPEN)).splitlines())


def test_a_file_is_replaced_at_once_and_everyone_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "scarctl.prom"
    write_file(str(path), b"1\n")
    before = path.stat().st_ino
    with open(path, "rb") as held:
        write_file(str(path), b"2\n")
        assert held.read() == b"1\n"
    assert path.read_bytes() == b"2\n"
    assert path.stat().st_ino != before
    assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "scarctl.prom"
    precious.write_text("mine")
    path.symlink_to(precious)
    write_file(str(path), b"1\n")
    assert precious.read_text() == "mine"
    assert not path.is_symlink()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absolute"):
        write_file("scarctl.prom", b"1\n")
    with pytest.raises(FileNotFoundError):
        write_file(str(tmp_path / "missing" / "scarctl.prom"), b"1\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(str(tmp_path / "folder"), b"1\n")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_an_address_is_on_the_loopback_interface_unless_it_says_otherwise() -> None:
    assert parse_listen("9464") == ("127.0.0.1", 9464)
    assert parse_listen("0.0.0.0:80") == ("0.0.0.0", 80)
    assert parse_listen("[::1]:0") == ("::1", 0)
    for bad in ("", "x", "host:", "host:x", "1:65536", "-1", "٣"):
        with pytest.raises(UsageError):
            parse_listen(bad)


def asked(request: bytes) -> bytes:
    """Return the whole answer to a request."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(request)
        ours.shutdown(socket.SHUT_WR)
        answer(theirs, lambda openmetrics: b"openmetrics\n" if openmetrics else b"figures\n")
        theirs.close()
        return b"".join(iter(lambda: ours.recv(4096), b""))


@pytest.mark.parametrize(
    ("request_", "status_", "body"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200", b"figures\n"),
        (b"GET /metrics?name=x HTTP/1.0\r\n\r\n", b"200", b"figures\n"),
        (
            b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n\r\n",
            b"200",
            b"openmetrics\n",
        ),
        (
            b"GET /metrics HTTP/1.1\r\naccept: text/plain, application/openmetrics-text; q=0\r\n\r\n",
            b"200",
            b"figures\n",
        ),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"200", b""),
        (b"GET / HTTP/1.1\r\n\r\n", b"404", b"look at /metrics\n"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405", b"only GET\n"),
        (b"\x16\x03\x01\r\n\r\n", b"400", b"this is no HTTP request\n"),
        (b"\r\n\r\n", b"400", b"this is no HTTP request\n"),
    ],
)
def test_requests(request_: bytes, status_: bytes, body: bytes) -> None:
    head, _, found = asked(request_).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status_)
    assert found == body


def test_a_request_that_does_not_end_is_dropped() -> None:
    assert asked(b"GET /metrics HTTP/1.1\r\n") == b"", "the peer has gone"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        flood = threading.Thread(target=pour, args=(ours,))
        flood.start()
        with pytest.raises(TimeoutError):
            answer(theirs, lambda _: b"")
        theirs.close()
        flood.join()


def pour(connection: socket.socket) -> None:
    """Send a header without an end, until the peer closes."""
    try:
        while True:
            connection.sendall(b"x" * 1024)
    except OSError:
        return
