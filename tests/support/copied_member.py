"""Run members whose memory other hosts copy, each as a program that obeys; a folder of arenas is a host.

    python -m tests.support.copied_member STORE FOLDER NUMBER COUNT OPTIONS

A step adds 1 to every value; with the option "blocks" it is a block of `session.iteration()`. The program appends what
it has resumed, its warnings and its answers to FOLDER/NUMBER.jsonl. Between two steps it obeys the lines of
FOLDER/NUMBER.do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import scarctl
from scarctl.arena.folder import host_folder
from scarctl.arena.owner import read_owner
from scarctl.arena.view import ArenaView, peek
from scarctl.config import grouped
from scarctl.daemon.client import ask_status
from scarctl.distributed import known_hosts, meeting
from scarctl.errors import ScarError
from scarctl.store import Store
from scarctl.store.hosts import HostRecord, read_hosts
from tests.daemon.trainer import stop
from tests.support.forkserver import Program
from tests.support.member import state_of, torn, train
from tests.support.waiting import wait_until

INTERVAL = 2
PATIENCE = 90.0


def main(store: str, folder: str, number: str, count: str, options: str) -> int:
    log, orders = Path(folder, f"{number}.jsonl"), Path(folder, f"{number}.do")
    given = json.loads(options)
    whole, place = given.pop("divided", 0), (int(number), int(count))
    state = divided_state(whole, *place) if whole else state_of(int(number))

    def tell(**what: Any) -> None:
        with log.open("a") as file:
            file.write(json.dumps(what) + "\n")

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: tell(warned=record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("scarctl").addHandler(handler)
    for name, seconds in given.pop("seconds", {}).items():
        setattr(known_hosts if hasattr(known_hosts, name) else meeting, name, seconds)
    rows = {"rows": (whole * place[0] // place[1], whole)} if whole else {}
    member = scarctl.Member(*place, rows, given.pop("replaces", None))
    pace, blocks = given.pop("pace", 0.02), given.pop("blocks", False)
    usual = {"interval": INTERVAL, "fraction": 0.25, "rows": {"rows": 1}, "daemon": True, "timeout": 20.0}
    try:
        session = scarctl.attach(state, store=store, member=member, **grouped(**usual | given))
        with contextlib.closing(session):
            resumed = session.resume()
            tiers = {} if resumed.report is None else dict(resumed.report.tiers)
            steps = {"steps": state["rows"][:, 0].astype(int).tolist()} if whole else {}
            tell(step=resumed.step, consistent=resumed.consistent, tiers=tiers, torn=torn(state), **steps)
            obeyed = 0
            while True:
                lines = orders.read_text().splitlines() if orders.exists() else []
                for line in lines[obeyed:]:
                    order = json.loads(line)
                    if order == ["end"]:
                        return 0
                    if order == ["stop store"] and not is_in_store(session):
                        break  # the store is to have something older
                    obeyed += 1
                    tell(answer=obey(session, order[0]), head=session.head_step)
                    if order[0].endswith("stopped"):
                        threading.Event().wait()
                if blocks:
                    serve(session, state)
                else:
                    train(session, state, 1)
                time.sleep(pace)  # others need the processor, too
    except ScarError as error:
        tell(error=error.kind, message=str(error))
        return error.exit_code


def divided_state(whole: int, number: int, count: int) -> dict[str, np.ndarray]:
    """Return a member's part of a table of `whole` rows, whose values are steps."""
    return {"rows": np.zeros((whole * (number + 1) // count - whole * number // count, 4))}


def is_in_store(session: scarctl.Session) -> bool:
    """Return whether the store has a copy of everything."""
    engine = session._engine
    return engine is not None and bool((engine.arena.durable >= 0).all())


def serve(session: scarctl.Session, state: dict[str, np.ndarray]) -> None:
    with session.iteration():
        for values in state.values():
            values += 1


def obey(session: scarctl.Session, order: str) -> Any:
    """Carry out an order, and return what there is to say."""
    try:
        if order == "stop store":  # from now on the store gets nothing
            session._saver.stop()
        elif order == "stopped":  # it waits for a request that never comes
            pass
        elif order == "flush":
            return session.flush()
        elif order in ("copied", "copied and stopped"):
            session.checkpoint(full=True, wait="peers")
        else:
            raise AssertionError(order)
    except ScarError as error:
        return {"error": error.kind, "message": str(error)}
    return None


class Hosts:
    """Hosts below one folder, with members of one store on them."""

    def __init__(self, folder: Path, store: str | Path, count: int = 2, **options: Any) -> None:
        """options: of `attach`, for all members; `seconds`: other values for constants of time."""
        self.folder, self.store, self.count = folder, store, count
        self.told_in = folder / "told"
        self.told_in.mkdir()
        self.secret = folder / "secret"
        self.secret.write_text("planted-0123456789abcdef-0123456789abcdef")
        self.secret.chmod(0o600)
        quick = {
            "_FIRST": 0.3,
            "_LACKING": 0.5,
            "_USUAL": 0.5,
            "_TRIED": 2.0,
            "_REWRITE": 1.0,
            "_REREAD": 1.0,
        }
        self.options: dict[str, Any] = {
            "peers": 1,
            "peer_secret_file": str(self.secret),
            "peer_address": "127.0.0.1",
            **options,
            "seconds": {**quick, **options.get("seconds", {})},
        }
        self.programs: dict[int, Program] = {}
        self.everyone: list[Program] = []
        self.homes: set[str] = set()

    def home(self, name: str) -> Path:
        return self.folder / name

    def start(self, number: int, home: str, **options: Any) -> dict[str, Any]:
        """Start a member on a host, and return what it has resumed, or its error."""
        self.home(home).mkdir(exist_ok=True)
        self.homes.add(home)
        (self.told_in / f"{number}.do").unlink(missing_ok=True)
        given = {**self.options, "arena_dir": str(self.home(home)), **options}
        count = given.pop("count", self.count)
        words = [str(self.store), str(self.told_in), str(number), str(count), json.dumps(given)]
        before = len(self.told(number))
        program = self.run(home, words, self.told_in / f"{number}.err")
        self.programs[number] = program
        self.everyone.append(program)
        return self._next(number, before, ("step", "error"))

    def run(self, home: str, words: list[str], errors: Path) -> Program:
        """Run a member on a host."""
        with errors.open("ab") as file:
            return Program(["-m", "tests.support.copied_member", *words], stdout=file, stderr=file)

    def order(self, number: int, *order: Any) -> Any:
        """Have a member do something, and return its answer."""
        before = len(self.told(number))
        with (self.told_in / f"{number}.do").open("a") as file:
            file.write(json.dumps(order) + "\n")
        return self._next(number, before, ("answer",))

    def copy(self, number: int, *, stopped: bool = False) -> int:
        """Have a member save its state and wait until other hosts have it. Return its step. stopped: take no other."""
        said = self.order(number, "copied and stopped" if stopped else "copied")
        assert said["answer"] is None, said
        return int(said["head"])

    def told(self, number: int) -> list[dict[str, Any]]:
        file = self.told_in / f"{number}.jsonl"
        return (
            [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            if file.exists()
            else []
        )

    def warned(self, number: int) -> list[str]:
        return [line["warned"] for line in self.told(number) if "warned" in line]

    def _next(self, number: int, before: int, fields: tuple[str, ...]) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            lines = self.told(number)[before:]
            line = next((line for line in lines if any(field in line for field in fields)), None)
            ended = self.programs[number].poll()
            assert line or ended is None, (ended, lines, (self.told_in / f"{number}.err").read_text()[-3000:])
            return line

        line: dict[str, Any] = wait_until(found, PATIENCE)
        return line

    def run_of(self, number: int, home: str) -> dict[str, Any]:
        """Return the daemon's status of a member on a host; {} without one."""
        found = ask_status(host_folder(str(self.home(home))), patience=30.0)
        runs = [] if found is None else found["runs"]
        return next((dict(run) for run in runs if run["id"].endswith(f"-{number}")), {})

    def until_copied(self, number: int, home: str, copies: int = 1) -> list[str]:
        """Wait until this many hosts have a complete copy of a member's memory, and return them in words."""

        def complete() -> list[str]:
            found = [
                peer
                for peer in self.run_of(number, home).get("peers", ())
                if peer.endswith(("up to date", "behind"))
            ]
            return found if len(found) >= copies else []

        return list(wait_until(complete, PATIENCE))

    def copies_on(self, home: str) -> list[str]:
        """Return the runs whose replicas a host keeps."""
        folder = host_folder(str(self.home(home)))
        return sorted(path.name for path in folder.glob("*-*") if read_owner(path) is not None)

    def both(self) -> Hosts:
        """Start two members on a host each, and wait until each has a copy on the other's. Return the hosts."""
        for number, home in ((0, "east"), (1, "west")):
            self.start(number, home)
        for number, home in ((0, "east"), (1, "west")):
            self.until_copied(number, home)
        return self

    def records(self) -> dict[str, HostRecord]:
        """Return the records in the store by the name of the host."""
        found = read_hosts(Store.open(self.store)).values()
        return {record.host.rpartition(":")[2]: record for record in found}

    def memory_of(self, number: int, home: str) -> ArenaView:
        """Return a member's memory on a host: its own, or a copy."""
        found = peek(str(self.home(home)), Store.open(self.store).of_shard(number).run_id)
        assert found is not None
        return found

    def until_head(self, number: int, home: str, more: int = 20) -> int:
        """Wait until a member has taken some more steps, and return its step then."""
        goal = int(self.run_of(number, home).get("head_step", 0)) + more
        wait_until(lambda: self.run_of(number, home).get("head_step", 0) >= goal)
        return goal

    def kill(self, number: int) -> None:
        self.programs[number].kill()
        assert self.programs[number].wait() == -signal.SIGKILL

    def daemon_of(self, home: str) -> int:
        """Return the process id of a host's daemon."""
        status = ask_status(host_folder(str(self.home(home))), patience=30.0)
        assert status is not None
        return int(status["pid"])

    def kill_daemon(self, home: str) -> None:
        pid = self.daemon_of(home)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f"/proc/{pid}") or _is_zombie(pid))

    def lose(self, home: str, *numbers: int) -> None:
        """Lose a host: these members, its daemon, and its memory."""
        for number in numbers:
            self.programs[number].send_signal(signal.SIGSTOP)  # none of them starts another daemon
        self.kill_daemon(home)
        for number in numbers:
            self.kill(number)
        shutil.rmtree(self.home(home))

    def end(self, number: int) -> int:
        with (self.told_in / f"{number}.do").open("a") as file:
            file.write('["end"]\n')
        return self.programs[number].wait(PATIENCE)

    def close(self) -> None:
        for program in self.everyone:
            program.kill()
            with contextlib.suppress(ProcessLookupError):
                program.wait()
        for home in self.homes:
            if self.home(home).exists():
                stop(host_folder(str(self.home(home))))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextmanager
def hosts(folder: Path, store: str | Path, **options: Any) -> Iterator[Hosts]:
    """Yield hosts, and end all that runs on them."""
    made = Hosts(folder, store, **options)
    try:
        yield made
    finally:
        made.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
