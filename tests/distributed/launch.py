"""Run a function in several processes that are ranks of one gloo group.

    results = launch("tests.distributed.scenarios:ddp", 2)

Every process imports the function, makes the group, calls `function(rank, world, *arguments)` and writes its result as
JSON. Each process ends after `timeout` seconds, with the stacks of its threads on stderr.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import secrets
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.forkserver import ROOT, TORCH, Program, run

RANKS_ARE_FORKS = (
    *("--local-addr", "127.0.0.1", "--monitor-interval", "0.1", "--start-method", "fork"),
    *("--run-path", str(ROOT / "tests" / "distributed" / "forked.py")),
)
"""The end of torchrun's options; a module and its arguments follow."""


def free_port() -> int:
    """Return a port of the loopback interface on which no process listens.

    It is none of those that the system gives to connections, as it may have done until the port is used.
    """
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(10_000, max(given, 20_000)))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables that `torchrun` would set, and those that keep everything on the loopback interface."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def launch(function: str, world: int, *arguments: Any, timeout: float = 150.0) -> list[Any]:
    """Return the results of `function` ("module:name") on every rank. Fails with the ranks' stderr."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="scarctl-ranks-") as folder:
        processes: list[Program] = []
        try:
            for rank in range(world):
                command = [
                    "-m",
                    "tests.distributed.launch",
                    function,
                    folder,
                    str(timeout),
                    json.dumps(arguments),
                ]
                with (Path(folder) / f"{rank}.err").open("wb") as errors:
                    env = environment(rank, world, port)
                    processes.append(Program(command, env=env, stdout=errors, stderr=errors))
            deadline = time.monotonic() + timeout + 5
            # A rank that failed leaves the others waiting for it.
            while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
                if any(p.poll() for p in processes):
                    deadline = min(deadline, time.monotonic() + 5)
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        codes = [process.returncode for process in processes]
        if any(codes):
            text = [
                f"rank {r} ended with {codes[r]}\n{(Path(folder) / f'{r}.err').read_text()[-4000:]}"
                for r in range(world)
            ]
            raise AssertionError("\n".join(text))
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def torchrun(
    module: str,
    *arguments: str,
    world: int,
    restarts: int = 1,
    timeout: float = 150.0,
    imports: tuple[str, ...] = TORCH,
) -> str:
    """Run a program on `world` ranks under torchrun, which restarts all of them when one dies. Return their stderr.

    The ranks are forks of its agent.
    """
    options = ["--nproc-per-node", str(world), "--max-restarts", str(restarts), "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", "127.0.0.1:0", *RANKS_ARE_FORKS, module, *arguments]
    command = ["-m", "torch.distributed.run", *options]
    done = run(command, env=of_agent(), timeout=timeout, imports=imports)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stderr


def of_agent() -> dict[str, str]:
    """Return `environment` without the variables that torchrun sets."""
    unset = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in environment(0, 1, 0).items() if name not in unset}


def main(function: str, folder: str, timeout: str, arguments: str) -> None:
    """Run one rank."""
    faulthandler.dump_traceback_later(float(timeout), exit=True)
    from torch import distributed as dist

    module, name = function.split(":")
    imported = importlib.import_module(
        module
    )  # before ranks meet: from then on tests may limit how late one is
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout)))
    rank, world = dist.get_rank(), dist.get_world_size()
    result = getattr(imported, name)(rank, world, *json.loads(arguments))
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
