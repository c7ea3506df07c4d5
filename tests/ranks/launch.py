"""Runs a function in several processes that are ranks of one gloo group.

    results = launch("tests.ranks.scenarios:ddp", 2)

Every process imports the function, makes the group, calls `function(rank, world, *arguments)` and writes what it
returns as JSON. Each of them ends by itself after `timeout` seconds, with the stacks of its threads on stderr.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables that `torchrun` would set, and those that keep everything on the loopback interface."""
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


def launch(function: str, world: int, *arguments: Any, timeout: float = 60.0) -> list[Any]:
    """What `function` ("module:name") returned on every rank. Fails with what the ranks wrote to stderr."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="scarctl-ranks-") as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                command = [sys.executable, "-m", "tests.ranks.launch", function, folder, str(timeout)]
                with (Path(folder) / f"{rank}.err").open("wb") as errors:
                    processes.append(
                        subprocess.Popen(
                            [*command, json.dumps(arguments)],
                            cwd=ROOT,
                            env=environment(rank, world, port),
                            stdin=subprocess.DEVNULL,
                            stdout=errors,
                            stderr=errors,
                        )
                    )
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


def main(function: str, folder: str, timeout: str, arguments: str) -> None:
    """One rank."""
    faulthandler.dump_traceback_later(float(timeout), exit=True)
    from torch import distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout)))
    rank, world = dist.get_rank(), dist.get_world_size()
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(rank, world, *json.loads(arguments))
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
