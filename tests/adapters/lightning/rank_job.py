"""Run one rank of a fit under FSDP2, started by torchrun.

    python -m tests.adapters.lightning.rank_job SETTINGS

SETTINGS is JSON: store, result (a folder: every rank writes what came of it there), die ([what, epoch, batch]: where
rank 1 is killed in the first start).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from scarctl_adapters.lightning import ScarCallback
from tests.adapters.lightning.fits import EXACT, QUIET, Net, Point, kill, loader, numbers


class RankNet(Net):
    """A net whose events affect only rank 1, once rank 0 has come as far."""

    def reach(self, what: str, batch: int) -> None:
        if (what, self.current_epoch, batch) == self._at and not self.trainer.sanity_checking:
            torch.distributed.barrier()
        if self.global_rank == 1:
            super().reach(what, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.loss(batch[0]), sync_dist=True)


class ShardedNet(RankNet):
    """A model whose parameters are divided among the ranks."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for module in (self.embed, self.out, self):
            fully_shard(module, mesh=mesh)


def digest(net: Net) -> str:
    """Return all parameters as whole tensors."""
    total = hashlib.sha256()
    for parameter in net.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        total.update(whole.detach().numpy().tobytes())
    return total.hexdigest()


def main(settings: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pl.seed_everything(1)
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    die: Point | None = tuple(settings["die"]) if first else None  # type: ignore[assignment]
    net = ShardedNet(die, kill)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    callback = ScarCallback(store=settings["store"], **EXACT)
    trainer = pl.Trainer(**{**QUIET, "devices": 2}, strategy=strategy, max_epochs=3, callbacks=[callback])
    trainer.fit(net, loader(), DataLoader(numbers(11), batch_size=4))
    resumed = callback.resumed
    result = {
        "digest": digest(net),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "seen": net.seen,
        "resumed": resumed
        and {"step": resumed.step, "consistent": resumed.consistent, "ranks": resumed.ranks},
    }
    (Path(settings["result"]) / f"{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
