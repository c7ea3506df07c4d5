"""Run a job at a steady pace, one rank per host, on which a test acts from outside while it trains."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import scarctl
from scarctl.config import grouped
from scarctl.errors import UsageError
from scarctl.state.version import step_of
from tests.distributed.hosted import die_after, lose_host, wait_for_peers
from tests.distributed.jobs import build, step, values
from tests.support.training import drained

END = "end"
"""A file in the job's folder that ends the job."""


def train(rank: int, world: int, kind: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Resume and train until the file END appears, or something ends it. Each of `homes` is a host.

    Options: `pace`, seconds per iteration; `steps`, the last iteration; `store` and its `storage_options`;
    `store_stops_at` an iteration; `evacuate` [iteration, rank, to]; `terminated_at` an iteration, after which all
    ranks get SIGTERM; `copied_at` an iteration, after which all peers have all; `all_die_at` one at which the hosts of
    ranks `lost` go with their memory, and all other ranks die as well; a file to `keep` the end in; `settings`.
    """
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("scarctl").addHandler(handler)
    home = Path(folder, options["homes"][rank])
    home.mkdir(exist_ok=True)
    model, optimizer = build(kind)
    common = {"interval": 5, "partition_bytes": 2048, "daemon": True, "arena_dir": str(home), "peers": 1}
    session = scarctl.attach(
        model,
        optimizer,
        store=options.get("store", f"{folder}/store"),
        fraction=1.0,
        **grouped(**{**common, **options.get("settings", {})}),
    )
    said: dict[str, Any] = {}
    with session:
        resumed = session.resume()
        for number in range(resumed.step + 1, options.get("steps", 10**6) + 1):
            step(model, optimizer, number)
            time.sleep(options.get("pace", 0.0))
            note(Path(folder), f"step-{rank}", number)
            if options.get("store_stops_at") == number:
                drained([session])
                session._saver.stop()
            if options.get("flush_at") == number:
                session.flush()
            if options.get("copied_at") == number:
                wait_for_peers(str(home), session.head_step)
                dist.barrier()  # a dying host keeps the copies of another one
            if "evacuate" in options and options["evacuate"][0] == number:
                dist.barrier()
                if options["evacuate"][1] == rank:
                    said = evacuate(session, options["evacuate"][2])
                    note(Path(folder), "evacuated", said)
                else:
                    session.flush()
                    wait_for_peers(str(home), session.head_step)
                dist.barrier()
            if options.get("terminated_at") == number:
                dist.barrier()
                terminate(Path(folder), rank)
            if options.get("all_die_at") == number:
                assert session._engine is not None
                note(Path(folder), f"memory-{rank}", step_of(session._engine.arena.newest()).tolist())
                dist.barrier()
                if rank in options["lost"]:
                    lose_host(home)
                die_after(home, *(Path(folder, options["homes"][one]) for one in options["lost"]))
            ended = torch.tensor([int(Path(folder, END).exists())])
            dist.all_reduce(ended, dist.ReduceOp.MAX)
            if ended:
                break
        head = session.head_step
        if rank == 0 and options.get("keep"):
            torch.save(values(model, optimizer), options["keep"])
    return {
        "step": resumed.step,
        "consistent": resumed.consistent,
        "reasons": list(resumed.reasons),
        "tiers": None if resumed.report is None else resumed.report.tiers,
        "errors": session.stats.errors,
        "head": head,
        "warned": warned,
    }


def evacuate(session: scarctl.Session, to: str | None) -> dict[str, Any]:
    """Evacuate, and return the report. Before that, check that an unknown host is refused."""
    try:
        session.evacuate(30.0, to="nowhere")
    except UsageError as error:
        refused = error.hint
    found = session.evacuate(60.0, to=to)
    return {**found.to_json(), "safe": found.safe, "known": refused}


def terminate(folder: Path, rank: int) -> None:
    """End this process by SIGTERM, and keep what is logged about it."""
    log, handler = logging.getLogger("scarctl"), logging.Handler(logging.INFO)
    handler.emit = lambda record: note(folder, f"signal-{rank}", record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: record.msg.startswith("SIGTERM"))
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)


def note(folder: Path, name: str, value: object) -> None:
    """Write a file atomically."""
    (folder / f".{name}").write_text(json.dumps(value))
    os.replace(folder / f".{name}", folder / name)
