"""Kill one of several ranks under torchrun, and measure the time until the next step and the steps lost.

python benchmarks/ranks_recover.py [--kills 5] [--ranks 4] [--mb 200] [--interval 2] [--steps 20] [--folder DIR]

Every rank has `--mb` MB of parameters and AdamW's moments, by FSDP2. Before it trains the job saves its state once with
DCP. It trains `--steps` steps, with scarctl; then one rank ends itself with kill -9, torchrun ends the others, starts
all again, and so on. Every start brings the state back twice, in turn: with session.resume(), and with DCP's load of
the whole state into slots of zeros in a second model, as a job that saves with DCP would. Files are in the page cache.

First table, medians over kills with (lowest-highest), the slowest rank counts: seconds of every part from the kill to
the first new step. "engine" is torchrun noticing, ending the ranks, new processes, imports, process group and model:
the same for all ways. The imports are torch, DCP and scarctl, and a line below the table has the time of scarctl alone.
"CPU" is that of all ranks together while the state is brought back. Second table: steps of work lost. scarctl's
survivors continue where they were, so the loss is the age of the killed rank's copies. A job that saves everything
every 8 * interval steps, which are as many bytes, goes back to the last save, with all ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from ranked import build, latest, make_slots, run, tensors, total, wait_durable
from timing import parser, print_table, spread
from torch import distributed as dist

import scarctl
from scarctl.state.version import step_of

FULL = 8  # partial checkpoints per whole state


def worker(args: Any) -> None:
    """Run one rank of one start."""
    folder = Path(args.work_folder)
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    used = time.process_time()
    for name in ("scarctl.api", "scarctl_adapters.torch"):  # otherwise `attach` imports them
        importlib.import_module(name)
    imports = time.process_time() - used
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = build(args.mb)
    dist.barrier()
    found: dict[str, Any] = {"start": start, "ready": latest(time.time()), "imports": total(imports)}

    def load() -> None:
        found["dcp"], found["dcp CPU"] = dcp_load(args.mb, folder / "dcp")

    if start and start % 2:
        load()
    used, began = time.process_time(), time.perf_counter()
    session = scarctl.attach(
        model,
        optimizer,
        store=folder / "store",
        settings=scarctl.Settings(arena_dir=args.arena_dir, on_error="raise"),
        fraction=1 / FULL,
        interval=args.interval,
    )
    found["attach"] = latest(time.perf_counter() - began)
    with session:
        began = time.perf_counter()
        resumed = session.resume()
        found["CPU"] = time.process_time() - used
        found["resume"] = latest(time.perf_counter() - began)
        found["CPU"] = total(found["CPU"])
        began = time.perf_counter()
        step(optimizer)
        found["first"] = latest(time.perf_counter() - began)
        if resumed.report is not None:
            plan, lost = resumed.report.plan, resumed.ranks["lost"]
            ages = resumed.step - step_of(plan.version)
            sizes = plan.layout.partition_bytes[plan.ids]
            found |= {
                "step": resumed.step,
                "lost": lost,
                "oldest": int(ages.max()),
                "age": float(np.average(ages, weights=sizes)),
                "tiers": resumed.report.tiers,
            }
        if start and not start % 2:
            load()
        if start == 0:
            began = time.perf_counter()
            dcp.save(dict(tensors(model, optimizer)), checkpoint_id=folder / "dcp")
            found["saved"] = latest(time.perf_counter() - began)
            wait_durable(session)
        note(folder, rank, found)
        if start < args.kills:
            began = time.perf_counter()
            # Not always as many steps after a checkpoint.
            for _ in range(args.steps + start):
                time.sleep(args.seconds)
                step(optimizer)
            if rank == args.ranks // 2:
                pace = (time.perf_counter() - began) / (args.steps + start)
                note(folder, rank, {"killed": time.time(), "head": session.head_step, "pace": pace})
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(args.seconds)
            step(optimizer)
    dist.barrier()
    dist.destroy_process_group()


def step(optimizer: torch.optim.AdamW) -> None:
    """Make one iteration, which ends when all ranks have ended theirs."""
    dist.barrier()
    optimizer.step()


def dcp_load(mb: float, path: Path) -> tuple[float, float]:
    """Return the seconds in which DCP brings the state into a new model, and CPU seconds of all ranks."""
    model, optimizer = build(mb)
    dist.barrier()
    used, began = time.process_time(), time.perf_counter()
    make_slots(optimizer)
    dcp.load(dict(tensors(model, optimizer)), checkpoint_id=path)
    used = time.process_time() - used
    return latest(time.perf_counter() - began), total(used)


def note(folder: Path, rank: int, found: dict[str, Any]) -> None:
    """Add figures to this rank's file, for the report."""
    with (folder / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(found) + "\n")


def report(folder: Path, args: Any) -> None:
    """Print the tables."""
    lines = [
        [json.loads(line) for line in (folder / f"rank-{r}.jsonl").read_text().splitlines()]
        for r in range(args.ranks)
    ]
    victim = args.ranks // 2
    kills = [line for line in lines[victim] if "killed" in line]
    starts = [[line for line in rank if line.get("start")] for rank in lines]
    engine = [s["ready"] - kill["killed"] for s, kill in zip(starts[0], kills, strict=True)]

    def of(name: str) -> list[float]:
        return [s[name] for s in starts[0]]

    ours = [a + b for a, b in zip(of("attach"), of("resume"), strict=True)]
    rows = []
    for name, parts, used in (("scarctl", ours, of("CPU")), ("DCP load", of("dcp"), of("dcp CPU"))):
        whole = [e + p + f for e, p, f in zip(engine, parts, of("first"), strict=True)]
        relative = statistics.median(p / q for p, q in zip(parts, of("dcp"), strict=True))
        rows.append(
            (
                name,
                f"{relative:.2f}x",
                *(spread(values, digits=2) for values in (engine, parts, used, of("first"), whole)),
            )
        )
    print(f"{args.ranks} ranks of {args.mb:g} MB, {len(kills)} kills")
    print_table(("way", "of DCP's", "engine, s", "state, s", "CPU, s", "first step, s", "in all, s"), rows)
    print(f"scarctl: attach {spread(of('attach'), digits=2)} s, resume {spread(of('resume'), digits=2)} s")
    print(f"of engine, CPU of importing scarctl in all ranks: {spread(of('imports'), digits=2)} s\n")

    every = args.interval * FULL
    back: list[float] = [s["step"] - max(1, s["step"] // every * every) for s in starts[0]]
    print_table(
        ("steps lost", "median (range)", "ranks"),
        [
            ("scarctl, survivors", spread(behind(starts, kills, victim), digits=0), f"{args.ranks - 1}"),
            ("scarctl, killed: mean age by bytes", spread([s["age"] for s in starts[victim]], digits=1), "1"),
            ("scarctl, killed: oldest copy", spread([s["oldest"] for s in starts[victim]], digits=0), "1"),
            (f"full checkpoint every {every} steps", spread(back, digits=0), f"{args.ranks}"),
        ],
    )
    pace, saved = statistics.median(kill["pace"] for kill in kills), lines[0][0]["saved"]
    print(
        f"A step took {pace:.2f} s, DCP's save {saved:.2f} s, as long as {saved / pace:.0f} steps: until then the full"
    )
    print("checkpoint before it is the last one, which the table does not count.")
    tiers = [s["tiers"] for s in starts[victim]]
    print(
        f"lost, as every resume said: {[s['lost'] for s in starts[0]]}; the killed rank's copies from {tiers}"
    )


def behind(starts: list[list[dict[str, Any]]], kills: list[dict[str, Any]], victim: int) -> list[float]:
    """Return the number of steps that survivors do again."""
    return [max(0, kill["head"] - s["step"]) for s, kill in zip(starts[0], kills, strict=True)]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=5)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--mb", type=float, default=200, help="of parameters and moments on every rank")
    options.add_argument("--interval", type=int, default=2)
    options.add_argument("--steps", type=int, default=20, help="between two kills, at least")
    options.add_argument("--seconds", type=float, default=0.25, help="of work between two steps")
    run(options, __file__, worker, restarts=lambda args: args.kills, report=report)


if __name__ == "__main__":
    main()
