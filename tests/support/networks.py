"""Make hosts as network namespaces: each has a cable for its daemon and the store, and one for collectives."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.distributed.launch import environment
from tests.support.forkserver import Program

CONTROL, COLLECTIVE = "10.213.77", "10.213.78"
PORT = 29511
WEATHER = "tests.support.weather"
ENTER = """
import ctypes, os, runpy, sys
network, sys.argv[:] = sys.argv[1], sys.argv[2:]
libc = ctypes.CDLL(None, use_errno=True)
if libc.setns(os.open(network, os.O_RDONLY | os.O_CLOEXEC), 0x40000000):  # CLONE_NEWNET
    raise OSError(ctypes.get_errno(), "setns")
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Unavailable(Exception):
    """This user may not make network namespaces."""


class Networks:
    """Hosts with networks of their own, by number, all on one switch."""

    def __init__(self, count: int) -> None:
        """Make the hosts. Raises Unavailable."""
        self.names = [f"scarctl-{os.getpid()}-{n}" for n in range(count)]
        self._hub = f"scarctl-{os.getpid()}-hub"
        try:
            ip("netns", "add", self._hub)
            for switch in "cd":
                ip("-n", self._hub, "link", "add", f"switch{switch}", "type", "bridge")
                ip("-n", self._hub, "link", "set", f"switch{switch}", "up")
            for n, name in enumerate(self.names):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
                for kind, subnet in (("c", CONTROL), ("d", COLLECTIVE)):
                    self._plug(n, kind, f"{subnet}.{n + 1}/24")
        except (OSError, subprocess.CalledProcessError) as error:
            self.remove()
            why = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else error
            raise Unavailable(f"this user may not make network namespaces: {why}") from error

    def _plug(self, n: int, kind: str, address: str) -> None:
        name, cable, port = self.names[n], f"cable{kind}", f"port{kind}{n}"
        ip(
            *("link", "add", cable, "netns", name, "type", "veth"),
            *("peer", "name", port, "netns", self._hub),
        )
        ip("-n", self._hub, "link", "set", port, "master", f"switch{kind}", "up")
        ip("-n", name, "address", "add", address, "dev", cable)
        ip("-n", name, "link", "set", cable, "up")

    def remove(self) -> None:
        for name in [*self.names, self._hub]:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "delete", name)

    @staticmethod
    def address(n: int) -> str:
        """Return the address of a host's daemon."""
        return f"{CONTROL}.{n + 1}"

    def cut(self, n: int) -> None:
        """Disconnect a host. Collectives have another cable."""
        ip("-n", self._hub, "link", "set", f"portc{n}", "down")

    def heal(self, n: int) -> None:
        ip("-n", self._hub, "link", "set", f"portc{n}", "up")

    def shape(self, n: int, rate: str) -> None:
        """Slow down what a host sends. rate: as for `tc`, such as "2mbit"."""
        tbf = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "200ms")
        subprocess.run(
            ["tc", "-n", self.names[n], "qdisc", "replace", "dev", "cablec", *tbf],
            check=True,
            capture_output=True,
            timeout=20,
        )

    def unshape(self, n: int) -> None:
        subprocess.run(
            ["tc", "-n", self.names[n], "qdisc", "delete", "dev", "cablec", "root"], check=True, timeout=20
        )

    def weather(self, settings: Path, errors: Path) -> Program:
        """Have a program carry the frames of daemons in place of the switch: see `tests.support.weather`."""
        settings.write_text("{}")
        ports = [f"portc{n}" for n in range(len(self.names))]
        for n, port in enumerate(ports):
            assert self.run(n, WEATHER, "plain", "cablec", env=dict(os.environ), errors=errors).wait() == 0, (
                errors.read_text()
            )
            ip("-n", self._hub, "link", "set", port, "nomaster")
        return self._run_in(self._hub, WEATHER, str(settings), *ports, env=dict(os.environ), errors=errors)

    def run(self, n: int, module: str, *arguments: str, env: dict[str, str], errors: Path) -> Program:
        """Run a module on a host."""
        return self._run_in(self.names[n], module, *arguments, env=env, errors=errors)

    def _run_in(
        self, network: str, module: str, *arguments: str, env: dict[str, str], errors: Path
    ) -> Program:
        with errors.open("wb") as file:
            command = ["-c", ENTER, f"/run/netns/{network}", module, *arguments]
            return Program(command, env=env, stdout=file, stderr=file)

    def start(
        self, function: str, folder: Path, *arguments: Any, world: int = 0, seconds: float = 100
    ) -> list[Program]:
        """Start a job with one rank per host, on the first `world` of them. It ends after `seconds` at the latest."""
        world = world or len(self.names)
        ranks = []
        for rank in range(world):
            env = environment(rank, world, PORT)
            env |= {"MASTER_ADDR": self.address(0), "GLOO_SOCKET_IFNAME": "cabled"}
            (folder / f"{rank}.json").unlink(missing_ok=True)
            words = [function, str(folder), str(seconds), json.dumps(arguments)]
            errors = folder / f"{rank}.err"
            ranks.append(self.run(rank, "tests.distributed.launch", *words, env=env, errors=errors))
        return ranks


def outcome(ranks: Sequence[Program], folder: Path) -> list[tuple[int, Any]]:
    """Return each rank's exit code, and its result, or the end of its stderr."""
    found = []
    for rank, process in enumerate(ranks):
        code, path = process.wait(timeout=110), folder / f"{rank}.json"
        said = json.loads(path.read_text()) if path.exists() else (folder / f"{rank}.err").read_text()[-3000:]
        found.append((code, said))
    return found


@contextmanager
def networks(count: int) -> Iterator[Networks]:
    """Yield some hosts, and remove them afterwards. Raises Unavailable."""
    made = Networks(count)
    try:
        yield made
    finally:
        made.remove()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
