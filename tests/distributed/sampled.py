"""Run one rank of a job under torchrun whose data a `DistributedSampler` orders: it dies once, and is resumed.

python -m tests.distributed.sampled FOLDER epochs|by-hand DIES_AT RANKS
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import scarctl
from scarctl.config import grouped
from tests.support.training import drained

EPOCHS, PER_EPOCH = 3, 4


def main(folder: str, way: str, dies_at: str, dying: str) -> None:
    """Run a rank. RANKS (01: both) end by SIGKILL after step DIES_AT of the first start."""
    dist.init_process_group("gloo")
    rank, first = dist.get_rank(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(torch.rand(8 * PER_EPOCH, 8, generator=torch.Generator().manual_seed(5)))
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    torch.manual_seed(1000 + rank)
    options = grouped(interval=1, policy="full", daemon=False, on_error="raise")
    with scarctl.attach(model, optimizer, store=f"{folder}/store", **options) as session:
        resumed = session.resume("rollback")
        begin = range(resumed.step // PER_EPOCH, EPOCHS)
        for epoch in session.epochs(EPOCHS) if way == "epochs" else begin:
            sampler.set_epoch(epoch)
            for (x,) in session.batches(loader) if way == "epochs" else loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                drained([session])
                if first and str(rank) in dying and session.head_step == int(dies_at):
                    os.kill(os.getpid(), signal.SIGKILL)
        assert session.resumed is not None
        found = session.resumed
        digest = hashlib.sha256(
            b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        ).hexdigest()
        text = {
            "step": found.step,
            "consistent": found.consistent,
            "reasons": found.reasons,
            "digest": digest,
        }
    Path(folder, f"{rank}.json").write_text(json.dumps(text))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
