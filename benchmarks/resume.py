"""Measure a resume from a dead process's memory, compared with loading the same state from files.

python benchmarks/resume.py [--rounds 5] [--folder DIR]

The state is that of GPT-2 small with AdamW: 1.49 GB. A training process saves it with scarctl and with the others, and
is killed. Every case is a new process that builds model and optimizer, as every training script does, and then brings
the state back. Measured is the last part: from model and optimizer as they are built to model and optimizer as they
were. Files are in the page cache. Every case checks what it got, unmeasured.

  scarctl, memory    session.resume() while the arena is there: creates the optimizer's slots and copies
  scarctl, attach    the same with attach() before it: store, daemon
  scarctl, store     session.resume() after the arena is gone
  torch.load         torch.load(weights_only=True), load_state_dict of model and optimizer
  safetensors        load_file; copied into the parameters, cloned into the optimizer's slots: what load_file gives is
                     the mapped file, which is read when it is used
  safetensors, checked  the same, and a checksum (XXH3) of every tensor: the limit for what checks all that it reads
  DCP load           slots of zeros, then torch.distributed.checkpoint.load into the tensors
  plain copy         copy_ of as many bytes, tensor by tensor, between two states that exist already (the aim for
                     memory is at least 0.7 of its speed)
  plain copy, new    the same into slots of zeros that are made first, as a resume has to

One line per case: speed relative to the plain copy of the same round, time relative to the case's limit in the same
round, seconds with the range, CPU seconds, GB/s.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from timing import arenas, interleaved, parser, print_table, ratio, scratch, settle, spread
from training import Model, build, tensors, whole_state

import scarctl

SLOTS = ("exp_avg", "exp_avg_sq")
LIMITS = {
    "scarctl, memory": "plain copy, new",
    "scarctl, attach": "plain copy, new",
    "scarctl, store": "safetensors, checked",
}
"""The case that bounds the speed of another one, as far as is known."""


Taken: TypeAlias = tuple[float, float]
"""Seconds, and CPU seconds of the process: those say something on a busy machine, too."""


def now() -> Taken:
    return time.perf_counter(), time.process_time()


def since(start: Taken) -> Taken:
    wall, cpu = now()
    return wall - start[0], cpu - start[1]


class Bench:
    """Folders, and what new processes do in them."""

    def __init__(self, folder: Path, arena_dir: str, scale: int) -> None:
        self.folder = folder
        self.arena_dir = arena_dir
        self.scale = scale

    def attach(self, model: Model, optimizer: torch.optim.AdamW, arena_dir: str) -> scarctl.Session:
        return scarctl.attach(
            model,
            optimizer,
            store=self.folder / "store",
            settings=scarctl.Settings(arena_dir=arena_dir, on_error="raise"),
            interval=1 << 30,
        )

    def train(self) -> Taken:
        """Run the first process: one step, saved in every form. Leaves the arena behind."""
        model, optimizer = build(self.scale)
        session = self.attach(model, optimizer, self.arena_dir)
        optimizer.step()
        session.checkpoint(full=True, wait=True)
        state = dict(tensors(model, optimizer))
        torch.save(whole_state(model, optimizer), self.folder / "torch")
        safetensors.torch.save_file(state, self.folder / "safetensors")
        dcp.save(state, checkpoint_id=self.folder / "dcp", no_dist=True)
        return 0.0, 0.0

    def memory(self, *, attach: bool = False) -> Taken:
        """Resume from the arena that the process before has left."""
        model, optimizer = build(self.scale)
        began = now()
        session = self.attach(model, optimizer, self.arena_dir)
        start = began if attach else now()
        resumed = session.resume()
        taken = since(start)
        assert resumed.consistent
        assert resumed.report is not None
        assert set(resumed.report.tiers) == {"memory"}, resumed.report.tiers
        return self.checked(taken, model, optimizer)

    def store(self) -> Taken:
        """Resume from the store, on a host that has no arena."""
        model, optimizer = build(self.scale)
        elsewhere = self.folder / "elsewhere"
        with arenas(elsewhere.parent) as folder:
            session = self.attach(model, optimizer, folder)
            start = now()
            resumed = session.resume()
            taken = since(start)
            assert resumed.report is not None
            assert set(resumed.report.tiers) == {"store"}, resumed.report.tiers
            session.close(seal=False)
        return self.checked(taken, model, optimizer)

    def torch_load(self) -> Taken:
        model, optimizer = build(self.scale)
        start = now()
        state = torch.load(self.folder / "torch", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return self.checked(since(start), model, optimizer)

    def safetensors(self, *, check: bool = False) -> Taken:
        model, optimizer = build(self.scale)
        start = now()
        state = safetensors.torch.load_file(self.folder / "safetensors")
        for tensor in state.values() if check else ():
            xxhash.xxh3_64_intdigest(tensor.numpy())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(state[name])
                optimizer.state[parameter] |= {slot: state[f"{name}/{slot}"].clone() for slot in SLOTS}
        return self.checked(since(start), model, optimizer)

    def dcp(self) -> Taken:
        model, optimizer = build(self.scale)
        start = now()
        make_slots(model, optimizer)
        dcp.load(dict(tensors(model, optimizer)), checkpoint_id=self.folder / "dcp", no_dist=True)
        return self.checked(since(start), model, optimizer)

    def copy(self, *, new: bool = False) -> Taken:
        model, optimizer = build(self.scale)
        saved = safetensors.torch.load_file(self.folder / "safetensors")
        source = {name: tensor.clone() for name, tensor in saved.items()}
        if not new:
            make_slots(model, optimizer)
            for _, tensor in tensors(model, optimizer):
                tensor.fill_(1)
        start = now()
        if new:
            make_slots(model, optimizer)
        for name, tensor in tensors(model, optimizer):
            tensor.copy_(source[name])
        return self.checked(since(start), model, optimizer)

    def checked(self, taken: Taken, model: Model, optimizer: torch.optim.AdamW) -> Taken:
        """Check that the state equals the saved one, and return `taken`."""
        with safetensors.safe_open(self.folder / "safetensors", "pt") as file:
            wrong = [n for n, t in tensors(model, optimizer) if not torch.equal(t, file.get_tensor(n))]
        assert not wrong, wrong[:3]
        return taken


def make_slots(model: Model, optimizer: torch.optim.AdamW) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter] |= {slot: torch.zeros_like(parameter) for slot in SLOTS}


def in_new_process(call: Callable[[], Taken]) -> Taken:
    """Return the result of `call` in a process that is killed afterwards, so that it can tidy nothing up."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writable, json.dumps(call()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    if not answer:
        sys.exit("a case failed")
    settle()
    wall, cpu = json.loads(answer)
    return wall, cpu


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--scale", type=int, default=1, help="divide the state's size by this")
    args = options.parse_args()
    # DCP warns that it runs alone: that is meant.
    warnings.simplefilter("ignore")
    os.environ["SCARCTL_DAEMON"] = "1"
    with scratch(args.folder) as folder, arenas(folder) as arena_dir:
        bench = Bench(folder, arena_dir, args.scale)
        in_new_process(bench.train)
        nbytes = sum(f.stat().st_size for f in [folder / "safetensors"])
        made: dict[str, Callable[[], Taken]] = {
            "scarctl, memory": bench.memory,
            "scarctl, attach": lambda: bench.memory(attach=True),
            "scarctl, store": bench.store,
            "torch.load": bench.torch_load,
            "safetensors": bench.safetensors,
            "safetensors, checked": lambda: bench.safetensors(check=True),
            "DCP load": bench.dcp,
            "plain copy": bench.copy,
            "plain copy, new": lambda: bench.copy(new=True),
        }
        cpu: dict[str, list[float]] = {name: [] for name in made}

        def measured(name: str) -> float:
            wall, used = in_new_process(made[name])
            cpu[name].append(used)
            return wall

        seconds = interleaved({name: partial(measured, name) for name in made}, args.rounds)
    rows = [
        (
            name,
            f"{ratio(seconds['plain copy'], taken):.2f}",
            f"{ratio(taken, seconds[LIMITS[name]]):.2f}x" if name in LIMITS else "",
            spread(taken),
            spread(cpu[name][1:], digits=2),
            f"{nbytes / statistics.median(taken) / 1e9:.2f}",
        )
        for name, taken in seconds.items()
    ]
    print_table(("resume: way", "of a plain copy", "of its limit", "s (range)", "CPU s", "GB/s"), rows)


if __name__ == "__main__":
    main()
