"""Measure training on a GPU: its step with a session, the stall of a checkpoint, GPU memory, and the way back.

python benchmarks/gpu.py [--rounds 5] [--width 1024] [--layers 24] [--steps 32] [--folder DIR]

A transformer in bfloat16 (autocast) with a fused AdamW: float32 parameters and moments, 3.9 GB by default. Arms take
turns; what an arm still has to write is waited for between arms, unmeasured.

  none                 no checkpoints
  scarctl              an eighth of the bytes every 4 steps, with the arena pinned
  scarctl, not pinned  the same with Settings(pin_memory=False)
  scarctl, default     attach's defaults: the interval follows from the overhead that it measures
  DCP, pinned          async_save of everything every 32 steps (equal bytes), staged in pinned memory in a thread that
                       is waited for before the next optimizer step: its mode with the least stall
  torch.save           of everything every 32 steps, as a loop without a library does

Stalls are per checkpoint: for scarctl all hooks and waits (`session.stats.stall_seconds`, with waits for the GPU as far
as it had nothing to do), for DCP its calls and the waits for its staging.

Then copies alone (an eighth, from the GPU into pinned memory that is there: the limit of a stall that nothing hides),
memory of the GPU that a session takes at most, and the whole state read back onto the GPU: by `resume` from this host's
memory and from the store, `torch.load`, safetensors, and DCP's load.
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from timing import arenas, interleaved, parser, print_table, ratio, scratch, settle, spread
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from training import tensors, whole_state

import scarctl

INTERVAL, PART, VOCABULARY = 4, 1 / 8, 16384
PLAIN = "none"


class Model(nn.Module):
    """Token embedding, transformer blocks, head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        block = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(ids)))  # type: ignore[no-any-return]


class Arm:
    """A training of its own: `steps` steps at a time."""

    def __init__(self, folder: Path, given: Any) -> None:
        torch.manual_seed(0)
        self.folder, self.steps = folder, given.steps
        self.model = Model(given.width, given.layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(0, VOCABULARY, (given.batch, given.context), device="cuda")
        self.worst: list[float] = []

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            out = self.model(self.ids)
        loss = nn.functional.cross_entropy(out[:, :-1].flatten(0, 1).float(), self.ids[:, 1:].flatten())
        loss.backward()
        self.before()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def before(self) -> None:
        """Called before an optimizer's step."""

    def after(self, number: int) -> None:
        """Called after step `number` of an arm."""

    def settle(self) -> None:
        """Called after an arm, unmeasured."""

    def run(self) -> float:
        """Return the seconds per step."""
        torch.cuda.synchronize()
        began = last = time.perf_counter()
        worst = 0.0
        for number in range(self.steps):
            self.step()
            self.after(number)
            if not number % 2:
                torch.cuda.synchronize()  # as a loop that reads its loss now and then
            now = time.perf_counter()
            worst, last = max(worst, now - last), now
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / self.steps
        self.worst.append(worst)
        self.settle()
        settle()
        return seconds


class Ours(Arm):
    def __init__(self, folder: Path, given: Any, base: str, **options: Any) -> None:
        super().__init__(folder, given)
        settings = {"on_error": "raise", "arena_dir": base, **options.pop("settings", {})}
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=folder / "store",
            settings=scarctl.Settings(**settings),
            **options,
        )
        self.stalls: list[float] = []
        self.session.resume()
        self.step()
        self.step()
        self.settle()

    def run(self) -> float:
        stats = self.session.stats
        stall, made = stats.stall_seconds, stats.checkpoints
        seconds = super().run()
        self.stalls.append((stats.stall_seconds - stall) / max(1, stats.checkpoints - made))
        return seconds

    def settle(self) -> None:
        end = time.perf_counter() + 60
        while self.session.lag and time.perf_counter() < end:
            time.sleep(0.01)


class Dcp(Arm):
    def __init__(self, folder: Path, given: Any) -> None:
        super().__init__(folder, given)
        self.stager = DefaultStager(StagingOptions(True, True, True, True))
        self.saved: Any = None
        self.stalls: list[float] = []

    def before(self) -> None:
        if self.saved is not None and not self.saved.staging_completion.done():
            began = time.perf_counter()
            self.saved.staging_completion.result()
            self.stalls[-1] += time.perf_counter() - began

    def after(self, number: int) -> None:
        if number % (INTERVAL * 8) == INTERVAL * 8 - 2:
            began = time.perf_counter()
            self.saved = dcp.async_save(
                # Plain dicts: some versions of its stager do not know the attributes of a module's OrderedDict.
                {"model": dict(self.model.state_dict()), "optimizer": dict(self.optimizer.state_dict())},
                checkpoint_id=self.folder / "dcp",
                no_dist=True,
                async_stager=self.stager,
            )
            self.stalls.append(time.perf_counter() - began)

    def settle(self) -> None:
        if self.saved is not None:
            self.saved.upload_completion.result()
            shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        self.saved = None


class Save(Arm):
    def after(self, number: int) -> None:
        if number % (INTERVAL * 8) == INTERVAL * 8 - 2:
            torch.save(whole_state(self.model, self.optimizer), self.folder / "whole.pt")


def steps(folder: Path, given: Any, base: str) -> None:
    """Print the table of steps."""
    fixed = {"interval": INTERVAL, "fraction": PART}
    makes: dict[str, Callable[[Path], Arm]] = {
        PLAIN: lambda where: Arm(where, given),
        "scarctl": lambda where: Ours(where, given, base, **fixed),
        "scarctl, not pinned": lambda where: Ours(
            where, given, base, settings={"pin_memory": False}, **fixed
        ),
        "scarctl, default": lambda where: Ours(where, given, base),
        "DCP, pinned": lambda where: Dcp(where, given),
        "torch.save": lambda where: Save(where, given),
    }
    arms: dict[str, Arm] = {}
    memory: dict[str, float] = {}
    for number, (name, make) in enumerate(makes.items()):
        where = folder / str(number)
        where.mkdir()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        arms[name] = make(where)
        arms[name].run()
        memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    seconds = interleaved({name: arm.run for name, arm in arms.items()}, given.rounds)
    rows = []
    for name, arm in arms.items():
        usual = statistics.median(seconds[PLAIN])
        stall = ""
        if isinstance(arm, Ours):
            stall = spread(arm.stalls[-given.rounds :], 1e-3, 1)
            stall += f" (interval {arm.session.stats.interval})"
        elif isinstance(arm, Dcp):
            stall = spread(arm.stalls[-given.rounds :], 1e-3, 1)
        rows.append(
            [
                name,
                f"{100 * (ratio(seconds[name], seconds[PLAIN]) - 1):+.1f} %",
                spread(seconds[name], 1e-3, 1),
                f"{(max(arm.worst[-given.rounds :]) - usual) * 1e3:.0f}",
                stall,
                f"{memory[name]:.2f}",
            ]
        )
    print_table(["steps", "slower", "ms per step", "worst, ms more", "stall, ms", "GPU memory, GiB"], rows)
    for arm in arms.values():
        if isinstance(arm, Ours):
            arm.session.close()


def copies(given: Any) -> None:
    """Print the limit of a stall."""
    arm = Arm(Path(), given)
    arm.step()
    flat = [t.view(-1)[: max(1, int(t.numel() * PART))] for _, t in tensors(arm.model, arm.optimizer)]
    total = sum(t.nbytes for t in flat)
    for pinned in (True, False):
        kept = [torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned) for t in flat]
        found = []
        for _ in range(given.rounds + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for target, source in zip(kept, flat, strict=True):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
        rate = total / 2**30 / statistics.median(found[1:])
        print(
            f"plain copy of 1/8 ({total >> 20} MiB), pinned {pinned}: {spread(found[1:], 1e-3, 1)} ms, {rate:.1f} GiB/s"
        )


def back(folder: Path, given: Any, base: str) -> None:
    """Print the table of the way back."""
    where = folder / "back"
    where.mkdir()
    first = Ours(where, given, base, interval=INTERVAL)
    first.session.close()
    state = whole_state(first.model, first.optimizer)
    torch.save(state, where / "whole.pt")
    flat = {name: t.contiguous() for name, t in tensors(first.model, first.optimizer)}
    safetensors.torch.save_file(flat, where / "whole.safetensors")
    dcp.save(dict(flat), checkpoint_id=where / "dcp", no_dist=True)
    expected = {name: t.clone() for name, t in flat.items()}

    def fresh() -> Arm:
        arm = Arm(where, given)
        arm.step()  # its optimizer has slots
        torch.cuda.synchronize()
        return arm

    def checked(arm: Arm, seconds: float) -> float:
        live = dict(tensors(arm.model, arm.optimizer))
        assert all(torch.equal(live[name], expected[name]) for name in expected)
        return seconds

    def ours(source: str) -> float:
        arm = Arm(where, given)
        torch.cuda.synchronize()
        elsewhere = base if source == "memory" else f"{base}/{time.monotonic_ns()}"
        os.makedirs(elsewhere, exist_ok=True)
        began = time.perf_counter()
        session = scarctl.attach(
            arm.model,
            arm.optimizer,
            store=where / "store",
            settings=scarctl.Settings(arena_dir=elsewhere, daemon=False),
        )
        resumed = session.resume()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        assert resumed.consistent, resumed
        checked(arm, seconds)
        session.close()
        return seconds

    def load() -> float:
        arm = fresh()
        began = time.perf_counter()
        read = torch.load(where / "whole.pt", map_location="cuda", weights_only=True)
        arm.model.load_state_dict(read["model"])
        arm.optimizer.load_state_dict(read["optimizer"])
        torch.cuda.synchronize()
        return checked(arm, time.perf_counter() - began)

    def safe() -> float:
        arm = fresh()
        live = dict(tensors(arm.model, arm.optimizer))
        began = time.perf_counter()
        for name, tensor in safetensors.torch.load_file(where / "whole.safetensors", device="cuda").items():
            live[name].copy_(tensor)
        torch.cuda.synchronize()
        return checked(arm, time.perf_counter() - began)

    def distributed() -> float:
        arm = fresh()
        live = dict(tensors(arm.model, arm.optimizer))
        began = time.perf_counter()
        dcp.load(live, checkpoint_id=where / "dcp", no_dist=True)
        torch.cuda.synchronize()
        return checked(arm, time.perf_counter() - began)

    cases = {
        "attach and resume, memory": functools.partial(ours, "memory"),
        "attach and resume, store": functools.partial(ours, "store"),
        "torch.load": load,
        "safetensors": safe,
        "DCP load": distributed,
    }
    found = interleaved(cases, given.rounds)
    rows = [[name, f"{ratio(s, found['torch.load']):.2f}", spread(s)] for name, s in found.items()]
    print_table(["way back, whole state", "of torch.load", "seconds"], rows)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=32)
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--layers", type=int, default=24)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--context", type=int, default=512)
    options.add_argument("--only", choices=("steps", "copies", "back"))
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "there is no GPU: benchmarks/stall.py, step_time.py and resume.py measure on the host"
        )
    warnings.simplefilter("ignore")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    with scratch(given.folder) as folder, arenas(given.folder) as base:
        if given.only in (None, "copies"):
            copies(given)
        if given.only in (None, "steps"):
            steps(folder, given, base)
        if given.only in (None, "back"):
            back(folder, given, base)


if __name__ == "__main__":
    main()
