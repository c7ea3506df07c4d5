"""Measure bytes and stall of saving a DLRM of ten million rows, which TorchRec trains in the backward pass.

python benchmarks/sharded_tables.py [--rows 10000000] [--rounds 3] [--interval 5] [--folder DIR]

It needs TorchRec (`make frameworks` makes an environment), and says so if that is missing. One process, on a CPU: the
model and the trace of `recommender.py`, 680 MB with ten million rows. Every round takes `--interval` steps, and then a
checkpoint. The stall is the time that the training thread spends in the saving call or hook, and waiting before the
next backward pass. Ten million rows need 8 GB of memory.

  scarctl                       a partial checkpoint of at most 1/8 of the bytes
  scarctl, partitions of 4, 1   the same with `--per` rows in each partition
  scarctl, touched, of 4        the same with the first of `--per`, where the lookups say which rows have changed
  DCP async_save                torch.distributed.checkpoint.async_save of the whole state, thread based
  DCP async_save, kept stager   the same with one DefaultStager for all saves, which keeps its memory
  CPR-MFU, CPR-SSU              at most 1/8 of the rows, as CPR chooses them: `row_baselines.py`
  Check-N-Run, in 8 bits        all rows used since the last full checkpoint, which was before the first round

Rows that are chosen by lookups are copied, and a thread writes the copies with their numbers to a file with fsync: less
work than DCP or scarctl do. Quantizing happens in that thread. One line per case: bytes written per checkpoint, the
median of the stall with the range, and the time per step with everything that checkpoints and counting add to it.
Which choice loses less is the question of `lost_rows.py`.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from recommender import Ids, Training, alone
from row_baselines import Choice, MostUsed, SinceFull, SubSampled, in_8_bits
from timing import arenas, interleaved, parser, print_table, scratch, settle, spread
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from training import wait_durable

import scarctl

BAGS, IDS = 2048, 10
PARTS = 8
"""A partial checkpoint has 1/8 of the bytes."""


class Partial(Training):
    """With scarctl attached."""

    def __init__(self, rows: int, store: Path, arena: str, interval: int, tracker: Any, per: int) -> None:
        """per: rows per partition, 0 for the default."""
        super().__init__(rows, bags=BAGS, ids=IDS)
        self.interval, self.nbytes = interval, list[int]()
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=store,
            fraction=1 / PARTS,
            interval=interval,
            partitioning=scarctl.Partitioning(rows={"*.embedding_bags.*": per} if per else None),
            selection=scarctl.Selection(tracker=tracker),
            settings=scarctl.Settings(on_error="raise", arena_dir=arena),
        )
        self.session.resume()
        self.steps(2)  # the first checkpoint is of the whole state, once in a run
        wait_durable(self.session, 1)

    def stall(self) -> float:
        """Train until a checkpoint is due, and until it has been copied."""
        stats = self.session.stats
        while self.session.head_step % self.interval != self.interval - 1:
            self.steps(1)
        saved, count = stats.saved_bytes, stats.checkpoints
        settle()
        self.steps(2)
        assert stats.checkpoints == count + 1, stats
        self.nbytes.append(stats.saved_bytes - saved)
        stall = stats.last_stall_seconds
        wait_durable(self.session, self.session.head_step - 1)
        return stall


class Other(Training):
    """Without scarctl: all ways that need no state of their own but a few counters."""

    def __init__(self, rows: int, folder: Path, interval: int) -> None:
        super().__init__(rows, bags=BAGS, ids=IDS)
        self.steps(2)
        self.path, self.interval = folder / "saved", interval
        self.whole = sum(tensor.nbytes for tensor in self._tensors().values())
        self.kept = DefaultStager(StagingOptions(False, False, False, False))
        self._thread = ThreadPoolExecutor(1)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the state, by name."""
        named = [*self.model.state_dict().items()]
        for name, state in self.optimizer.state_dict()["state"].items():
            named += [(f"{name}/{key}", value) for key, value in state.items()]
        return {n: v.local_shards()[0].tensor if hasattr(v, "local_shards") else v for n, v in named}

    def all(self, stager: DefaultStager | None) -> float:
        """Train as long, and save everything with DCP."""
        self.steps(self.interval - 1)
        settle()
        start = time.perf_counter()
        saved: Any = dcp.async_save(
            self._tensors(), checkpoint_id=self.path, no_dist=True, async_stager=stager
        )
        stall = time.perf_counter() - start
        self.seconds += stall
        self.steps(1)
        saved.result()
        shutil.rmtree(self.path)
        return stall

    def chosen(self, choice: Choice, nbytes: list[int], *, quantized: bool = False) -> float:
        """Train as long, and save the rows that are chosen. nbytes: gets the bytes of the file."""
        self.steps(self.interval - 1, choice.note)
        settle()
        start = time.perf_counter()
        rows = choice.choose(self.rows // PARTS)
        saved = self._thread.submit(self._write, rows, *self.take(rows), quantized)
        stall = time.perf_counter() - start
        self.seconds += stall
        self.steps(1, choice.note)
        nbytes.append(saved.result())
        return stall

    def _write(self, rows: Ids, weights: torch.Tensor, sums: torch.Tensor, quantized: bool) -> int:
        stored = [*in_8_bits(weights), sums] if quantized else [weights, sums]
        with self.path.open("wb") as file:
            rows.astype(np.int32).tofile(file)
            for tensor in stored:
                tensor.numpy().tofile(file)
            file.flush()
            os.fsync(file.fileno())
            nbytes = file.tell()
        self.path.unlink()
        return nbytes


def timed(training: Training, call: Callable[[], float], per_step: list[float]) -> Callable[[], float]:
    """Note also the time per step, for everything that a call trains."""

    def measured() -> float:
        seconds, taken = training.seconds, training.taken
        stall = call()
        per_step.append((training.seconds - seconds) / (training.taken - taken))
        return stall

    return measured


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=10_000_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--interval", type=int, default=5, help="steps between two checkpoints")
    options.add_argument(
        "--per",
        type=lambda text: [int(one) for one in text.split(",")],
        default=[4, 1],
        help="rows in small partitions (default: 4,1)",
    )
    args = options.parse_args()
    if find_spec("torchrec") is None:
        sys.exit(print("TorchRec is not installed here: `make frameworks` makes an environment for it"))
    warnings.simplefilter("ignore")  # DCP's, that it runs alone and overwrites; and TorchRec's
    alone()
    with scratch(args.folder) as folder, arenas(args.folder) as arena:
        other = Other(args.rows, folder, args.interval)
        partial = {
            name: Partial(args.rows, folder / f"{tracker}{per}", arena, args.interval, tracker, per)
            for name, tracker, per in (
                ("scarctl", "auto", 0),
                *((f"scarctl, partitions of {per}", "auto", per) for per in args.per),
            )
        }
        room = other.rows // PARTS
        chosen: dict[str, tuple[Choice, bool]] = {
            "CPR-MFU": (MostUsed(other.rows), False),
            "CPR-SSU": (SubSampled(other.rows, room), False),
            "Check-N-Run": (SinceFull(other.rows), False),
            "Check-N-Run, 8 bits": (SinceFull(other.rows), True),
        }
        nbytes: dict[str, list[int]] = {name: [] for name in chosen}
        calls: dict[str, tuple[Training, Callable[[], float]]] = {
            **{name: (run, run.stall) for name, run in partial.items()},
            "DCP async_save": (other, lambda: other.all(None)),
            "DCP async_save, kept stager": (other, lambda: other.all(other.kept)),
            **{
                name: (other, lambda c=c, q=q, n=name: other.chosen(c, nbytes[n], quantized=q))
                for name, (c, q) in chosen.items()
            },
        }
        per_step: dict[str, list[float]] = {name: [] for name in calls}
        cases = {name: timed(run, call, per_step[name]) for name, (run, call) in calls.items()}
        seconds = interleaved(cases, args.rounds)
        for name, run in partial.items():
            nbytes[name] = run.nbytes
            run.session.close()
    rows = []
    for name, taken in seconds.items():
        sizes = nbytes.get(name, [other.whole] * 2)[1:]
        rows.append((name, spread(sizes, 1e6, 1), spread(taken), spread(per_step[name][1:], 1e-3, 0)))
    print_table(("checkpoint", "MB (range)", "stall in s (range)", "ms per step (range)"), rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
