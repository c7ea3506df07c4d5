"""Provide frames of a link as a replica gets them, without a network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from scarctl.peers.frames import PREFIX, Kind, decode_batch, decode_head, decode_mark, decode_prefix
from scarctl.peers.replica import Replica


def joined(frame: Iterable[Any]) -> bytes:
    """Return a frame as one piece."""
    return b"".join(memoryview(part).tobytes() for part in frame)


def parse(data: bytes) -> tuple[Kind, dict[str, Any], Any]:
    """Return kind, head and body of a frame that has arrived. Raises Corruption."""
    prefix = decode_prefix(data[: PREFIX.size])
    body = np.frombuffer(data, np.uint8)[PREFIX.size + prefix.head :]
    return prefix.kind, decode_head(prefix, data[PREFIX.size :][: prefix.head], body), body


def deliver(replica: Replica, frame: list[Any]) -> Kind:
    """Process a channel's frame as a host does."""
    kind, head, body = parse(joined(frame))
    if kind is Kind.MARK:
        replica.mark(decode_mark(head, body))
    elif kind is Kind.EXTRAS:
        replica.keep(body.tobytes())
    else:
        partitions = replica.arena.layout.partitions
        replica.apply(decode_batch(head, body, partitions), rows=kind is Kind.BATCH)
    return kind
