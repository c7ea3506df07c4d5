"""Test that both sides prove that they have the secret of the same start, and no proof works twice."""

from __future__ import annotations

import dataclasses
import json
import secrets
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.errors import AccessDenied, Corruption
from scarctl.peers.frames import MAX_STRANGER
from scarctl.peers.handshake import SECRET_BYTES, Hello, answer, challenge, verify

SECRET = secrets.token_bytes(SECRET_BYTES)
START = "ab" * 16


def hello() -> Hello:
    return Hello.new(START, "cd" * 16 + "-3", 4)


def test_both_sides_agree() -> None:
    greeting = hello()
    received = Hello.from_json(greeting.to_json())
    asked = challenge(SECRET, received)
    verify(SECRET, received, asked["nonce"], answer(SECRET, greeting, asked))


def test_a_sender_without_the_secret_is_refused() -> None:
    greeting, other = hello(), secrets.token_bytes(SECRET_BYTES)
    asked = challenge(SECRET, greeting)
    forged = answer(other, greeting, challenge(other, greeting) | {})
    with pytest.raises(AccessDenied):
        verify(SECRET, greeting, asked["nonce"], forged)


def test_a_receiver_without_the_secret_is_refused() -> None:
    greeting = hello()
    with pytest.raises(AccessDenied):
        answer(SECRET, greeting, challenge(secrets.token_bytes(SECRET_BYTES), greeting))


def test_a_proof_is_good_for_one_conversation_in_one_direction() -> None:
    greeting = hello()
    asked = challenge(SECRET, greeting)
    given_once = answer(SECRET, greeting, asked)
    with pytest.raises(AccessDenied):  # replayed to another challenge
        verify(SECRET, greeting, challenge(SECRET, greeting)["nonce"], given_once)
    with pytest.raises(AccessDenied):  # reflected: the receiver's own proof
        verify(SECRET, greeting, asked["nonce"], {"proof": asked["proof"]})
    for change in ({"run": "ef" * 16}, {"epoch": 5}, {"start": "00" * 16}):
        other = dataclasses.replace(greeting, **change)
        with pytest.raises(AccessDenied):
            verify(SECRET, other, asked["nonce"], given_once)


def test_what_strangers_exchange_is_small() -> None:
    greeting = Hello.new(START, "x" * 100, 1 << 20)
    for head in (greeting.to_json(), challenge(SECRET, greeting)):
        assert len(json.dumps(head)) < MAX_STRANGER


@given(
    st.dictionaries(
        st.sampled_from(["v", "start", "run", "epoch", "nonce", "proof"]),
        st.one_of(st.integers(), st.text(max_size=70), st.none(), st.lists(st.text(max_size=3), max_size=2)),
    )
)
def test_any_head_is_read_or_refused(head: dict[str, Any]) -> None:
    with pytest.raises((Corruption, AccessDenied)):
        answer(SECRET, hello(), head)
    with pytest.raises((Corruption, AccessDenied)):
        verify(SECRET, hello(), "00" * 32, head)
    with pytest.raises(Corruption):
        Hello.from_json({**head, "nonce": "not hex"})
