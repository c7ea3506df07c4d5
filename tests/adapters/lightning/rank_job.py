"""Run one rank of a fit, started by torchrun or, if Lightning starts the other rank, directly.

    python -m tests.adapters.lightning.rank_job SETTINGS

SETTINGS is JSON: store ("" for none), result (a folder: every rank writes what came of it there), strategy, die
([what, epoch, batch], of rank 1 in the first start), how ("kill"; "held": rank 0 dies as well, and is still closing its
session when rank 1 has gone).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from scarctl.checkpoint.engine import Engine
from scarctl_adapters.lightning import ScarCallback
from tests.adapters.lightning.fits import EXACT, QUIET, Net, Point, interrupt, kill, loader, numbers
from tests.support.waiting import wait_until


class RankNet(Net):
    """A net whose events affect only rank 1, once rank 0 has come as far."""

    folder = ""

    def reach(self, what: str, batch: int) -> None:
        if (what, self.current_epoch, batch) == self._at and not self.trainer.sanity_checking:
            torch.distributed.barrier()
        if self.global_rank == 1:
            super().reach(what, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.loss(batch[0]), sync_dist=True)


class HeldNet(RankNet):
    """A net whose event ends both ranks, rank 1 first: then a signal comes in the middle of rank 0's last hand-over.

    Its handler is Lightning's, which sends something to the other rank. torchrun sends the same signal at about the
    same time, because a rank has ended.
    """

    def reach(self, what: str, batch: int) -> None:
        if (what, self.current_epoch, batch) != self._at or self.trainer.sanity_checking:
            return
        held, other = Path(self.folder) / "held", Path(self.folder) / "other"
        if self.global_rank == 1:
            wait_until(held.exists)
            other.write_text(str(os.getpid()))
        else:
            hand_over = Engine.hand_over

            def held_up(engine: Engine, *arguments: Any) -> None:
                Engine.hand_over = hand_over  # type: ignore[method-assign]
                held.touch()
                pid = wait_until(lambda: other.exists() and other.read_text())
                wait_until(lambda: not Path("/proc", pid).exists())
                signal.raise_signal(signal.SIGTERM)
                hand_over(engine, *arguments)

            Engine.hand_over = held_up  # type: ignore[method-assign]
        self._then((what, self.current_epoch, batch))


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
    die: Point | None = tuple(settings["die"]) if settings.get("die") and first else None  # type: ignore[assignment]
    sharded = settings["strategy"] == "fsdp2"
    how = settings.get("how", "")
    net = (ShardedNet if sharded else HeldNet if how == "held" else RankNet)(
        die, {"kill": kill}.get(how, interrupt)
    )
    net.folder = settings["result"]
    strategy = (
        ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        if sharded
        else settings["strategy"]
    )
    callback = ScarCallback(store=settings["store"], **EXACT) if settings["store"] else None
    trainer = pl.Trainer(
        **{**QUIET, "devices": 2}, strategy=strategy, max_epochs=3, callbacks=callback and [callback]
    )
    trainer.fit(net, loader(), DataLoader(numbers(11), batch_size=4))
    resumed = callback.resumed if callback else None
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
