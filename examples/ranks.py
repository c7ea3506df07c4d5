"""Share what trainings of several ranks have in common: options, process group, text, and the report of a resume."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

log = logging.getLogger("train")


def parser(doc: str, steps: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every training. doc: of its module. steps: the default of `--steps`."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--store", type=Path, required=True, help="folder for the checkpoints")
    made.add_argument("--steps", type=int, default=steps)
    made.add_argument("--interval", type=int, default=2, help="steps between two checkpoints of 1/8 each")
    made.add_argument(
        "--arena", type=Path, help="folder for the ranks' memory, each of its own (default: shared)"
    )
    return made


def begin() -> int:
    """Log to stdout, join the other ranks, and return the number of this one."""
    form = "%(created).4f %(process)d %(name)s %(message)s"
    logging.basicConfig(stream=sys.stdout, level="INFO", format=form, force=True)
    dist.init_process_group("gloo")
    return dist.get_rank()


def log_resumed(resumed: Any) -> None:
    """Log a session's `Resumed`, for lost_rank.py."""
    report = resumed.report and resumed.report.to_json()
    log.info("resumed %s", json.dumps({"step": resumed.step, "ranks": resumed.ranks, "report": report}))


def load() -> torch.Tensor:
    """Return a megabyte of Python: uint8 of shape (bytes,)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)[: 1 << 20]), dtype=torch.uint8
    )


def batch(text: torch.Tensor, step: int, rank: int, size: int, length: int) -> torch.Tensor:
    """Return pieces of the text, int64 of shape (size, length): the same ones for a step in every run."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    starts = torch.randint(len(text) - length, (size, 1), generator=generator)
    return text[starts + torch.arange(length)].long()
