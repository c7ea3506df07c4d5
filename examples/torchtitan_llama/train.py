"""Train a small Llama under torchtitan's Trainer and FSDP2, with scarctl as its checkpoint manager.

torchrun --nproc-per-node 2 --max-restarts 1 examples/torchtitan_llama/train.py --store run

Kill any rank with -9: torchrun starts all of them again, and they continue where the survivors were.
`python examples/lost_rank.py torchtitan_llama --ranks 2 --kill` does that and counts what it cost.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import llama
from ranks import begin, log, log_resumed, parser
from torch import distributed as dist

import scarctl
from scarctl_adapters.torchtitan import ScarCheckpointManager

LENGTH, WIDTH, LAYERS = 64, 64, 2


class Saying(ScarCheckpointManager):
    """Logs what it has resumed from. A training that logs nothing takes `ScarCheckpointManager.Config`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScarCheckpointManager.Config):
        """The settings of scarctl's manager."""

    def _load(self, step: int = -1) -> bool:
        found = super()._load(step)
        log_resumed(self.resumed)
        return found


def main() -> None:
    """Train, or continue, until `--steps` are done."""
    arguments = parser(__doc__, steps=40).parse_args()
    rank = begin()
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


if __name__ == "__main__":
    main()
