"""Run one rank of a job under torchrun: `tests.distributed.jobs.train`, with its report appended to a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from torch import distributed as dist

from tests.distributed.jobs import train


def main(kind: str, folder: str, steps: str, text: str) -> None:
    """Run one rank. text: JSON, a list of options for the first start, the second, and so on; the last for others."""
    dist.init_process_group("gloo")
    options = json.loads(text)
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    rank = dist.get_rank()
    report = train(
        rank, dist.get_world_size(), kind, folder, int(steps), options[min(start, len(options) - 1)]
    )
    with Path(folder, f"report-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(report) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
