"""Measure a session's cost: per step, per hook, and with ten thousand parameters; each compared with its limit.

    python benchmarks/overhead.py [--rounds 9] [--seconds 1] [--only steps|hooks|many] [--after N] [--folder DIR]

steps: forward, backward and AdamW of square linear layers on the host, bare and with a session of default options (a
checkpoint every ten steps; `--interval` for another), in blocks of `--seconds` that take turns. "limit" is the same
model without a session once more: what the machine itself adds between two blocks. More time per step, in percent;
medians over rounds with the range. `--after N` begins when the session has made N checkpoints: its first eight may
take eight times its budget. The next row has the training thread's own time, and the checkpoints in these blocks.

hooks: microseconds that a step takes longer in the training thread's own time, which other processes disturb less than
the clock: with a session in which no checkpoint is due, next to a pair of empty hooks; the least of all rounds, also
where nothing but the hooks runs, so that the processor's caches have them. Then the milliseconds of
`session.stats.last_stall_seconds` for a checkpoint of 444 small tensors, copied while the step sleeps, next to reading
their versions (`tensor._version`) once; and the thread's own time for the two halves of one, again the least.

many: a model of `--parameters` tensors of 8 values: `attach`, the first step with its checkpoint, `resume`, in CPU
seconds of this process, next to the same model's own first step and `torch.load` of its state; and a step as above.
"""

from __future__ import annotations

import gc
import io
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import arenas, interleaved, parser, print_table, scratch, spread
from torch import nn
from training import build

import scarctl

SIZES = ((4, 64, 32), (4, 512, 64), (12, 1024, 64))
"""Layers, their width, rows of a batch."""
NEVER = 1 << 30
Row = tuple[str, str, str]


class Training:
    """A separate model, perhaps with a session."""

    def __init__(self, model: nn.Module, data: torch.Tensor | None) -> None:
        self.model = model
        self.data = data
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.session: scarctl.Session | None = None
        self.count = 0
        self.own: list[float] = []
        if data is None:
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)

    def attach(self, store: Path, arena_dir: str, **options: Any) -> scarctl.Session:
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=store,
            settings=scarctl.Settings(arena_dir=arena_dir, on_error="raise"),
            **options,
        )
        return self.session

    def step(self) -> None:
        if self.data is not None:
            self.optimizer.zero_grad()
            self.model(self.data).square().mean().backward()
        self.optimizer.step()

    def steps(self, seconds: float) -> float:
        """Train as `per_step` does. Keep also the seconds of this thread's own time per step in `own`."""
        start, before = time.thread_time(), self.count
        taken = self.per_step(seconds)
        self.own.append((time.thread_time() - start) / (self.count - before))
        return taken

    def per_step(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
        """Train for about so many seconds. Return seconds per step."""
        end, count, start = time.perf_counter() + seconds, 0, clock()
        while time.perf_counter() < end or not count:
            self.step()
            count += 1
        self.count += count
        taken = (clock() - start) / count
        if self.data is not None:
            self.model(self.data)  # what waits for this model's next forward ends here, and not in another's
        return taken

    def close(self) -> None:
        if self.session is not None:
            self.session.close(seal=False)


def layers(count: int, width: int, rows: int) -> Training:
    """Return a training of square layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(width, width), nn.ReLU())))
    return Training(model, torch.randn(rows, width))


class Tiny(nn.Module):
    """Many parameters of 8 values."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(count)])


def more(taken: dict[str, list[float]], name: str, base: str = "bare") -> str:
    """Return by how much it takes longer than the base of the same round, in percent."""
    ratios = [100 * (value / of - 1) for value, of in zip(taken[name], taken[base], strict=True)]
    return f"{spread(ratios, digits=1)} %"


def steps(folder: Path, arena_dir: str, args: Any) -> list[Row]:
    """Return rows of whole steps."""
    rows = []
    default = torch.get_num_threads()
    for threads in sorted({1, min(2, default)}):
        torch.set_num_threads(threads)
        for count, width, batch in SIZES:
            kinds = {name: layers(count, width, batch) for name in ("bare", "limit", "session")}
            options = {} if args.interval is None else {"interval": args.interval}
            session = kinds["session"].attach(folder / f"{threads}-{width}", arena_dir, **options)
            while session.stats.checkpoints < args.after:
                kinds["session"].step()
            before = session.stats.checkpoints
            cases = {name: lambda t=t: t.steps(args.seconds) for name, t in kinds.items()}  # type: ignore[misc]
            taken = interleaved(cases, args.rounds)
            made = session.stats.checkpoints - before
            kinds["session"].close()
            what = f"{statistics.median(taken['bare']) * 1e3:.2f} ms, {count} layers of {width}, threads: {threads}"
            rows.append((f"step of {what}", more(taken, "session"), more(taken, "limit")))
            own = {name: t.own[1:] for name, t in kinds.items()}
            what = f"the same, CPU of the training thread; {made} checkpoints"
            rows.append((what, more(own, "session"), more(own, "limit")))
    torch.set_num_threads(default)
    return rows


def hooks(folder: Path, arena_dir: str, args: Any) -> list[Row]:
    """Return rows of hooks alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kinds = {name: layers(*SIZES[0]) for name in ("bare", "empty", "session")}
    kinds["empty"].optimizer.register_step_pre_hook(lambda *_: None)
    kinds["empty"].optimizer.register_step_post_hook(lambda *_: None)
    kinds["session"].attach(folder / "hooks", arena_dir, interval=NEVER)
    cases = {
        name: lambda t=t: t.per_step(args.seconds / 4, time.thread_time)  # type: ignore[misc]
        for name, t in kinds.items()
    }
    taken = interleaved(cases, args.rounds)
    for training in kinds.values():
        training.optimizer.zero_grad()  # a step without gradients does nothing but call hooks
    alone = interleaved({name: partial(_least, t.optimizer.step) for name, t in kinds.items()}, args.rounds)
    kinds["session"].close()
    # Other processes only add to a time, so the least of each case says most.
    least = {name: min(found) for name, found in taken.items()}
    rows = [
        (
            "hooks of a step, no checkpoint due, us",
            *(f"{1e6 * (least[name] - least['bare']):.0f}" for name in ("session", "empty")),
        ),
        (
            "the same hooks again and again, us",
            *(f"{1e6 * (min(alone[name]) - min(alone['bare'])):.1f}" for name in ("session", "empty")),
        ),
    ]

    model, optimizer = build(64)
    session = scarctl.attach(
        model,
        optimizer,
        store=folder / "tensors",
        interval=10,
        settings=scarctl.Settings(arena_dir=arena_dir, on_error="raise"),
    )
    stalls, spent, quiet, versions = [], [], [], []
    for number in range(10 * (args.rounds + 1) + 2):
        started = time.thread_time()
        optimizer.step()
        used = time.thread_time() - started
        time.sleep(0.05)
        if number <= 10:
            continue
        if number % 10 == 9:  # the checkpoint begins
            spent.append(used)
        elif number % 10 == 0:  # and ends
            spent[-1:] = [spent[-1] + used] if spent else []
            stalls.append(session.stats.last_stall_seconds)
            states = [value for state in optimizer.state.values() for value in state.values()]
            start = time.perf_counter()
            _ = [tensor._version for tensor in states]
            versions.append(time.perf_counter() - start)
        else:
            quiet.append(used)
    session.close(seal=False)
    torch.set_num_threads(threads)
    what = "hooks of a step with a checkpoint, 444 tensors, ms"
    beyond = [each - 2 * min(quiet) for each in spent]
    return [
        *rows,
        (what, spread(stalls, 1e-3), spread(versions, 1e-3)),
        (f"{what} of CPU, least", f"{1e3 * min(beyond):.2f}", f"{1e3 * min(versions):.2f}"),
    ]


def _least(call: Callable[[], object]) -> float:
    """Return the seconds of this thread that a call takes: the least of a hundred times fifty."""
    found = []
    for _ in range(100):
        start = time.thread_time()
        for _ in range(50):
            call()
        found.append((time.thread_time() - start) / 50)
    return min(found)


def many(folder: Path, arena_dir: str, args: Any) -> list[Row]:
    """Return rows of a model with very many parameters."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bare, saved = Training(Tiny(args.parameters), None), Training(Tiny(args.parameters), None)
    gc.collect()
    attach = _seconds(lambda: saved.attach(folder / "many", arena_dir))
    first, own = _seconds(saved.step), _seconds(bare.step)
    kinds = {"bare": bare, "session": saved}
    cases = {name: lambda t=t: t.per_step(args.seconds) for name, t in kinds.items()}  # type: ignore[misc]
    taken = interleaved(cases, args.rounds)
    assert saved.session is not None
    saved.session.close()
    file = io.BytesIO()
    torch.save([saved.model.state_dict(), saved.optimizer.state_dict()], file)
    file.seek(0)
    load = _seconds(lambda: torch.load(file))
    again = Training(Tiny(args.parameters), None)
    session = again.attach(folder / "many", arena_dir)
    resume = _seconds(session.resume)
    again.close()
    torch.set_num_threads(threads)
    name = f"{args.parameters:,} parameters"
    return [
        (f"{name}: step of {statistics.median(taken['bare']) * 1e3:.0f} ms", more(taken, "session"), "0 %"),
        (f"{name}: attach, CPU s", f"{attach:.2f}", "-"),
        (f"{name}: first step with its checkpoint, CPU s", f"{first:.2f}", f"{own:.2f}"),
        (f"{name}: resume, CPU s", f"{resume:.2f}", f"{load:.2f}"),
    ]


def _seconds(call: Callable[[], object]) -> float:
    """Return the CPU seconds of this process that a call takes: other processes do not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--seconds", type=float, default=1.0, help="of training per block")
    options.add_argument("--after", type=int, default=0, help="checkpoints before the first block of steps")
    options.add_argument("--only", choices=("steps", "hooks", "many"))
    options.add_argument("--interval", type=int, help="iterations; default: that of attach")
    options.add_argument("--parameters", type=int, default=10_000)
    args = options.parse_args()
    found: list[Row] = []
    with scratch(args.folder) as folder, arenas(folder) as arena_dir:
        for part in (hooks, steps, many):
            if args.only in (None, part.__name__):
                found += part(folder, arena_dir, args)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print_table(("what", "with a session", "limit"), found)


if __name__ == "__main__":
    main()
