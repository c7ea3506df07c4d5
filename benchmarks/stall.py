"""Measure the stall of training per checkpoint: scarctl, DCP's async_save, torch.save, safetensors, in one process.

python benchmarks/stall.py [--rounds 7] [--work sleep|compute|both] [--seconds 0.3] [--folder DIR]

The state is that of GPT-2 small with AdamW: 1.49 GB. Every checkpoint is followed by `--work` (sleep: an accelerator
has the forward and backward; compute: this machine's cores have) and the next optimizer step. The stall is the time
that this thread spends in the saving call or hook, and waiting before the next optimizer step for what still reads the
state; not the time in which the work is slowed down by what runs alongside (see step_time.py for that).

  scarctl                         a partial checkpoint of 1/8 of the bytes: session.stats.last_stall_seconds
  scarctl, exact                  the same with tracker="exact", which compares with a copy of what the store has
  plain copy of 1/8               copy_ of as many bytes, from every tensor (the aim for scarctl is at most 1.25 of it)
  DCP async_save                  torch.distributed.checkpoint.async_save of the whole state, thread based
  DCP async_save, kept stager     the same with one DefaultStager for all saves, which keeps its memory
  DCP async_save, async staging   the same with a DefaultStager that copies in a thread; waits for it before the step
  torch.save, safetensors         of the whole state, into the page cache, without fsync

One line per case: the stall relative to the plain copy of the same round, its median in seconds with the range, and
bytes. With `--seconds 0` nothing hides what a checkpoint takes.
"""

from __future__ import annotations

import functools
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from timing import interleaved, parser, print_table, ratio, scratch, settle, spread
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from training import build, tensors, wait_durable, whole_state, work

import scarctl

INTERVAL = 2  # the step with the checkpoint, and the one that ends it
PART = 1 / 8
COPY = "plain copy of 1/8"
Work = Callable[[], None]


class Partial:
    """A training run with scarctl attached."""

    def __init__(self, folder: Path, scale: int, tracker: str) -> None:
        self.model, self.optimizer = build(scale)
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=folder / tracker,
            selection=scarctl.Selection(tracker=tracker),
            fraction=PART,
            interval=INTERVAL,
            settings=scarctl.Settings(on_error="raise"),
        )
        self.optimizer.step()  # its checkpoint is the whole initial state, once in a run
        self.optimizer.step()
        wait_durable(self.session, 1)
        self.nbytes = 0

    def stall(self, work: Work) -> float:
        """Make one partial checkpoint."""
        while self.session.head_step % INTERVAL != INTERVAL - 1:
            self.optimizer.step()
        saved, checkpoints = self.session.stats.saved_bytes, self.session.stats.checkpoints
        settle()
        self.optimizer.step()
        work()
        self.optimizer.step()
        assert self.session.stats.checkpoints == checkpoints + 1, self.session.stats
        stall = self.session.stats.last_stall_seconds
        self.nbytes = self.session.stats.saved_bytes - saved
        wait_durable(self.session, self.session.head_step - 1)
        return stall


class Whole:
    """The same training run without scarctl: each method saves the whole state once."""

    def __init__(self, folder: Path, scale: int) -> None:
        self.path = folder / "whole"
        self.model, self.optimizer = build(scale)
        self.optimizer.step()
        self.nbytes = sum(t.nbytes for _, t in tensors(self.model, self.optimizer))
        flat = [t.view(-1)[: round(PART * t.numel())] for _, t in tensors(self.model, self.optimizer)]
        self.eighths = [(t.clone(), t) for t in flat]
        self.kept = DefaultStager(StagingOptions(False, False, False, False))
        self.threaded = DefaultStager(StagingOptions(False, False, True, False))

    def dcp(self, work: Work, stager: DefaultStager | None) -> float:
        """DCP's async_save."""
        settle()
        start = time.perf_counter()
        saved: Any = dcp.async_save(
            whole_state(self.model, self.optimizer),
            checkpoint_id=self.path,
            no_dist=True,
            async_stager=stager,
        )
        stall = time.perf_counter() - start
        work()
        start = time.perf_counter()
        if stager is self.threaded:
            saved.staging_completion.result()
            saved = saved.upload_completion
        stall += time.perf_counter() - start
        self.optimizer.step()
        saved.result()
        shutil.rmtree(self.path)
        return stall

    def copy(self, work: Work) -> float:
        """Copies an eighth of every tensor into memory that is there."""
        settle()
        start = time.perf_counter()
        for target, source in self.eighths:
            target.copy_(source)
        stall = time.perf_counter() - start
        work()
        self.optimizer.step()
        return stall

    def blocking(self, work: Work, save: Callable[[], None]) -> float:
        """Return the time of a call that saves and returns."""
        settle()
        start = time.perf_counter()
        save()
        stall = time.perf_counter() - start
        work()
        self.optimizer.step()
        self.path.unlink()
        return stall

    def torch_save(self, work: Work) -> float:
        """torch.save of the state dicts."""
        return self.blocking(work, lambda: torch.save(whole_state(self.model, self.optimizer), self.path))

    def safetensors(self, work: Work) -> float:
        """safetensors' save_file of all tensors."""
        state = dict(tensors(self.model, self.optimizer))
        return self.blocking(work, lambda: safetensors.torch.save_file(state, self.path))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--work", choices=("sleep", "compute", "both"), default="both")
    options.add_argument("--seconds", type=float, default=0.3, help="of work between two steps")
    options.add_argument("--scale", type=int, default=1, help="divide the state's size by this")
    args = options.parse_args()
    # DCP warns that it runs alone and that it overwrites: both are meant.
    warnings.simplefilter("ignore")
    kinds = ("sleep", "compute") if args.work == "both" else (args.work,)
    with scratch(args.folder) as folder:
        whole = Whole(folder, args.scale)
        partial, exact = (Partial(folder, args.scale, tracker) for tracker in ("auto", "exact"))
        cases: dict[str, Callable[[Work], float]] = {
            COPY: whole.copy,
            "scarctl": partial.stall,
            "scarctl, exact": exact.stall,
            "DCP async_save": lambda work: whole.dcp(work, None),
            "DCP async_save, kept stager": lambda work: whole.dcp(work, whole.kept),
            "DCP async_save, async staging": lambda work: whole.dcp(work, whole.threaded),
            "torch.save": whole.torch_save,
            "safetensors save_file": whole.safetensors,
        }
        works = {kind: work(kind, args.seconds) for kind in kinds}
        seconds = interleaved(
            {
                f"{kind}: {name}": functools.partial(case, works[kind])
                for kind in kinds
                for name, case in cases.items()
            },
            args.rounds,
        )
        for run in (partial, exact):
            run.session.close()
    rows = []
    for name, taken in seconds.items():
        kind, case = name.split(": ")
        nbytes = partial.nbytes if case.startswith("scarctl") or case == COPY else whole.nbytes
        times = f"{ratio(taken, seconds[f'{kind}: {COPY}']):.2f}x"
        rows.append((name, times, spread(taken), f"{nbytes / 1e9:.2f}"))
    print_table(("work: checkpoint", "of the copy", "stall in s (range)", "GB"), rows)


if __name__ == "__main__":
    main()
