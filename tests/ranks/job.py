"""One rank of a job under torchrun: `tests.ranks.jobs.train`, its report appended to a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from torch import distributed as dist

from tests.ranks.jobs import train


def main(kind: str, folder: str, steps: str, text: str) -> None:
    """Options count for the first start only, but those under "again" for all."""
    dist.init_process_group("gloo")
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    options = json.loads(text)
    chosen = {**options, **options.get("again", {})} if first else options.get("again", {})
    rank = dist.get_rank()
    report = train(rank, dist.get_world_size(), kind, folder, int(steps), chosen)
    with Path(folder, f"report-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(report) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
