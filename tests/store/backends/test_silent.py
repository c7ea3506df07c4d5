"""Test a service that does not answer from the start, as with a wrong endpoint: a warning comes long before the end."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest

from scarctl.errors import ScarError
from scarctl.store import Store
from scarctl.store.backends import client
from scarctl.store.backends.address import Address
from scarctl.store.backends.connect import blobs_at
from tests.support.places import Place

SECONDS = 1.5
OPTIONS = {"key": "x", "secret": "not to be shown", "scarctl_timeout": SECONDS}


@pytest.fixture
def deaf() -> Iterator[str]:
    """Yield the address of a port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def closed() -> str:
    """Return an address that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_SILENT", 0.3)


@pytest.mark.parametrize("service", ["deaf", "closed"])
def test_it_is_said_once_with_the_time_that_is_left(
    service: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**OPTIONS, "endpoint_url": request.getfixturevalue(service)}
    with pytest.raises(ScarError):
        Store.open("s3://bucket/run", storage_options=options)
    (said,) = [text for text in caplog.messages if "has not answered" in text]
    assert re.match(r"s3://bucket/run: the service has not answered for [01] s", said)
    assert "Waiting for another 1 s at most" in said
    assert "endpoint_url" in said
    assert "not to be shown" not in said


def test_a_service_that_has_answered_is_not_reported(
    s3_place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A later request may take long. One that fails has warnings of its own."""
    monkeypatch.setattr(client, "_SILENT", 60.0)
    blobs = blobs_at(Address.parse(s3_place.url, s3_place.options))
    assert not blobs.has("a/x")
    monkeypatch.setattr(client, "_SILENT", 0.0)
    assert not blobs.has("a/y")
    assert caplog.messages == []
