"""Run ranks that train with an elastic schedule, for test_elastic.py. One rank is slow, so the others lend."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

import scarctl
from examples.elastic import schedule
from scarctl.errors import UsageError

LAYERS, WIDTH = 6, 8
PAUSE = 0.05
"""Seconds that the slow rank waits before its last bucket."""


class Sum(nn.Module):
    """A model in which each layer adds Σ w·x + curvature/2 ‖w‖², so that its gradient is x + curvature * w."""

    def __init__(self, curvature: float) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(LAYERS)])
        self.curvature = curvature

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for w, row in zip(self.layers, x, strict=True):
            total = total + (w * row).sum() + self.curvature / 2 * (w * w).sum()
        return total


def wrap(
    rank: int, *, curvature: float = 0.0, slow: int | None = 1, bucket_mb: float = 1e-6
) -> DistributedDataParallel:
    """Make one bucket per layer. Rank `slow` pauses before the gradient of the first layer, which comes last."""
    ddp = DistributedDataParallel(Sum(curvature), bucket_cap_mb=bucket_mb)
    if rank == slow:
        ddp.module.layers[0].register_hook(lambda _: time.sleep(PAUSE))
    return ddp


def noise(rank: int, step: int) -> torch.Tensor:
    """Return a gradient of norm 1."""
    x = torch.randn(LAYERS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return x / x.norm()


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step % 4)
        optimizer.zero_grad()
        ddp(noise(rank, step)).backward()
        optimizer.step()


def flat(ddp: DistributedDataParallel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


def same_everywhere(values: torch.Tensor) -> bool:
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return all(torch.equal(found[0], other) for other in found)


def plain(rank: int, steps: range, **options: Any) -> torch.Tensor:
    ddp = wrap(rank, slow=None, curvature=options.pop("curvature", 0.0))
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, **options), rank, steps)
    return flat(ddp)


def nothing_lent(rank: int, world: int) -> bool:
    """Check that the result with beta = 1 equals that of DDP."""
    options = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    ddp = wrap(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, **options)
    elastic = schedule(ddp, optimizer, beta=1.0)
    train(ddp, optimizer, rank, range(8))
    assert (elastic.steps, elastic.lent_steps, elastic.settled) == (8, 0, True)
    return torch.equal(flat(ddp), plain(rank, range(8), **options))


def corrected(rank: int, world: int) -> dict[str, float]:
    """Check that lent gradients leave no trace if gradients do not depend on parameters, even if rates change."""
    ddp = wrap(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    elastic = schedule(ddp, optimizer, beta=0.5)
    train(ddp, optimizer, rank, range(12))
    ahead = float((flat(ddp) - plain(rank, range(12))).norm())
    lent, open_ = elastic.lent_steps, not elastic.settled
    own = {name: value for name, value in vars(elastic).items() if name == "_owed"}["_owed"]
    for parameter, part, rate in elastic._collect() if own else ():
        elastic._correct(parameter, part, rate)
    behind = float((flat(ddp) - plain(rank, range(12))).norm())
    elastic.settle()
    assert elastic.settled
    assert same_everywhere(flat(ddp))
    return {"lent": lent, "open": open_, "ahead": ahead, "corrected": behind}


def bounded(rank: int, world: int) -> dict[str, float]:
    """Check the bound B: on a quadratic with noise of norm 1, ‖own - mean‖ <= s (2 + 2 L α B) with s = 1 - 1/p."""
    rate, curvature = 0.1, 1.0
    ddp = wrap(rank, curvature=curvature)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=rate)
    elastic = schedule(ddp, optimizer, beta=0.3)
    for step in range(40):
        optimizer.zero_grad()
        ddp(noise(rank, step)).backward()
        optimizer.step()
    elastic.settle()
    share = 1 - 1 / world
    return {
        "lent": elastic.lent_steps,
        "constant": elastic.constant,
        "bound": 2 * share / (1 - 2 * curvature * rate * share),
    }


def resynced(rank: int, world: int) -> bool:
    """Train with AdamW and a resync every three steps."""
    ddp = wrap(rank, curvature=1.0)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    elastic = schedule(ddp, optimizer, beta=0.5, resync=3)
    train(ddp, optimizer, rank, range(9))
    moments = [optimizer.state[p][name] for p in ddp.parameters() for name in ("exp_avg", "exp_avg_sq")]
    most = torch.tensor([float(elastic.lent_steps)])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert most.item() > 0, "nobody lent"
    return elastic.settled and same_everywhere(flat(ddp)) and same_everywhere(torch.cat(moments))


def refused(rank: int, world: int) -> list[str]:
    said = []
    ddp = wrap(rank, slow=None)
    sgd, adam = torch.optim.SGD(ddp.parameters(), lr=0.1), torch.optim.AdamW(ddp.parameters())
    for optimizer, options in ((sgd, {"beta": 0.0}), (sgd, {"beta": 1.5}), (sgd, {"resync": 0}), (adam, {})):
        try:
            schedule(ddp, optimizer, **options)  # type: ignore[arg-type]
        except UsageError as error:
            said.append(str(error))
    elastic = schedule(ddp, sgd)
    ddp(noise(rank, 0)).backward()
    for call in (elastic.settle, lambda: ddp(noise(rank, 0)).backward()):
        try:
            call()
        except UsageError as error:
            said.append(str(error))
    return said


def clipped(rank: int, world: int) -> dict[str, Any]:
    import logging

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("scarctl").addHandler(handler)
    ddp = wrap(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    elastic = schedule(ddp, optimizer, beta=0.5)
    for step in range(8):
        optimizer.zero_grad()
        ddp(noise(rank, step)).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()
    return {"lent": elastic.lent_steps, "warnings": warnings}


def settings(folder: str) -> scarctl.Settings:
    arena = Path(folder, "memory")
    arena.mkdir(exist_ok=True)
    return scarctl.Settings(daemon=False, arena_dir=str(arena))


def protected(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Check that a state with a lent gradient is not consistent, and one that is settled within its step is."""
    found: dict[str, Any] = {}
    for settle in (False, True):
        for again in (False, True):
            ddp = wrap(rank)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            elastic = schedule(ddp, optimizer, beta=0.5, resync=4 if settle else None)
            store = str(Path(folder, f"store-{settle}"))
            session = scarctl.attach(ddp, optimizer, store=store, interval=1, settings=settings(folder))
            start = session.resume()
            if again:
                found[f"consistent-{settle}"] = start.consistent
                found[f"reasons-{settle}"] = list(start.reasons)
                found[f"same-{settle}"] = same_everywhere(flat(ddp))
                session.close(seal=False)
                continue
            train(ddp, optimizer, rank, range(8))
            found[f"lent-{settle}"] = elastic.lent_steps
            session.checkpoint(full=True, wait=True)
            found[f"caveats-{settle}"] = [caveat.kind for caveat in session.caveats]
            found[f"settled-{settle}"] = elastic.settled
            session.close()
    return found


def unsaved(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Train with checkpoints that select nothing, because their fraction is tiny, while gradients are lent."""
    ddp = wrap(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    elastic = schedule(ddp, optimizer, beta=0.5)
    store = str(Path(folder, "store"))
    session = scarctl.attach(
        ddp, optimizer, store=store, interval=1, fraction=0.001, settings=settings(folder)
    )
    session.resume()
    train(ddp, optimizer, rank, range(10))
    kinds = [caveat.kind for caveat in session.caveats]
    checkpoints = session.stats.checkpoints
    session.close()
    return {"lent": elastic.lent_steps, "kinds": kinds, "checkpoints": checkpoints}


def stateful(rank: int, world: int, folder: str) -> dict[str, list[str]]:
    """Return which of torch's other communication hooks have a state that no checkpoint saves."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    found = {}
    for name in ("powersgd", "fp16", "group"):
        ddp = wrap(rank, slow=None, bucket_mb=25)  # PowerSGD's callbacks wait, and gloo has only two threads
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        session = scarctl.attach(
            ddp, optimizer, store=str(Path(folder, name)), interval=2, settings=settings(folder)
        )
        session.resume()
        with contextlib.suppress(NotImplementedError):
            if name == "powersgd":
                ddp.register_comm_hook(powersgd.PowerSGDState(None, 1, 2), powersgd.powerSGD_hook)
            elif name == "fp16":
                ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
            else:
                ddp.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
        train(ddp, optimizer, rank, range(4))
        session.checkpoint(full=True)
        found[name] = [caveat.message for caveat in session.caveats if caveat.kind == "communication-hook"]
        session.close()
    return found


def everything(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Return all of the above for two ranks: to start processes takes longer than each of them."""
    found: dict[str, Any] = {
        one.__name__: one(rank, world)  # type: ignore[operator]
        for one in (nothing_lent, corrected, resynced, refused, clipped)
    }
    for one in (protected, unsaved, stateful):
        Path(folder, one.__name__).mkdir(exist_ok=True)
        found[one.__name__] = one(rank, world, str(Path(folder, one.__name__)))
    return found


if __name__ == "__main__":
    # The program's last step lends, and the program ends at once, with the interpreter's usual end, unlike
    # ranks of `launch`.
    dist.init_process_group("gloo")
    place = dist.get_rank()
    model = wrap(place)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    lending = schedule(model, sgd, beta=0.5)
    train(model, sgd, place, range(5))
    assert place or not lending.settled, "what is tested"
