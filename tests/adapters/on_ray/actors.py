"""Run a cluster of one node with actors that are killed. It needs its own network, and prints its findings as JSON.

python -m tests.adapters.on_ray.actors FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import ray

from scarctl_adapters.ray import Kept, once

KILLS, CALLS = 4, 12


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0.1)
class Table:
    def __init__(self, root: str) -> None:
        self.rows = {"rows": np.zeros((100, 16))}
        self.kept = Kept(self.rows, root=root)

    @once
    def add(self, value: float) -> float:
        for row in self.rows["rows"]:
            row += value
        return float(self.rows["rows"].sum() / self.rows["rows"].size)

    def look(self) -> dict[str, Any]:
        rows = self.rows["rows"]
        return {
            "pid": os.getpid(),
            "step": self.kept.resumed.step,
            "consistent": self.kept.resumed.consistent,
            "token": self.kept.fencing_token,
            "values": sorted({float(value) for value in rows.reshape(-1)}),
        }


def main(folder: str) -> None:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, logging_level="error",
             log_to_driver=False)  # fmt: skip
    found: dict[str, Any] = {"answers": [], "looks": [], "away": []}
    table = Table.options(name="table").remote(f"{folder}/actors")
    for _ in range(KILLS):
        look = ray.get(table.look.remote())
        found["looks"].append(look)
        calls = [table.add.remote(1.0) for _ in range(CALLS)]
        time.sleep(0.05)
        os.kill(look["pid"], signal.SIGKILL)
        began = time.monotonic()
        found["answers"] += ray.get(calls, timeout=120)
        found["away"].append(time.monotonic() - began)
    found["looks"].append(ray.get(table.look.remote()))
    for refused, options in (("unnamed", {}), ("badly", {"name": "a/b"})):
        other = Table.options(max_restarts=0, **options).remote(f"{folder}/actors")
        try:
            ray.get(other.look.remote())
        except ray.exceptions.RayActorError as error:
            found[refused] = str(error)
    sys.stdout.write("FOUND " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
