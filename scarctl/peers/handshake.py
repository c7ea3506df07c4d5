"""Prove to each other that two daemons serve the same start of the same job: HMAC-SHA256 over both sides' nonces.

    sender   -> HELLO     start, run, epoch, its nonce
    receiver -> CHALLENGE its nonce, its proof
    sender   -> PROOF     its proof

Rank 0 draws the secret of a start. The secret travels over the job's process group and the hosts' private sockets, and
exists only in memory. Or each host has it in a file (`peers.secret`), and the store's id is the name of all starts. A
proof covers both nonces, the side that gives it, all of HELLO, and with `peers.tls` both certificates. So no proof can
be used again, or for another run. Later frames carry checksums, not proofs: like NCCL, a link without TLS trusts the
network that it runs over.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scarctl.errors import AccessDenied
from scarctl.peers.frames import hex_of, number_of, text_of
from scarctl.state.version import MAX_EPOCH

VERSION = 5
SECRET_BYTES = 32
_NONCE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Hello:
    """The greeting of a sender, or of a host that fetches."""

    start: str
    """Public name of this start of the job: 32 hex digits."""
    run: str
    """Id of the run whose arena is sent, or fetched."""
    epoch: int
    """Epoch of that arena; 1 if it is fetched."""
    nonce: str
    version: int = VERSION

    @classmethod
    def new(cls, start: str, run: str, epoch: int) -> Hello:
        """Return a greeting with a fresh nonce."""
        return cls(start, run, epoch, secrets.token_hex(_NONCE_BYTES))

    def to_json(self) -> dict[str, Any]:
        """Return the head of the greeting's frame."""
        return {
            "v": self.version,
            "start": self.start,
            "run": self.run,
            "epoch": self.epoch,
            "nonce": self.nonce,
        }

    @classmethod
    def from_json(cls, head: Mapping[str, Any]) -> Hello:
        """Return the greeting in a frame's head. Raises Corruption."""
        return cls(
            hex_of(head, "start", 32),
            text_of(head, "run", 100),
            number_of(head, "epoch", 1, MAX_EPOCH),
            hex_of(head, "nonce", 2 * _NONCE_BYTES),
            number_of(head, "v", 0, 1 << 20),
        )


def challenge(secret: bytes, hello: Hello, binding: str = "") -> dict[str, Any]:
    """Return the head of the receiver's answer. binding: see `Tls.binding`."""
    nonce = secrets.token_hex(_NONCE_BYTES)
    return {"nonce": nonce, "proof": _proof(secret, "receiver", hello, nonce, binding)}


def answer(secret: bytes, hello: Hello, head: Mapping[str, Any], binding: str = "") -> dict[str, Any]:
    """Return the head of the sender's proof. head: that of the receiver's challenge.

    Raises AccessDenied if the receiver does not have the secret, Corruption.
    """
    nonce = hex_of(head, "nonce", 2 * _NONCE_BYTES)
    _compare(_proof(secret, "receiver", hello, nonce, binding), head)
    return {"proof": _proof(secret, "sender", hello, nonce, binding)}


def verify(secret: bytes, hello: Hello, nonce: str, head: Mapping[str, Any], binding: str = "") -> None:
    """Check the sender's proof. nonce: the receiver's. Raises AccessDenied if the proof is wrong, Corruption."""
    _compare(_proof(secret, "sender", hello, nonce, binding), head)


def _compare(expected: str, head: Mapping[str, Any]) -> None:
    if not hmac.compare_digest(expected, hex_of(head, "proof", 64)):
        raise AccessDenied(
            "a peer does not have this job's secret",
            hint="peer_secret_file must be the same on all hosts; or it belongs to another job, or is an intruder",
        )


def _proof(secret: bytes, who: str, hello: Hello, nonce: str, binding: str) -> str:
    text = json.dumps(["scarctl-peers", who, hello.to_json(), nonce, binding], sort_keys=True).encode()
    return hmac.new(secret, text, hashlib.sha256).hexdigest()
