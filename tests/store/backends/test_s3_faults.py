"""Test a busy, broken and lying S3 server: a proxy in front of a real one does what networks and servers do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from scarctl.errors import AccessDenied, MissingGuarantee, Unavailable
from scarctl.store import Store, open_writer
from scarctl.store.backends import remote_errors
from scarctl.store.backends.address import Address
from scarctl.store.backends.base import Blobs, InDoubt
from scarctl.store.backends.connect import blobs_at
from scarctl.store.backends.s3 import PART
from tests.store.helpers import Data, read_all, small_layout
from tests.support.places import Place
from tests.support.proxy import Fault, Proxy, Request

pytestmark = pytest.mark.slow

LOST = Fault(done=True)
"""The server has carried out the request, and the answer never arrives."""
RESET = Fault()
TIMEOUT = 0.8
"""Seconds of the deadline in tests that reach it."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_errors, "FIRST_PAUSE", 0.02)


@pytest.fixture
def place(s3_place: Place, wire: Proxy) -> Place:
    """Return the bucket behind the proxy."""
    return replace(s3_place, options={**s3_place.options, "endpoint_url": wire.url})


@pytest.fixture
def hurried(place: Place) -> Blobs:
    """Return blobs with a short deadline."""
    return blobs_of(replace(place, options={**place.options, "scarctl_timeout": TIMEOUT}))


@pytest.fixture
def blobs(place: Place) -> Blobs:
    return blobs_of(place)


def blobs_of(place: Place) -> Blobs:
    blobs = blobs_at(Address.parse(place.url, place.options))
    while True:  # making a client takes longer than some deadlines here
        with suppress(Unavailable):
            blobs.has("a/x")
            return blobs


def times(count: int, fault: Fault, method: str, ending: str = "") -> Callable[[Request], Fault | None]:
    """Make the first `count` requests of that kind fail."""
    left = [count]

    def rule(request: Request) -> Fault | None:
        if request.method != method or not request.path.endswith(ending) or not left[0]:
            return None
        left[0] -= 1
        return fault

    return rule


PASSING = [
    Fault((500, "InternalError")),
    Fault((503, "SlowDown")),
    Fault((429, "TooManyRequests")),
    Fault((409, "ConditionalRequestConflict")),
    Fault((502, "")),
    RESET,
    LOST,
    Fault((500, "InternalError"), done=True),
    Fault((503, "SlowDown"), done=True),
]


@pytest.mark.parametrize("fault", PASSING, ids=str)
def test_a_creation_succeeds_once_whatever_the_answers_were(
    blobs: Blobs, place: Place, wire: Proxy, fault: Fault
) -> None:
    wire.rule = times(2, fault, "PUT")
    blobs.create_exclusive("a/x", [b"mine"])
    assert place.raw.get("a/x") == b"mine"


@pytest.mark.parametrize("fault", PASSING, ids=str)
def test_anothers_file_is_never_taken_for_ones_own(
    blobs: Blobs, place: Place, wire: Proxy, fault: Fault
) -> None:
    place.raw.put("a/x", b"others")
    wire.rule = times(2, replace(fault, done=False), "PUT")
    with pytest.raises(FileExistsError):
        blobs.create_exclusive("a/x", [b"mine"])
    assert place.raw.get("a/x") == b"others"


@pytest.mark.parametrize(
    "fault", [RESET, LOST, Fault((503, "SlowDown")), Fault((500, "InternalError")), Fault(after=20)], ids=str
)
def test_the_deadline_is_kept_and_the_doubt_told(hurried: Blobs, wire: Proxy, fault: Fault) -> None:
    wire.rule = lambda request: fault if request.method in ("PUT", "GET") else None
    started = time.monotonic()
    with pytest.raises(InDoubt):
        hurried.create_exclusive("a/x", [b"mine"])
    assert time.monotonic() - started < TIMEOUT + 1.5
    wire.rule = lambda request: None
    assert hurried.settle("a/x", b"mine")


@pytest.mark.parametrize("fault", [RESET, Fault((503, "SlowDown")), Fault(after=20)], ids=str)
def test_a_read_ends_at_its_deadline(hurried: Blobs, place: Place, wire: Proxy, fault: Fault) -> None:
    place.raw.put("a/x", b"data")
    with hurried.reader("a/x") as file:
        wire.rule = lambda request: fault
        for use in (lambda: hurried.read("a/x", 9), lambda: file.read(0, 4), lambda: hurried.files("a")):
            started = time.monotonic()
            with pytest.raises(Unavailable) as caught:
                use()
            assert time.monotonic() - started < TIMEOUT + 1.5
            assert caught.value.retryable


def test_an_operation_of_several_requests_has_one_deadline(hurried: Blobs, wire: Proxy) -> None:
    slow = Fault(answer=(500, "InternalError"), after=0.6 * TIMEOUT)
    wire.rule = lambda request: slow if request.method == "PUT" else Fault(after=20)
    started = time.monotonic()
    with pytest.raises(InDoubt):
        hurried.create_exclusive("a/x", [b"mine"])
    assert time.monotonic() - started < TIMEOUT + 1


def test_who_hurries_waits_for_nothing(blobs: Blobs, place: Place, wire: Proxy) -> None:
    """A request that another thread waits for ends; later requests have time again."""
    place.raw.put("a/x", b"data")
    wire.rule = lambda request: Fault(after=20)
    failed: list[BaseException] = []

    def wait(use: Callable[[], object]) -> None:
        try:
            use()
        except BaseException as error:
            failed.append(error)

    def upload() -> None:
        with blobs.writer("a/large") as out:
            out.write(bytes(PART + 1))
            out.commit()

    uses = [lambda: blobs.read("a/x", 9), lambda: blobs.create_exclusive("a/y", [b"mine"]), upload]
    threads = [threading.Thread(target=wait, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    started = time.monotonic()
    blobs.hurry()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 15, "the store answers after 20 s"
    assert sorted(type(error).__name__ for error in failed) == ["InDoubt", "Unavailable", "Unavailable"]
    blobs.close()
    wire.rule = times(1, Fault(after=0.5), "GET")
    assert blobs.read("a/x", 9) == b"data"


def test_a_read_goes_on_after_passing_faults(blobs: Blobs, place: Place, wire: Proxy) -> None:
    place.raw.put("a/x", b"data")
    for fault in PASSING:
        wire.rule = times(2, fault, "GET")
        assert blobs.read("a/x", 9) == b"data"
        wire.rule = times(1, fault, "HEAD")
        assert blobs.has("a/x")


def test_only_a_real_404_is_absence(hurried: Blobs, place: Place, wire: Proxy) -> None:
    for status, code, kind in [
        (403, "AccessDenied", AccessDenied),
        (403, "InvalidAccessKeyId", AccessDenied),
        (401, "", AccessDenied),
        (500, "InternalError", Unavailable),
        (404, "NoSuchBucket", Unavailable),
        (400, "BadRequest", Unavailable),
    ]:
        wire.rule = lambda request, answer=(status, code): Fault(answer)  # type: ignore[misc]
        with pytest.raises(kind, match=f"HTTP {status}"):
            hurried.read("a/none", 9)
    wire.rule = lambda request: None
    with pytest.raises(FileNotFoundError):
        hurried.read("a/none", 9)


def test_refused_before_and_after_a_doubt(blobs: Blobs, place: Place, wire: Proxy) -> None:
    """A refusal proves that nothing was created only if no unclear answer came before it."""
    denied = Fault((403, "AccessDenied"))
    wire.rule = lambda request: denied if request.method == "PUT" else None
    with pytest.raises(AccessDenied):
        blobs.create_exclusive("a/x", [b"mine"])
    answers = iter([Fault((500, "InternalError")), *[denied] * 9])
    wire.rule = lambda request: next(answers) if request.method == "PUT" else None
    with pytest.raises(InDoubt):
        blobs.create_exclusive("a/x", [b"mine"])


@pytest.mark.parametrize("fault", [PASSING[1], LOST, PASSING[-1]], ids=str)
def test_an_upload_survives_passing_faults(blobs: Blobs, place: Place, wire: Proxy, fault: Fault) -> None:
    for method, size in (("PUT", 5), ("PUT", 2 * PART + 5), ("POST", 2 * PART + 5)):
        name, data = f"a/{method}-{size}", np.random.default_rng(1).bytes(size)
        wire.rule = times(2, fault, method, name)
        with blobs.writer(name) as out:
            out.write(data)
            out.commit()
        assert place.raw.get(name) == data


def test_an_upload_that_fails_leaves_nothing(hurried: Blobs, place: Place, wire: Proxy) -> None:
    def write(size: int = 2 * PART + 5) -> None:
        with hurried.writer("a/x") as out:
            out.write(np.random.default_rng(1).bytes(size))
            out.commit()

    wire.rule = lambda request: Fault((500, "InternalError"), done=True) if request.method == "PUT" else None
    with pytest.raises(Unavailable):
        write(5)
    assert place.raw.names() == []
    wire.rule = lambda request: RESET if request.method == "PUT" else None
    with pytest.raises(Unavailable):
        write()
    wire.rule = lambda request: (
        Fault((500, "InternalError"), done=True)
        if request.method == "POST" and "uploadId" in request.query
        else Fault((500, "InternalError"))
        if request.method == "HEAD"
        else None
    )
    with pytest.raises(Unavailable):
        write()
    assert place.raw.names() == []
    assert place.raw.uploads() == []  # type: ignore[attr-defined]


def test_only_records_and_claims_are_created_under_a_condition(place: Place, wire: Proxy) -> None:
    """Nobody else uses the name of a segment."""
    layout, data = small_layout(), Data(small_layout())
    store = Store.create(place.url, storage_options=place.options)
    with open_writer(store, layout=layout) as writer:
        writer.commit(writer.state.ids, data, step=1, sealed=True)
        wire.seen.clear()
        writer.commit(np.array([1]), data, step=2)
    sent = [(request.path.split("/")[6], request.headers) for request in wire.seen if request.method == "PUT"]
    assert [(folder, "if-none-match" in headers) for folder, headers in sent] == [
        ("seg", False),
        ("log", True),
    ]
    assert len(wire.seen) == 8


def test_a_server_that_ignores_the_condition_is_refused(place: Place, wire: Proxy) -> None:
    wire.drop_headers = ("if-none-match",)
    with pytest.raises(MissingGuarantee, match="overwrote the first"):
        Store.create(place.url, storage_options=place.options)
    assert place.raw.names() == []
    store = Store.create(place.url, storage_options=place.options, assume_single_writer=True)
    layout, data = small_layout(), Data(small_layout())
    with open_writer(store, layout=layout) as writer:
        writer.commit(writer.state.ids, data, step=1, sealed=True)
    store = Store.open(place.url, storage_options=place.options)
    assert not store.blobs.exclusive
    assert read_all(store, store.state(0))[1] == {}


def test_a_server_that_knows_no_condition_is_refused(place: Place, wire: Proxy) -> None:
    wire.rule = lambda request: Fault((501, "NotImplemented")) if "if-none-match" in request.headers else None
    with pytest.raises(MissingGuarantee, match="HTTP 501"):
        Store.create(place.url, storage_options=place.options)
    Store.create(place.url, storage_options=place.options, assume_single_writer=True)
