"""Test a real FTP server: refused as a place for several writers, and never waited for without a limit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scarctl.errors import MissingGuarantee, Unavailable
from scarctl.store import Store, open_writer
from scarctl.store.backends.address import Address
from scarctl.store.backends.remote import FsspecBlobs
from scarctl.store.doctor import diagnose
from scarctl.store.format import dump_json
from tests.store.helpers import Data, read_all, small_layout
from tests.support.ftp import ftp_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with ftp_server(tmp_path) as (url, process):
        yield f"{url}/run", process


def test_it_is_refused_without_a_race(server: tuple[str, subprocess.Popen[str]]) -> None:
    with pytest.raises(
        MissingGuarantee, match="checks whether the file exists, and then writes it"
    ) as caught:
        Store.create(server[0])
    assert "--assume-single-writer" in caught.value.hint
    assert "planted" not in str(caught.value)


def test_a_single_writer_may_use_it(server: tuple[str, subprocess.Popen[str]]) -> None:
    store = Store.create(server[0], assume_single_writer=True)
    layout = small_layout()
    data, everything = Data(layout), np.arange(layout.partitions)
    with open_writer(store, layout=layout) as writer:
        writer.commit(everything, data, step=3)
    again = Store.open(server[0])
    assert read_all(again, again.state(0)) == (data.all(everything.tolist()), {})


def test_what_an_earlier_version_believed_is_not_believed(
    server: tuple[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    Store.create(server[0], assume_single_writer=True)
    settings = tmp_path / "run/scarctl.json"
    told = json.loads(settings.read_bytes())
    told["probe"] = {"exclusive_create": True, "assumed": False}
    settings.write_bytes(dump_json(told))
    assert not Store.open(server[0]).blobs.exclusive
    with pytest.raises(MissingGuarantee, match="checks whether"):
        Store.create(server[0])
    Store.create(server[0], assume_single_writer=True)


def test_a_new_connection_replaces_a_lost_one(tmp_path: Path) -> None:
    with ftp_server(tmp_path) as (url, _):
        store = Store.create(f"{url}/run", assume_single_writer=True)
    with ftp_server(tmp_path, int(url.rpartition(":")[2])):
        assert store.again().id == store.id


def test_a_server_that_stops_answering_is_left_alone(server: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = server
    Store.create(url, assume_single_writer=True)
    store = Store.open(url, storage_options={"scarctl_timeout": 1.0})
    process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(Unavailable, match="TimeoutError"):
        store.again()
    assert time.monotonic() - started < 10
    process.send_signal(signal.SIGCONT)
    assert store.again().id == store.id


def test_doctor_says_why(server: tuple[str, subprocess.Popen[str]]) -> None:
    found = diagnose(server[0], rounds=3, large_bytes=1 << 20)
    assert not found.sound
    assert found.races == {}
    assert [check.name for check in found.checks if not check.ok] == ["exclusive-create"]
    assert found.left_behind == []


def test_doctor_ends_in_time(server: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = server
    started = time.monotonic()
    with pytest.raises(Unavailable, match="did not end within 1 s"):
        diagnose(url, seconds=1.0, progress=lambda _: process.send_signal(signal.SIGSTOP))
    assert time.monotonic() - started < 10


def test_a_signal_ends_doctor_at_once(server: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = server
    command = [sys.executable, "-m", "scarctl", "doctor", "--store", url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as doctor:
        assert doctor.stderr is not None
        doctor.stderr.readline()  # the first of what it does
        process.send_signal(signal.SIGSTOP)
        doctor.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert doctor.wait(60) == 128 + signal.SIGTERM
    assert time.monotonic() - started < 5


def test_calls_of_several_threads_take_turns(server: tuple[str, subprocess.Popen[str]]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    blobs = FsspecBlobs(Address.parse(server[0]))
    blobs.begin()
    blobs.exclusive = False
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: blobs.create_exclusive(f"file-{k}", [b"%d" % k]), range(40)))
        assert list(pool.map(lambda k: blobs.read(f"file-{k}", 9), range(40))) == [
            b"%d" % k for k in range(40)
        ]
