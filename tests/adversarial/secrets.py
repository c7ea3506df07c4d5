"""Secrets in addresses, options, settings and the environment: they show nowhere, whatever fails.

    python -m tests.adversarial.secrets [--cases 1]

An S3 server of our own, a proxy before it that fails as asked and repeats in its errors what it was sent; every command
in three forms, and sessions that save from a thread and from the daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner
from safetensors.numpy import save_file

import scarctl
from scarctl.arena.folder import host_folder
from scarctl.cli.main import cli
from scarctl.config import grouped
from scarctl.daemon import client
from scarctl.errors import ScarError
from scarctl.store import doctor
from scarctl.store.backends.probe import race
from scarctl.store.doctor import diagnose
from tests.daemon.trainer import stop
from tests.support.places import Bucket, s3_client, s3_server
from tests.support.proxy import Fault, Proxy, proxy

SECRET = re.compile(r"planted", re.IGNORECASE)
"""Every secret contains this text, and nothing else does."""
FORMS = ([], ["--json"], ["--debug"])
QUICK_WITHOUT = ("snapshot", "live", "inspect", "export", "prune")
"""Commands that the quick form runs elsewhere, or that open, read and report as others do."""


@dataclass
class World:
    """A bucket behind a proxy, a working folder with settings, and all output so far."""

    folder: Path
    wire: Proxy
    bucket: Bucket
    shown: list[tuple[str, str]] = field(default_factory=list)
    """`(where, text)` of all output."""
    commands: int = 0
    failed: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"s3://planted-user:planted-password@{self.place}"

    @property
    def place(self) -> str:
        return f"{self.bucket.bucket}/team/run"

    def settings(self, *more: str, endpoint: str | None = None) -> None:
        """Write `scarctl.toml`: storage options with secrets, plain and nested."""
        lines = [
            "[storage_options]",
            'token = "planted-token"',
            "scarctl_timeout = 5",
            f'endpoint_url = "{endpoint or self.wire.url}"',
            'config_kwargs = {user_agent_extra = "planted/nested"}',
        ]
        given = {line.partition(" =")[0] for line in more}
        kept = [line for line in lines if line.partition(" =")[0] not in given]
        (self.folder / "scarctl.toml").write_text("\n".join([*kept, *more, ""]))

    def options(self, **more: Any) -> dict[str, Any]:
        options = {
            "token": "planted-token",
            "scarctl_timeout": 5,
            "endpoint_url": self.wire.url,
            "config_kwargs": {"user_agent_extra": "planted/nested"},
        }
        return {**options, **more}

    def run(self, *arguments: object, forms: tuple[list[str], ...] = FORMS, good: bool = False) -> None:
        """Run a command in its three forms. `good`: it has to succeed."""
        for more in forms:
            words = [str(argument) for argument in arguments]
            at = words.index("--") if "--" in words else len(words)
            words[at:at] = more
            done = CliRunner().invoke(cli, words)
            self.commands += 1
            name = f"{words[0]} {' '.join(more)} (exit code {done.exit_code})"
            self.shown.append((f"output of {name}", done.stdout + done.stderr))
            if good and done.exit_code:
                self.failed.append(f"{name}: {done.output[-300:]}")

    def all_commands(
        self, url: str, *, good: bool = False, forms: tuple[list[str], ...] = FORMS, quick: bool = False
    ) -> None:
        """Run every command. quick: each in one way, without `QUICK_WITHOUT`."""
        state, out = self.folder / "state.safetensors", self.folder / "out.safetensors"
        commands: list[list[object]] = [
            ["snapshot", "create", f"s{uuid.uuid4().hex}", state, "--step", 0],
            ["checkpoint", state, "--step", 1],
            ["live", "checkpoint"],
            ["inspect"],
            ["verify"],
            ["doctor", "--rounds", 1],
            ["recover", "--lost", "all", "--output", out],
            ["recover", "--lost", "all", "--into", state],
            ["recover", "--lost", "all", "--mode", "rollback", "--output", out],
            ["export", self.folder / f"{uuid.uuid4().hex}.safetensors"],
            ["prune", "--dry-run"],
            ["run", "--timeout", 1, "--", sys.executable, "-c", "pass"],
        ]
        for arguments in commands:
            if quick and (arguments[0] in QUICK_WITHOUT or {"--into", "--mode"} & set(map(str, arguments))):
                continue
            at = arguments.index("--") if "--" in arguments else len(arguments)
            whole = [*arguments[:at], "--store", url, *arguments[at:]]
            fails = arguments[:2] == ["live", "checkpoint"] or arguments[:2] == ["snapshot", "create"]
            some = tuple(form for form in forms if arguments[0] != "run" or "--json" not in form)
            self.run(*whole, good=good and not fails, forms=some)
        for action in ("status", "start", "stop"):
            self.run("daemon", action, forms=forms)

    def files(self, folder: Path) -> None:
        """Return the content of all files except the settings."""
        for path in folder.rglob("*"):
            if path.is_file() and path.name != "scarctl.toml":
                with contextlib.suppress(FileNotFoundError):
                    self.shown.append((str(path), path.read_bytes().decode("latin-1")))

    def stored(self) -> None:
        """Return every object in the bucket."""
        for name in self.bucket.names():
            self.shown.append((f"object {name}", self.bucket.get(name).decode("latin-1")))

    def leaks(self) -> list[str]:
        return [
            f"{where}: ...{text[max(0, found.start() - 200) : found.end() + 40]!a}"
            for where, text in self.shown
            if (found := SECRET.search(text))
        ]


@contextlib.contextmanager
def world() -> Iterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="scarctl-hidden-"))
    before, here = dict(os.environ), os.getcwd()
    for name in [name for name in os.environ if name.startswith(("AWS_", "SCARCTL_"))]:
        del os.environ[name]
    os.environ.update(
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        AWS_EC2_METADATA_DISABLED="true",
        AWS_SECRET_ACCESS_KEY="planted-environment",
        AWS_SESSION_TOKEN="planted-session",
        SCARCTL_ARENA_DIR=str(folder / "arenas"),
    )
    (folder / "arenas").mkdir()
    os.chdir(folder)
    save_file({"w": np.arange(500, dtype=np.float32), "b": np.ones(9)}, folder / "state.safetensors")
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    logger = logging.getLogger("scarctl")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with s3_server() as endpoint, proxy(endpoint) as wire:
            store = s3_client(endpoint)
            bucket = Bucket(store, f"bucket-{uuid.uuid4().hex}", "team/run")
            store.create_bucket(Bucket=bucket.bucket)
            made = World(folder, wire, bucket)
            made.settings()
            yield made
            made.shown.append(("the library's log", text.getvalue()))
    finally:
        stop(host_folder(str(folder / "arenas")))
        logger.removeHandler(handler)
        logger.setLevel(level)
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder)


def commands(on: World, *, quick: bool) -> None:
    """Run every command on a working store, and on everything that does not work."""
    forms = FORMS[2:] if quick else FORMS
    on.all_commands(on.url, good=True, forms=forms, quick=quick)
    on.stored()
    on.settings("scarctl_timeout = 1")
    rules = {
        "403 with what was sent": lambda request: Fault((403, "planted-query")),
        "500 with what was sent": lambda request: Fault((500, "planted-query")),
        "400 without a code": lambda request: Fault((400, "")),
        "no answer": lambda request: Fault(),
    }
    for rule in rules.values():
        on.wire.rule = rule
        if quick:
            on.run("inspect", "--store", on.url, forms=forms)
        else:
            on.all_commands(on.url, forms=FORMS[2:])
    on.wire.rule = lambda request: None
    on.settings("scarctl_timeout = 1", endpoint="http://127.0.0.1:1")
    if quick:
        on.run("verify", "--store", on.url, forms=forms)
    else:
        on.all_commands(on.url, forms=FORMS[2:])
    on.settings()
    on.run("checkpoint", "state.safetensors", "--step", 3, "--store", on.url.replace("bucket-", "missing-"))
    for line in (
        'profile = "planted-profile"',
        'planted-option = "planted-value"',
        'endpoint_url = "planted: no address"',
        'endpoint_url = "http://planted-user:planted-password@127.0.0.1:1/?sig=planted-query"',
        'client_kwargs = "planted-text"',
        'client_kwargs = {planted = "planted-nested"}',
        'client_kwargs = {config = "planted-nested"}',
        'client_kwargs = {region_name = "planted region"}',
        'config_kwargs = "planted-text"',
        'config_kwargs = {planted = "planted-nested"}',
        'config_kwargs = {proxies = {http = "http://planted-user:planted-password@127.0.0.1:1"}}',
        'scarctl_timeout = "planted-seconds"',
        'key = {planted = "planted-nested"}',
        'secret = ["planted-nested"]',
        "token = 5",
        'anon = "planted"',
        'use_ssl = "planted"',
        'session = "planted"',
        's3_additional_kwargs = {ACL = "planted"}',
    )[:: 4 if quick else 1]:
        on.settings("scarctl_timeout = 1", line)
        on.run("inspect", "--store", on.url, forms=forms)
        if not quick:
            on.run("checkpoint", "state.safetensors", "--step", 9, "--store", on.url, forms=forms)
            on.run("run", "--store", on.url, "--timeout", 1, "--", sys.executable, "-c", "pass", forms=([],))
    on.settings()
    for url in (
        f"{on.url}?sig=planted-query",
        f"{on.url}#planted-query",
        f"s3://planted-user:x@/{on.place}",
        f"s3://planted-user:with/planted-password@{on.place}",
        f"s3://planted-user:1/planted-password@{on.place}",
        f"s3:/planted-user:planted-password@{on.place}",
        f"s3:planted-user:planted-password@{on.place}",
        f"s3//planted-user:planted-password@{on.place}",
        f"S3A://planted-user:planted-password@{on.place}",
        "sftp://planted-user:planted-password@127.0.0.1:1/x",
        "ftp://planted-user:planted-password@127.0.0.1:1/x",
        "http://planted-user:planted-password@127.0.0.1:1/x",
        "http://planted-user:planted-password@127.0.0.1:port/x",
        "http://planted-user:planted-password@[::1/x",
        "unknown://planted-user:planted-password@host/x",
        "file://planted-user:planted-password@host/x",
        "github://planted-user:planted-password@host/x",
        "memory://planted-user:planted-password@host/x/..",
        "\x1b://planted-user:planted-password@host/x",
    )[:: 4 if quick else 1]:
        on.run("inspect", "--store", url, forms=forms)
        on.run("run", "--store", url, "--", sys.executable, "-c", "pass", forms=([],))
        if not quick:
            on.run("checkpoint", "state.safetensors", "--step", 9, "--store", url, forms=forms)
            on.run("doctor", "--store", url, "--rounds", 1, forms=forms)
    for line in (
        'store = ["s3://planted-user:planted-password@b/x"]',
        "storage_options = 'planted'",
        "storage_options = ['planted']",
        "[storage_options]\ntoken = 'planted",
        "[storage_options]\ntoken = planted-token",
        "[storage_options]\ntoken = 'planted-token'\ntoken = 'planted-token'",
    ):
        (on.folder / "scarctl.toml").write_text(line)
        on.run("inspect", forms=FORMS[2:] if quick else FORMS)
    on.settings()


def session(on: World, *, daemon: bool, quick: bool) -> None:
    """Run a session whose store fails and then works again, and sessions that cannot begin."""
    where = "daemon" if daemon else "thread"
    state = {"users": np.zeros((50, 4)), "items": np.ones((20, 4))}
    url = f"{on.url}-{where}"
    folder = host_folder(os.environ["SCARCTL_ARENA_DIR"])
    options = on.options(**({"scarctl_timeout": 1} if quick else {}))  # each failing call takes so long
    given: dict[str, Any] = {"store": url, "interval": 1, "daemon": daemon, "timeout": 2}
    streams = io.StringIO()
    with contextlib.redirect_stderr(streams), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for more in (
            {"client_kwargs": "planted-text"},
            {"odd": object(), "token": "planted-token"},
            {"profile": "planted-profile"},
            {"scarctl_timeout": "planted-seconds"},
        ):
            _told(
                on,
                where,
                lambda more=more: scarctl.attach(
                    state, **grouped(storage_options=on.options(**more), **given)
                ),
            )  # type: ignore[misc]
        # Tracebacks quote this file, so no line of a call contains a secret.
        no_dict, query = ["planted"], f"{url}?sig=planted-query"
        _told(on, where, lambda: scarctl.attach(state, **grouped(storage_options=no_dict, **given)))
        _told(on, where, lambda: scarctl.attach(state, **grouped(**{**given, "store": query})))
        running = scarctl.attach(state, **grouped(storage_options=options, on_error="warn", **given))
        running.resume()
        for rule in (
            lambda request: Fault((403, "planted-query")),
            lambda request: None,
            lambda request: Fault((500, "planted-query")),
            lambda request: Fault(),
            lambda request: None,
        )[:: 4 if quick else 1]:
            on.wire.rule = rule
            for _ in range(2):
                state["users"] += 1
                _told(on, where, running.step)
            time.sleep(0.5)
            _told(on, where, lambda: running.checkpoint(full=True, wait=True))
            if daemon:
                answer = client.ask(folder, "status")
                on.shown.append(("the daemon's status", repr(answer)))
                process = Path(f"/proc/{answer['pid']}")
                for name in ("cmdline", "environ"):
                    on.shown.append((f"the daemon's {name}", (process / name).read_bytes().decode("latin-1")))
                on.run("daemon", "status", forms=FORMS[2:] if quick else FORMS)
            on.run("inspect", "--store", url, forms=FORMS[2:] if quick else FORMS)
            on.run("live", "checkpoint", "--store", url, "--timeout", 1, forms=FORMS[2:] if quick else FORMS)
            on.files(folder)
        on.shown.append((f"settings of a session, {where}", repr(running.settings) + repr(running)))
        on.shown.append((f"figures of a session, {where}", repr(running.stats)))
        _told(on, where, running.close)
        on.wire.rule = lambda request: None
        raising = scarctl.attach(state, **grouped(storage_options=options, on_error="raise", **given))
        raising.resume()
        on.wire.rule = lambda request: Fault((403, "planted-query"))
        for _ in range(3):
            state["users"] += 1
            _told(on, where, raising.step)
            _told(on, where, lambda: raising.checkpoint(full=True, wait=True))
        on.files(folder)
        _told(on, where, raising.close)
        on.wire.rule = lambda request: None
    on.shown.append((f"stderr of a session, {where}", streams.getvalue()))
    on.shown += [(f"warning, {where}", str(one.message)) for one in caught]
    on.files(on.folder)
    on.stored()


def _told(on: World, where: str, attempt: Any) -> None:
    """Note the exception with its whole traceback."""
    try:
        attempt()
    except ScarError:
        on.shown.append((f"traceback, {where}", traceback.format_exc()))
    except Exception as error:
        on.shown.append((f"traceback, {where}", traceback.format_exc()))
        on.failed.append(f"{where}: {type(error).__name__}: {error}")


def hurry() -> None:
    """Shorten `scarctl doctor`, whose figures do not matter here."""
    diagnose.__kwdefaults__["large_bytes"], race.__kwdefaults__["racers"] = 1 << 20, 4
    doctor.SMALL_COUNT = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.secrets", description=__doc__)
    parser.add_argument("--cases", type=int, default=0, help="1: a quick form; otherwise all")
    parser.add_argument("--seed", type=int, default=0, help="nothing here is random")
    args = parser.parse_args()
    started = time.monotonic()
    if args.cases == 1:
        hurry()
    with world() as on:
        commands(on, quick=args.cases == 1)
        savers = (True,) if args.cases == 1 else (False, True)  # with a daemon there is more to search
        for daemon in savers:
            session(on, daemon=daemon, quick=args.cases == 1)
        on.files(on.folder)
    leaks = on.leaks()
    for line in [*on.failed, *leaks][:60]:
        print(f"VIOLATION {line}")  # noqa: T201
    print(  # noqa: T201
        f"{on.commands} commands, {len(savers)} savers, {len(on.shown):,} texts, files and objects "
        f"({sum(len(text) for _, text in on.shown):,} bytes) in {time.monotonic() - started:.0f} s: "
        f"{len(leaks)} leaks, {len(on.failed)} other failures"
    )
    return bool(leaks or on.failed)


if __name__ == "__main__":
    sys.exit(main())
