"""Run a job whose ranks are on hosts of their own, each with a daemon, and keep copies of each other's memory."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import scarctl
from scarctl.arena.folder import host_folder
from scarctl.config import grouped
from scarctl.daemon.client import ask_status
from scarctl.errors import ScarError
from scarctl.state.version import step_of
from scarctl.store import Store
from scarctl.store.hosts import read_hosts
from tests.distributed.jobs import build, step, values
from tests.support.training import drained
from tests.support.waiting import wait_until

END = "end"
"""A file in the job's folder that ends the job."""


def train(
    rank: int, world: int, kind: str, folder: str, steps: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Resume and train up to iteration `steps`, or until the file END appears. Each of `homes` is a host.

    Options: `pace`, seconds per iteration; `store`; `store_stops_at` an iteration; `flush_at` one; `copied_at` one,
    after which it waits until its peers have all, with `recorded` for the records of all hosts; `wait_at` one, after
    which its checkpoint waits for the peers; `peers_stop_at` one, from which on nothing is sent; `dies_at` one, at
    which the hosts of the ranks `lost` go, each with its daemon, its memory and its rank, or `all_die_at` one, at which
    all other ranks die as well; a file to `keep` the end in; `fraction`; arguments of `attach` (`settings`).
    """
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("scarctl").addHandler(handler)
    homes = [Path(folder, home) for home in options["homes"]]
    home, lost = homes[rank], options.get("lost", [])
    home.mkdir(exist_ok=True)
    model, optimizer = build(kind)
    said: list[str] = []
    common = {"interval": 5, "partition_bytes": 2048, "daemon": True, "arena_dir": str(home), "peers": 1}
    session = scarctl.attach(
        model,
        optimizer,
        store=options.get("store", f"{folder}/store"),
        fraction=options.get("fraction", 0.25),
        **grouped(**{**common, **options.get("settings", {})}),
    )
    with session:
        resumed = session.resume()
        for number in range(resumed.step + 1, steps + 1):
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
                if options.get("recorded"):
                    wait_until(lambda: len(read_hosts(Store.open(f"{folder}/store"))) == world)
                dist.barrier()  # a dying host keeps the copies of another one
            if options.get("wait_at") == number:
                said = wait_for_checkpoint(session)
                dist.barrier()  # a dying host keeps the copies of another one
            if options.get("peers_stop_at") == number:
                # With an empty list of peers the copies no longer change.
                session._saver.follow("here", [], 1, None)
            if options.get("dies_at") == number and rank in lost:
                lose_host(home)
            if options.get("all_die_at") == number:
                assert session._engine is not None
                note(Path(folder), f"memory-{rank}", step_of(session._engine.arena.newest()).tolist())
                dist.barrier()
                if rank in lost:
                    lose_host(home)
                die_after(home, *(homes[one] for one in lost))
            ended = torch.tensor([int(Path(folder, END).exists())])
            dist.all_reduce(ended, dist.ReduceOp.MAX)
            if ended:
                break
        end = values(model, optimizer)
        if rank == 0 and options.get("keep"):
            torch.save(end, options["keep"])
        peers = status_of(str(home))["runs"][0]["peers"]
    return {
        "step": resumed.step,
        "consistent": resumed.consistent,
        "whole": resumed.label.of_one,
        "steps": None if resumed.ranks is None else resumed.ranks["steps"],
        "tiers": None if resumed.report is None else resumed.report.tiers,
        "errors": session.stats.errors,
        "peers": peers,
        "warned": warned,
        "said": said,
    }


def note(folder: Path, name: str, value: object) -> None:
    """Write a file atomically."""
    (folder / f".{name}").write_text(json.dumps(value))
    os.replace(folder / f".{name}", folder / name)


def status_of(arena_dir: str) -> dict[str, Any]:
    """Return the status of a host's daemon."""
    found = ask_status(host_folder(arena_dir), patience=30.0)
    assert found is not None
    return dict(found)


def wait_for_peers(arena_dir: str, step: int) -> None:
    """Wait until all copies of all runs of this host are complete and have its newest step."""
    deadline = time.monotonic() + 100
    while True:
        found = ask_status(host_folder(arena_dir), patience=30.0)
        runs = found["runs"] if found is not None else []  # its daemon may be about to be replaced
        peers = [peer for run in runs for peer in run["peers"]]
        if (
            peers
            and all(run["head_step"] == step for run in runs)
            and all(p.endswith("up to date") for p in peers)
        ):
            return
        assert time.monotonic() < deadline, (step, runs)
        time.sleep(0.05)


def wait_for_checkpoint(session: scarctl.Session) -> list[str]:
    """Save the whole state, and wait for the peers. Return kind and text of the error if they are late."""
    try:
        session.checkpoint(full=True, wait="peers")
    except ScarError as error:
        return [error.kind, str(error)]
    return []


def die_after(own: Path, *homes: Path) -> None:
    """Die once these hosts have lost their memory; at once on one of them. `launch` ends all ranks soon after that."""
    if own not in homes:
        wait_until(lambda: all(_mark(home).exists() for home in homes))
    os.kill(os.getpid(), signal.SIGKILL)


def lose_host(home: Path) -> None:
    """Simulate a power failure of the host: its daemon, its memory, and this rank are lost."""
    os.kill(status_of(str(home))["pid"], signal.SIGKILL)
    shutil.rmtree(home)
    _mark(home).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def _mark(home: Path) -> Path:
    return home.with_name(f"{home.name}.lost")
