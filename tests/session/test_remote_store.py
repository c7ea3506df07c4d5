"""Test training with an S3 store, through the daemon and without it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scarctl
from scarctl.arena.folder import host_folder
from scarctl.config import grouped
from scarctl.daemon.client import ask
from scarctl.errors import UsageError
from scarctl.store import Store, verify
from tests.support.places import KEY, SECRET, Place
from tests.support.proxy import Fault, Proxy

pytestmark = pytest.mark.slow


def model() -> dict[str, np.ndarray]:
    return {"users": np.zeros((50, 4)), "items": np.ones((20, 4))}


def train(state: dict[str, np.ndarray], place: Place, stop: int, **settings: Any) -> scarctl.Session:
    session = scarctl.attach(state, store=place.url, interval=2, **grouped(**settings))
    for _ in range(session.resume().step, stop):
        state["users"] += 0.5
        state["items"][3] += 1
        session.step()
    return session


def test_a_run_goes_on_where_it_ended(s3_place: Place, both_savers: str) -> None:
    state = model()
    train(state, s3_place, 7, shards=2, storage_options=s3_place.options).close()
    again = model()
    session = train(again, s3_place, 7, storage_options=s3_place.options)
    assert session.head_step == 7
    assert all((again[name] == state[name]).all() for name in state)
    session.close()
    store = Store.open(s3_place.url, storage_options=s3_place.options)
    assert verify(store, read_data=True).problems == []


def test_the_daemon_gets_what_opens_the_store_and_keeps_it_in_memory(
    s3_place: Place, both_savers: str, arena_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The daemon gets them from the session's environment, not from its own: not by a command line, a log or a disk."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_place.options["endpoint_url"])
    session = train(model(), s3_place, 5, storage_options={"token": "planted-token"})
    session.checkpoint(full=True, wait=True)
    if both_savers == "daemon":
        status = ask(host_folder(str(arena_dir)), "status")
        assert status["runs"][0]["store"] == s3_place.url
        pid = status["pid"]
        for name in ("cmdline", "environ"):
            content = Path(f"/proc/{pid}/{name}").read_bytes()
            assert not [s for s in (KEY, SECRET, "planted-token") if s.encode() in content]
    session.close()
    for file in arena_dir.rglob("*"):
        if file.is_file():
            assert not [s for s in (SECRET, "planted-token") if s.encode() in file.read_bytes()], file
    for text in (caplog.text, repr(session.settings), repr(session.stats)):
        assert SECRET not in text
        assert "planted-token" not in text


@pytest.mark.long
def test_closing_waits_no_longer_than_it_may(s3_place: Place, wire: Proxy) -> None:
    """Closing takes at most one request longer; copies that were not durable are there for the next session."""
    options = {**s3_place.options, "endpoint_url": wire.url, "scarctl_timeout": 60}
    state = model()
    session = train(state, s3_place, 4, shards=4, storage_options=options, daemon=False, timeout=0.5)
    wire.rule = lambda request: Fault(after=30)
    for _ in range(3):
        state["users"] += 0.5
        session.step()
        session.checkpoint(full=True)
    started = time.monotonic()
    session.close()
    assert time.monotonic() - started < 25, "the store answers after 30 s"
    wire.rule = lambda request: None
    again = model()
    session = train(again, s3_place, 7, storage_options=options, daemon=False)
    assert (again["users"] == state["users"]).all()
    session.close()
    assert verify(Store.open(s3_place.url, storage_options=options), read_data=True).problems == []


@pytest.mark.long
def test_another_daemon_goes_on_with_what_the_session_keeps(
    s3_place: Place, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCARCTL_DAEMON", "1")
    state = model()
    session = train(state, s3_place, 3, storage_options=s3_place.options)
    first = ask(host_folder(str(arena_dir)), "status")["pid"]
    os.kill(first, signal.SIGKILL)
    state["users"] += 1
    session.step()
    session.checkpoint(full=True, wait=True)
    assert ask(host_folder(str(arena_dir)), "status")["pid"] != first
    session.close()
    store = Store.open(s3_place.url, storage_options=s3_place.options)
    assert store.state(0).step == 4
    assert verify(store, read_data=True).problems == []


def test_options_that_cannot_be_sent_are_refused_without_repeating_them(
    s3_place: Place, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCARCTL_DAEMON", "1")
    options = {**s3_place.options, "s3_additional_kwargs": {"odd": object()}}
    with pytest.raises(UsageError, match="cannot be sent") as caught:
        scarctl.attach(model(), store=s3_place.url, settings=scarctl.Settings(storage_options=options))
    assert SECRET not in str(caught.value)


def test_an_option_that_does_not_exist_is_named(s3_place: Place) -> None:
    options = {**s3_place.options, "sekret": SECRET}
    with pytest.raises(UsageError, match="s3:// has no storage option 'sekret'") as caught:
        scarctl.attach(model(), store=s3_place.url, settings=scarctl.Settings(storage_options=options))
    assert SECRET not in str(caught.value)


def test_a_store_in_memory_is_saved_by_the_process_itself(usual_saver: None) -> None:
    state = model()
    place = Place(f"memory://{os.getpid()}/run", None)  # type: ignore[arg-type]
    train(state, place, 3).close()
    again = model()
    train(again, place, 3).close()
    assert (again["users"] == state["users"]).all()
