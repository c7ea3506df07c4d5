"""Test requests of commands to a running session: what they may contain, and their way through the daemon."""

from __future__ import annotations

import os
import socket

import pytest

from scarctl.daemon import client
from scarctl.daemon.request import MAX_LOST, MAX_SECONDS, Request
from scarctl.daemon.server import Daemon
from scarctl.errors import UsageError
from tests.daemon.trainer import Trainer
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    "sent",
    [
        Request("partial"),
        Request("full", 7),
        Request("recover", 3, ("embed", "rank:1"), max_rework=2.5),
        Request("flush", seconds=25.0),
        Request("recover", 1, ("x",) * MAX_LOST),
    ],
)
def test_a_request_arrives_as_it_was_sent(sent: Request) -> None:
    assert Request.from_json(sent.to_json()) == sent


@pytest.mark.parametrize(
    "obj",
    [
        None,
        {},
        {"kind": "x"},
        {"kind": "full", "number": 1.0},
        {"kind": "full", "number": True},
        {"kind": "recover"},
        {"kind": "recover", "lost": [1]},
        {"kind": "recover", "lost": "embed"},
        {"kind": "recover", "lost": ["x"] * (MAX_LOST + 1)},
        {"kind": "full", "lost": ["embed"]},
        {"kind": "recover", "lost": ["x"], "max_rework": -1},
        {"kind": "recover", "lost": ["x"], "max_rework": True},
        {"kind": "flush", "seconds": -1},
        {"kind": "flush", "seconds": float("nan")},
        {"kind": "flush", "seconds": MAX_SECONDS + 1},
        {"kind": "flush", "seconds": "25"},
    ],
    ids=str,
)
def test_what_is_no_request_is_refused(obj: object) -> None:
    with pytest.raises(UsageError):
        Request.from_json(obj)


def test_one_for_no_session_or_with_a_wrong_token_is_refused(connection: socket.socket) -> None:
    request = Request("full").to_json()
    for token, kind in (("a" * 32, "no-session"), (1, "usage"), ("x" * 32, "usage"), ("a" * 31, "usage")):
        with pytest.raises(UsageError) as caught:
            client.request(connection, "ask", store="x", request=request, token=token)
        assert caught.value.kind == kind


def test_one_for_a_checkpoint_reaches_the_session(daemon: Daemon, trainer: Trainer) -> None:
    for kind in ("full", "partial"):
        told = client.ask(daemon.folder, "ask", store=trainer.store.run_id, request={"kind": kind})
        assert told["pid"] == os.getpid()
    wait_until(lambda: trainer.requests == ["full", "partial"])
    trainer.close()
    with pytest.raises(UsageError) as caught:
        client.ask(daemon.folder, "ask", store=trainer.store.run_id, request={"kind": "full"})
    assert caught.value.kind == "no-session"


def test_one_that_is_repeated_reaches_the_session_once(daemon: Daemon, trainer: Trainer) -> None:
    """Its answer was late, and the command has asked again."""
    for kind, token, number in (("full", "a", 1), ("full", "b", 2), ("full", "a", 1), ("partial", "c", 3)):
        asked = {"store": trainer.store.run_id, "request": {"kind": kind}, "token": 32 * token}
        assert client.ask(daemon.folder, "ask", **asked)["number"] == number
    wait_until(lambda: trainer.requests[-1:] == ["partial"])
    assert trainer.requests == ["full", "full", "partial"]
    trainer.close()
