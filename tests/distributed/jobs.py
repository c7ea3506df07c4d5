"""Run training jobs of several ranks that save with scarctl, for tests."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import scarctl
from scarctl.arena.arena import Arena
from scarctl.checkpoint.live_state import LiveState
from scarctl.config import grouped
from scarctl.distributed import collectives
from scarctl.distributed.coordinator import RankCoordinator
from scarctl.errors import ScarError
from tests.support.training import drained

ROWS = 512


class Recommender(nn.Module):
    """A model with a table of which every batch touches some rows, and a small dense part. Batch norm has buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 64)
        self.dense = nn.Linear(64, width)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, 1, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(torch.relu(self.norm(self.dense(self.table(rows)))))
        return found


PLACES = {
    "checkpoint": (LiveState, "save", 3),
    "resume": (RankCoordinator, "agree_on_state", 1),
    "spread": (RankCoordinator, "spread", 1),
    "before flip": (Arena, "flip", 3),
    "after flip": (Arena, "flip", 3),
}
"""Owner and name of the function called there, and which of its calls is the last."""


def build(kind: str, width: int = 37) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and optimizer with the same values on all ranks, sharded or copied."""
    torch.manual_seed(0)
    model: Any = Recommender(width)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model.dense)
        fully_shard(model)
    torch.manual_seed(1000 + _rank())
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Do one iteration; its batch depends only on its number and the rank."""
    generator = torch.Generator().manual_seed(number * 100 + _rank())
    rows = torch.randint(ROWS, (16,), generator=generator)
    optimizer.zero_grad()
    loss = (model(rows) - torch.rand(16, 1, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return whole tensors of parameters and Adam's moments, under names without wrappers. A collective."""
    found = {}
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("module.")
        found[plain] = _full(parameter)
        for slot in ("exp_avg", "exp_avg_sq"):
            if slot in optimizer.state[parameter]:
                found[f"{plain}/{slot}"] = _full(optimizer.state[parameter][slot])
    return found


def train(
    rank: int, world: int, kind: str, folder: str, steps: int, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Resume and train up to iteration `steps`.

    Options: `die` (a rank, several, or "all") at the end of iteration `die_at`, or `die_in` a place of `PLACES`, one
    for all or a list by rank;
    iterations after which it waits for the store (`drained_at`); a file to keep the state in that was `resumed`, and
    that of the end (`keep`); arguments of `attach` (`settings`); `snapshot` of `resume`; a `snapshot_at` iteration;
    folders of the ranks' arenas (`homes`); iterations after which the store stops (`store_stops_at`), and the state is
    flushed (`flush_at`).
    """
    options = options or {}
    if "die_in" in options and rank in dying(world, options["die"]):
        places = options["die_in"]
        die_in(places if isinstance(places, str) else places[rank])
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("scarctl").addHandler(handler)
    model, optimizer = build(kind)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    arena = Path(folder, options["homes"][rank] if "homes" in options else "arena")
    arena.mkdir(exist_ok=True)
    session = scarctl.attach(
        model,
        optimizer,
        store=f"{folder}/store",
        fraction=0.25,
        schedulers=scheduler,
        **grouped(
            **{
                "interval": 5,
                "partition_bytes": 2048,
                "daemon": False,
                "arena_dir": str(arena),
                **options.get("settings", {}),
            }
        ),
    )
    with session:
        resumed = session.resume("partial", snapshot=options.get("snapshot"))
        found = values(model, optimizer) if options.get("resumed") else {}
        if rank == 0 and found:
            torch.save(found, options["resumed"])
        for number in range(resumed.step + 1, steps + 1):
            step(model, optimizer, number)
            scheduler.step()
            if number in options.get("drained_at", ()):
                session._saving.finish()
                drained([session])
            if options.get("store_stops_at") == number:
                drained([session])
                session._saver.stop()
            if options.get("flush_at") == number:
                session.flush()
            if options.get("die_at") == number and rank in dying(world, options["die"]):
                os.kill(os.getpid(), signal.SIGKILL)
            if options.get("snapshot_at") == number:
                session.snapshot("kept")
            end = values(model, optimizer)
        if rank == 0 and options.get("keep"):
            torch.save(end, options["keep"])
    return {
        "step": resumed.step,
        "consistent": resumed.consistent,
        "whole": resumed.label.of_one,
        "reasons": list(resumed.reasons),
        "ranks": None if resumed.ranks is None else dict(resumed.ranks),
        "tiers": None if resumed.report is None else resumed.report.tiers,
        "head": session.head_step,
        "errors": session.stats.errors,
        "last_error": session.stats.last_error,
        "warned": warned,
    }


def dying(world: int, die: int | str | list[int]) -> list[int]:
    """Return the ranks that an option `die` names."""
    return list(range(world)) if die == "all" else [die] if isinstance(die, int) else list(die)


class Bowl(nn.Module):
    """A model whose loss is half of its square: gradient descent goes straight to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(ROWS, 64))

    def forward(self) -> torch.Tensor:
        return self.rows.square().sum() / 2


def die_in(place: str) -> None:
    """End this process by SIGKILL when it reaches `place`, one of `PLACES`."""
    owner, name, calls = PLACES[place]
    real, left = getattr(owner, name), [calls]

    def deadly(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            if place.startswith("after"):
                real(*arguments, **named)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    setattr(owner, name, deadly)


def refused(rank: int, world: int, kind: str, folder: str, changes: dict[str, Any]) -> str:
    """Return the error that `attach` or `resume` raises if rank 1 differs in `changes`."""
    mine = changes if rank == 1 else {}
    collectives.PATIENCE = 3.0
    if mine.get("absent"):
        return ""
    Path(folder, "arena").mkdir(exist_ok=True)
    model, optimizer = build(kind)
    settings = {"store": f"{folder}/store", "arena_dir": f"{folder}/arena", "daemon": False}
    try:
        session = scarctl.attach(model, optimizer, **grouped(**{**settings, **mine.get("settings", {})}))
    except ScarError as error:
        return f"{error.kind}: {error}"
    session.close()
    return "not refused"


def _full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def load(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that `train` kept."""
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found
