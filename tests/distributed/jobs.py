"""Run training jobs of several ranks that save with scarctl, for tests."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import scarctl
from scarctl.checkpoint.live_state import LiveState
from scarctl.config import grouped
from scarctl.distributed import collectives
from scarctl.distributed.coordinator import RankCoordinator
from scarctl.errors import ScarError, UsageError
from scarctl.policy.interval import Cadence
from scarctl.store import StoreWriter
from scarctl_adapters.torch.sharding import local_part
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


class Single(nn.Module):
    """A model with one small parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(ROWS, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.rows[rows]


PLACES = {
    "checkpoint": (LiveState, "save", 3),
    "resume": (RankCoordinator, "agree_on_state", 1),
    "spread": (RankCoordinator, "spread", 1),
    "begin": (RankCoordinator, "begin", 1),
}
"""Owner and name of the function called there, and which of its calls is the last."""


class Experts(nn.Module):
    """A model with a part that all ranks keep equal, and one expert that only this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(64, 64)
        torch.manual_seed(_rank())
        self.experts = nn.ModuleDict({str(_rank()): nn.Linear(64, 1)})

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.experts[str(_rank())](
            torch.relu(self.shared((rows[:, None] / ROWS).expand(-1, 64)))
        )
        return found


def build(kind: str, width: int = 37) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and optimizer with the same values on all ranks, sharded or copied."""
    torch.manual_seed(0)
    model: Any = Recommender(width)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "experts":
        model = Experts()
    elif kind == "one tensor":  # too small to be divided: all but one rank own nothing
        model = DistributedDataParallel(Single())
    elif kind == "fsdp":
        fully_shard(model.dense)
        fully_shard(model)
    elif kind.startswith("hsdp"):  # two replicas of every shard
        if kind == "hsdp without buffers":
            model.norm = nn.LayerNorm(width)
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model.dense, mesh=mesh)
        fully_shard(model, mesh=mesh)
    torch.manual_seed(1000 + _rank())
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Do one iteration; its batch depends only on its number and the rank."""
    generator = torch.Generator().manual_seed(number * 100 + _rank())
    rows = torch.randint(ROWS, (16,), generator=generator)
    optimizer.zero_grad()
    loss = (model(rows) - torch.rand(16, 1, generator=generator)).square().mean()
    loss.backward()
    if isinstance(model, Experts):
        for parameter in model.shared.parameters():
            dist.all_reduce(parameter.grad)
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

    Options: `die` (a rank, several, or "all") at the end of iteration `die_at`, or `die_in` a place of `PLACES`;
    iterations after which it waits for the store (`drained_at`); a file to keep the state in that was `resumed`, and
    that of the end (`keep`); a file to train `until`; arguments of `attach` (`settings`); `mode` and `snapshot` of
    `resume`; a `snapshot_at` iteration; what to `recover` at the end; a rank whose store is `slow`; folders of the
    ranks' arenas (`homes`); iterations after which the store stops (`store_stops_at`), and the state is flushed
    (`flush_at`).
    """
    options = options or {}
    if rank == options.get("die") and "die_in" in options:
        die_in(options["die_in"])
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
        ranks=scarctl.Ranks(replicated=["shared.*"] if kind == "experts" else ()),
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
    saved_at: list[int] = []
    note_checkpoints(saved_at)
    if rank == options.get("slow"):
        slow_store(0.4)
    with session:
        resumed = session.resume(mode=options.get("mode", "partial"), snapshot=options.get("snapshot"))
        found = values(model, optimizer) if options.get("resumed") else {}
        if rank == 0 and found:
            torch.save(found, options["resumed"])
        for number in range(resumed.step + 1, steps + 1):
            step(model, optimizer, number)
            scheduler.step()
            time.sleep(0.005 if "slow" in options else 0.0)
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
            # The file may appear between two ranks' looks: they agree on what they saw.
            if "until" in options and all_have(Path(options["until"]).exists()):
                break
            if options.get("snapshot_at") == number:
                session.snapshot("kept")
        recovered = None
        if "recover" in options:
            report = session.recover(options["recover"], mode=options.get("recover_mode", "partial"))
            recovered = report.to_json()["restored_partitions"]
        cadence = session._engine.cadence if session._engine is not None else None
        end = values(model, optimizer)
        if rank == 0 and options.get("keep"):
            torch.save(end, options["keep"])
    return {
        "step": resumed.step,
        "consistent": resumed.consistent,
        "whole": resumed.report is None or resumed.report.whole,
        "reasons": list(resumed.reasons),
        "ranks": None if resumed.ranks is None else dict(resumed.ranks),
        "tiers": None if resumed.report is None else resumed.report.tiers,
        "recovered": recovered,
        "parts": [float(local_part(p).double().sum()) for p in model.parameters()]
        if recovered is not None
        else [],
        "shared": [p.double().sum().item() for n, p in model.named_parameters() if n.startswith("shared")],
        "rate": optimizer.param_groups[0]["lr"],
        "head": session.head_step,
        "errors": session.stats.errors,
        "last_error": session.stats.last_error,
        "warned": warned,
        "saved_at": saved_at,
        "interval": cadence and cadence.interval,
        "proposed": cadence and cadence.proposed,
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


def descend(rank: int, world: int, folder: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Resume, and take `steps` iterations, each of which shrinks the state by 5 %; then what a loss of rank 1 costs.

    Options: `die` (a rank) at the end; what is `refused` (`max_rework`), and arguments of `recover`; `drained`: wait
    for the store after each iteration.
    """
    model = Bowl()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    Path(folder, "arena").mkdir(exist_ok=True)
    with scarctl.attach(
        model,
        optimizer,
        store=f"{folder}/store",
        interval=2,
        fraction=0.45,
        selection=scarctl.Selection(policy="round"),
        settings=scarctl.Settings(arena_dir=f"{folder}/arena", daemon=False),
    ) as session:
        resumed = session.resume()
        for _ in range(steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            if options.get("drained"):
                session._saving.finish()
                drained([session])
        if options.get("die") == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        report: dict[str, Any] = {}
        refused = None
        if "recover" in options:
            before = values(model, optimizer)["rows"].norm()
            try:
                session.recover("rank:1", max_rework=options["refused"])
            except ScarError as error:
                refused = error.kind
            report = session.recover("rank:1", **options["recover"]).to_json()
            after = values(model, optimizer)["rows"].norm()
            report["truth"] = float(torch.log(after / before) / -torch.log(torch.tensor(0.95)))
    ranks = None if resumed.ranks is None else dict(resumed.ranks)
    return {"step": resumed.step, "ranks": ranks, "report": report, "refused": refused}


class Commas(nn.Module):
    """A model with parameters of the same size, one of which has a comma in its name."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "a,b"):
            self.register_parameter(name, nn.Parameter(torch.ones(ROWS, 64)))


def lose(rank: int, world: int, folder: str, losses: list[str | list[str]]) -> list[Any]:
    """Recover one loss after the other. Return for each the restored partitions, or the error's message and hint."""
    model = Commas()
    if world > 1:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    Path(folder, "arena").mkdir(exist_ok=True)
    found: list[Any] = []
    with scarctl.attach(
        model,
        optimizer,
        store=f"{folder}/store",
        settings=scarctl.Settings(arena_dir=f"{folder}/arena", daemon=False),
        partitioning=scarctl.Partitioning(rows={"*": 64}),
    ) as session:
        session.resume()
        torch.stack([p.sum() for p in model.parameters()]).sum().backward()
        optimizer.step()
        session.checkpoint(full=True, wait=True)
        for lost in losses:
            try:
                marked = session.mark_lost(lost)
                found.append(session.recover(lost).restored_partitions)
                assert marked == found[-1], "each rank marks its own"
            except UsageError as error:
                found.append([error.message, error.hint])
        marked = session.mark_lost("a")
        assert session.recover().restored_partitions == marked
        refused = ""
        try:
            session.recover()
        except UsageError as error:
            refused = error.message
        assert "nothing is marked" in refused
    return found


def note_checkpoints(steps: list[int]) -> None:
    """Add to `steps` each step after which a regular checkpoint is due."""
    due = Cadence.due

    def noting(self: Cadence, now: float, step: int) -> bool:
        found = due(self, now, step)
        if found:
            steps.append(step)
        return found

    Cadence.due = noting  # type: ignore[method-assign]


def slow_store(seconds: float) -> None:
    """Make every later commit of this process take so much longer."""
    commit = StoreWriter.commit

    def slow(self: StoreWriter, *arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return commit(self, *arguments, **named)

    StoreWriter.commit = slow  # type: ignore[method-assign]


def die_in(place: str) -> None:
    """End this process by SIGKILL when it reaches `place`, one of `PLACES`."""
    owner, name, calls = PLACES[place]
    real, left = getattr(owner, name), [calls]

    def deadly(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    setattr(owner, name, deadly)


def refused(rank: int, world: int, kind: str, folder: str, changes: dict[str, Any]) -> str:
    """Return the error that `attach` or `resume` raises if rank 1 differs in `changes`."""
    mine = changes if rank == 1 else {}
    collectives.PATIENCE = 3.0
    if mine.get("absent"):
        return ""
    if mine.get("store"):
        folder = mine["store"]
    Path(folder, "arena").mkdir(exist_ok=True)
    model, optimizer = build(kind, **mine.get("model", {}))
    settings = {"store": f"{folder}/store", "arena_dir": f"{folder}/arena", "daemon": False}
    try:
        session = scarctl.attach(model, optimizer, **grouped(**{**settings, **mine.get("settings", {})}))
    except ScarError as error:
        return f"{error.kind}: {error}"
    session.close()
    return "not refused"


def all_have(seen: bool) -> bool:
    """Return whether all ranks have seen something."""
    told = torch.tensor([int(seen)])
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def load(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that `train` kept."""
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found
