"""A small Llama under torchtitan's Trainer and FSDP2, with scarctl as its checkpoint manager.

torchrun --nproc-per-node 2 --max-restarts 1 examples/torchtitan_llama/train.py --store run

Kill any rank with -9: torchrun starts all of them again, and they go on where the survivors were.
`python examples/lost_rank.py torchtitan_llama --ranks 2 --kill` does that and counts what it cost.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama
from torch import distributed as dist

import scarctl
from scarctl_adapters.torchtitan import ScarCheckpointManager

LENGTH, WIDTH, LAYERS = 64, 64, 2
log = logging.getLogger("train")


class Saying(ScarCheckpointManager):
    """Says what it has resumed from. A training that says nothing takes `ScarCheckpointManager.Config`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScarCheckpointManager.Config):
        """Those of scarctl's manager."""

    def _load(self, step: int = -1) -> bool:
        found = super()._load(step)
        resumed = self.resumed
        report = resumed.report and resumed.report.to_json()
        log.info("resumed %s", json.dumps({"step": resumed.step, "ranks": resumed.ranks, "report": report}))
        return found


def main() -> None:
    """Train, or go on training, until `--steps` are done."""
    arguments = _parse()
    form = "%(created).4f %(process)d %(name)s %(message)s"
    logging.basicConfig(stream=sys.stdout, level="INFO", format=form, force=True)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    options: dict[str, Any] = {"fraction": 1 / 8, "interval": arguments.interval}
    if arguments.arena:
        options["settings"] = scarctl.Settings(arena_dir=f"{arguments.arena}/{rank}")
    trainer = llama.config(
        Path(f"{arguments.store}-torchtitan"),
        arguments.steps,
        Saying.Config(store=str(arguments.store.absolute()), options=options),
        spec=llama.model(WIDTH, LAYERS, LENGTH),
        length=LENGTH,
        batch=4,
        ranks=dist.get_world_size(),
    ).build()
    log.info("ready")
    try:  # as torchtitan.train does
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--interval", type=int, default=2, help="steps between two checkpoints of 1/8 each")
    parser.add_argument(
        "--arena", type=Path, help="folder for the ranks' memory, each of its own (default: shared)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
