"""Measure recovery of 1/8 and of all of a state, from memory and from the store, compared with a full checkpoint's
load.

python benchmarks/recover.py [--rounds 5] [--cold] [--folder DIR]

The state is that of GPT-2 small with AdamW: 1.49 GB, in 8 shards. Before every case the lost rows are overwritten
with zeros, and after it the whole state is compared with what was saved; neither is measured. With `--cold` the
files that a case reads are dropped from the page cache first.

  scarctl, memory      session.recover of one shard, or of all, from the arena
  scarctl, store       the same with the arena's copies spoiled, as a process killed while it copies leaves them
  safetensors          load_file and a copy into the live tensors
  safetensors slices   safe_open, and only the lost rows of every tensor
  torch.load           torch.load(weights_only=True) and a copy into the live tensors
  DCP load             torch.distributed.checkpoint.load into the live tensors

scarctl and DCP verify or plan on the way: scarctl checks a checksum for every partition from the store; safetensors and
torch.load check none. One line per case: time relative to torch.load of the same round, the median in seconds with the
range, and GB restored.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from timing import interleaved, parser, print_table, ratio, scratch, settle, spread
from training import build, tensors, wait_durable, whole_state

import scarctl

SHARDS = 8
LOST = 3


class Bench:
    """A training run with one sealed checkpoint, saved in all formats."""

    def __init__(self, folder: Path, scale: int, cold: bool) -> None:
        self.folder = folder
        self.cold = cold
        self.model, self.optimizer = build(scale)
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=folder / "store",
            partitioning=scarctl.Partitioning(shards=SHARDS),
            interval=1 << 30,
            settings=scarctl.Settings(on_error="raise"),
        )
        self.optimizer.step()
        self.session.checkpoint(full=True, wait=True)
        wait_durable(self.session, 1)
        self.live = dict(tensors(self.model, self.optimizer))
        self.saved = {name: tensor.clone() for name, tensor in self.live.items()}
        torch.save(whole_state(self.model, self.optimizer), folder / "torch")
        safetensors.torch.save_file(self.live, folder / "safetensors")
        dcp.save(dict(self.live), checkpoint_id=folder / "dcp", no_dist=True)
        settle()
        # No public call says which rows a shard has, and none spoils an arena.
        self.arena = self.session._engine.arena  # type: ignore[union-attr]
        self.shard_of = self.session._engine.shard_of  # type: ignore[union-attr]
        self.layout = self.arena.layout

    def ids(self, part: str) -> np.ndarray:
        """Partitions that are lost: one shard's, or all."""
        return np.flatnonzero(self.shard_of == LOST) if part == "1/8" else np.arange(self.layout.partitions)

    def rows(self, part: str) -> dict[str, list[tuple[int, int]]]:
        """Lost row ranges of every tensor, adjacent ones merged."""
        ids = self.ids(part)
        found: dict[str, list[tuple[int, int]]] = {}
        starts, stops = self.layout.row_ranges(ids)
        for g, start, stop in zip(
            self.layout.group_of(ids).tolist(), starts.tolist(), stops.tolist(), strict=True
        ):
            group = self.layout.groups[g]
            ranges = found.setdefault(group.key(0), [])
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return {f"{name}{slot}": r for name, r in found.items() for slot in ("", "/exp_avg", "/exp_avg_sq")}

    def measure(self, part: str, files: str | None, call: Callable[[str], None]) -> float:
        """Lose rows, run `call`, check."""
        for name, ranges in self.rows(part).items():
            for start, stop in ranges:
                self.live[name][start:stop] = 0
        if self.cold and files:
            evict(self.folder / files)
        start_time = time.perf_counter()
        call(part)
        taken = time.perf_counter() - start_time
        wrong = [name for name, tensor in self.live.items() if not torch.equal(tensor, self.saved[name])]
        if wrong:
            raise AssertionError(f"{call}: {wrong[:3]} were not restored")
        return taken

    def memory(self, part: str) -> None:
        """Restore from the arena."""
        report = self.session.recover(LOST if part == "1/8" else "all")
        assert set(report.tiers) == {"memory"}, report.tiers

    def store(self, part: str) -> None:
        """Restore from the store."""
        self.arena.begin(self.ids(part))
        report = self.session.recover(LOST if part == "1/8" else "all")
        assert set(report.tiers) == {"store"}, report.tiers

    def safetensors(self, part: str) -> None:
        """Load the whole file."""
        for name, tensor in safetensors.torch.load_file(self.folder / "safetensors").items():
            self.live[name].copy_(tensor)

    def slices(self, part: str) -> None:
        """Load only the lost rows."""
        with safetensors.safe_open(self.folder / "safetensors", "pt") as file:
            for name, ranges in self.rows(part).items():
                whole = file.get_slice(name)
                for start, stop in ranges:
                    self.live[name][start:stop] = whole[start:stop]

    def torch_load(self, part: str) -> None:
        """Load the whole file."""
        state = torch.load(self.folder / "torch", weights_only=True)
        parameters = list(self.model.named_parameters())
        for number, (name, parameter) in enumerate(parameters):
            parameter.detach().copy_(state["model"][name])
            for slot in ("exp_avg", "exp_avg_sq"):
                self.optimizer.state[parameter][slot].copy_(state["optimizer"]["state"][number][slot])

    def dcp(self, part: str) -> None:
        """Load the whole checkpoint, in place."""
        dcp.load(dict(self.live), checkpoint_id=self.folder / "dcp", no_dist=True)


def evict(path: Path) -> None:
    """Drop files from the page cache, as far as the system allows it."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument(
        "--cold", action="store_true", help="drop files from the page cache before each case"
    )
    options.add_argument("--scale", type=int, default=1, help="divide the state's size by this")
    args = options.parse_args()
    # DCP warns that it runs alone: that is meant.
    warnings.simplefilter("ignore")
    with scratch(args.folder) as folder:
        bench = Bench(folder, args.scale, args.cold)
        cases: dict[str, Callable[[], float]] = {}
        for name, part, files, call in (
            ("scarctl, memory", "1/8", None, bench.memory),
            ("scarctl, store", "1/8", "store", bench.store),
            ("safetensors slices", "1/8", "safetensors", bench.slices),
            ("scarctl, memory", "all", None, bench.memory),
            ("scarctl, store", "all", "store", bench.store),
            ("safetensors", "all", "safetensors", bench.safetensors),
            ("torch.load", "all", "torch", bench.torch_load),
            ("DCP load", "all", "dcp", bench.dcp),
        ):
            cases[f"{part}: {name}"] = functools.partial(bench.measure, part, files, call)
        seconds = interleaved(cases, args.rounds)
        sizes = {part: int(bench.layout.partition_bytes[bench.ids(part)].sum()) for part in ("1/8", "all")}
        bench.session.close()
    rows = [
        (
            name,
            f"{ratio(taken, seconds['all: torch.load']):.2f}x",
            spread(taken),
            f"{sizes[name.split(': ')[0]] / 1e9:.2f}",
        )
        for name, taken in seconds.items()
    ]
    print("files dropped from the page cache first" if args.cold else "files in the page cache")
    print_table(("lost: way", "of torch.load", "s (range)", "GB"), rows)


if __name__ == "__main__":
    main()
