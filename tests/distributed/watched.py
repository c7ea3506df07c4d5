"""Run a job with peers that keeps all its output: log records, errors, output of commands, arguments."""

from __future__ import annotations

import logging
import os
import re
import signal
import traceback
import warnings
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from torch import distributed as dist

import scarctl
from scarctl.arena.folder import host_folder
from scarctl.cli.main import cli
from scarctl.daemon.saver import DaemonSaver
from scarctl.errors import ScarError
from tests.distributed.hosted import status_of
from tests.distributed.jobs import build, step


class Kept(logging.Handler):
    """Keeps every record of every logger, with its traceback."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter())
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


def train(rank: int, world: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Keep copies; then the other host's daemon stops, and a checkpoint that waits for it fails.

    Return the secrets of this start, and all output as pairs of where and what.
    """
    kept = Kept()
    logging.getLogger().addHandler(kept)
    logging.getLogger().setLevel(logging.DEBUG)
    home = Path(folder, ["east", "west"][rank])
    home.mkdir(exist_ok=True)
    store = f"{folder}/store"
    model, optimizer = build("fsdp")
    shown: list[tuple[str, str]] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        session = scarctl.attach(
            model,
            optimizer,
            store=store,
            interval=2,
            settings=scarctl.Settings(
                peers=1, daemon=True, arena_dir=home, timeout=60.0 if rank else 1.0, **settings
            ),
        )
        with session:
            for number in range(1, 4):
                step(model, optimizer, number)
            dist.barrier()
            saver = session._saver
            assert isinstance(saver, DaemonSaver)
            assert saver._copied is not None
            secret, daemon = saver._copied[0]["secret"], status_of(str(home))["pid"]
            if rank:
                session.checkpoint(full=True, wait="peers")
            dist.barrier()
            shown += commands(home, store)
            if rank:
                os.kill(daemon, signal.SIGSTOP)
            dist.barrier()
            if not rank:
                try:
                    session.checkpoint(full=True, wait="peers")
                except ScarError:
                    shown.append(("an error", traceback.format_exc()))
            dist.barrier()
            if rank:
                os.kill(daemon, signal.SIGCONT)
            shown.append(("reprs", repr([session, session.settings, saver])))
        shown += [("a warning", str(one.message)) for one in warned]
    return {"secret": secret, "shown": [*shown, *(("a log", text) for text in kept.texts)]}


def commands(home: Path, store: str) -> list[tuple[str, str]]:
    """Return the output of commands on a host of a running job, and what other users see of its processes."""
    found = []
    os.environ["SCARCTL_ARENA_DIR"] = str(home)
    log = Path(host_folder(str(home)), "daemon.log").read_text()
    port = re.search(r"listens at (\S+) port (\d+)", log)
    assert port is not None
    for words in (
        ["inspect", "--store", store],
        ["status", "--store", store],
        ["doctor", "--store", store, "--rounds", "1"],
        ["doctor", "--peer", f"{port[1]}:{port[2]}"],
        ["daemon", "status"],
        ["verify", "--store", store],
    ):
        for form in ([], ["--json"], ["--debug"]):
            done = CliRunner().invoke(cli, [*words, *form])
            found.append((" ".join([*words, *form]), done.stdout + done.stderr))
    for pid in (os.getpid(), status_of(str(home))["pid"]):
        for what in ("cmdline", "environ"):
            found.append((what, Path(f"/proc/{pid}/{what}").read_bytes().decode("latin-1")))
    return found


def train_with_own_secret(rank: int, world: int, folder: str, path: str) -> None:
    """Train with another secret on each rank."""
    own = Path(folder, f"secret-{rank}")
    own.touch(0o600)
    own.write_text(Path(path).read_text() + str(rank))
    train(rank, world, folder, {"peer_secret_file": str(own)})
