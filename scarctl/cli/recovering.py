"""`scarctl recover --live`: a running session is asked to restore a part of its state in place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from scarctl.daemon.client import ask
from scarctl.daemon.folder import host_folder
from scarctl.daemon.protocol import error_from
from scarctl.errors import Unavailable, UsageError
from scarctl.store import Store, newest_topology
from scarctl.wishes import Wish

_POLL = 0.1


def recover_live(
    store: Store,
    lost: Sequence[str],
    *,
    max_rework: float | None = None,
    wait: float,
    arena_dir: str | None,
) -> dict[str, Any]:
    """Ask a session of this host, one of any rank, and wait for its answer: its step and report.

    All ranks recover after the same step; what is answered is the report of the rank that was asked.

    Raises UsageError (`kind` "no-session"); Unavailable when there is no answer after `wait` seconds; what the session
    could not do.
    """
    topology, folder = newest_topology(store), host_folder(arena_dir)
    runs = [store.run_id] if topology is None else [store.of_shard(s).run_id for s in topology.shards]
    wish, deadline = Wish("recover", lost=tuple(lost), max_rework=max_rework), time.monotonic() + wait
    for run in runs:
        try:
            told = ask(folder, "ask", store=run, wish=wish.to_json())
        except UsageError as error:
            if error.kind != "no-session" or run == runs[-1]:
                raise
            continue
        except Unavailable as error:
            if error.kind != "no-daemon":
                raise
            raise UsageError(
                "no running session saves to this store through this host's daemon",
                hint="without --live what was lost goes into a stopped run's arena, or into a file",
                kind="no-session",
            ) from None
        while (answer := ask(folder, "answered", store=run, number=told["number"])["answer"]) is None:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"process {told['pid']} was asked, but has not answered after {wait:g} s",
                    hint="it does so after its next step, with several ranks after one of the next checkpoints",
                )
            time.sleep(_POLL)
        if "error" in answer:
            raise error_from(answer["error"])
        return {**answer, "pid": told["pid"]}
    raise AssertionError("unreachable")
