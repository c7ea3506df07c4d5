"""Measure bytes and stall of saving a table of millions of rows, which TorchRec trains in the backward pass.

python benchmarks/sharded_tables.py [--rows 4000000] [--rounds 5] [--interval 10] [--folder DIR]

It needs TorchRec (`make frameworks` makes an environment), and says so where there is none. One process, on a CPU: a
table of `--rows` rows of 32 values with row-wise Adagrad, and a small dense part with Adam. Every round takes
`--interval` steps of 2,048 bags of 10 ids, whose frequency falls as 1 / rank, and then a checkpoint. The stall is the
time that the training thread spends in the saving call or hook, and waiting before the next backward pass.

  scarctl                       a partial checkpoint of at most 1/8 of the bytes, tracker="overlapped"
  scarctl, touched              the same, where the lookups say which rows have changed
  DCP async_save                torch.distributed.checkpoint.async_save of the whole state, thread based
  DCP async_save, kept stager   the same with one DefaultStager for all saves, which keeps its memory

One line per case: bytes written per checkpoint, and the median of the stall with the range.
"""

from __future__ import annotations

import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from timing import arenas, interleaved, parser, print_table, scratch, settle, spread
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from training import wait_durable

import scarctl

WIDTH, BAGS, IDS = 32, 2048, 10


class Training:
    """One model, its optimizer, and a trace that is the same in every run."""

    def __init__(self, rows: int) -> None:
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection
        from torchrec.optim import RowWiseAdagrad
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        class Ranker(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tables = EmbeddingBagCollection(
                    device=torch.device("meta"),
                    tables=[
                        EmbeddingBagConfig(
                            name="ids", embedding_dim=WIDTH, num_embeddings=rows, feature_names=["ids"]
                        )
                    ],
                )
                self.over = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

            def forward(self, features: Any) -> torch.Tensor:
                found: torch.Tensor = self.over(self.tables(features).values())
                return found

        plain = Ranker()
        apply_optimizer_in_backward(RowWiseAdagrad, plain.tables.parameters(), {"lr": 0.05})
        self.model = DistributedModelParallel(plain, device=torch.device("cpu"))
        parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        dense = KeyedOptimizerWrapper(parameters, lambda given: torch.optim.Adam(given, lr=1e-3))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])
        self.rows = rows
        self.trace = torch.Generator().manual_seed(0)

    def steps(self, count: int) -> None:
        """Train on the next batches."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        for _ in range(count):
            # Ranks of a Zipf distribution of exponent 1, spread over the table.
            ranks = torch.exp(
                torch.rand(BAGS * IDS, generator=self.trace) * torch.log(torch.tensor(float(self.rows)))
            )
            ids = (ranks.long() * 2654435761) % self.rows
            features = KeyedJaggedTensor(keys=["ids"], values=ids, lengths=torch.full((BAGS,), IDS))
            self.optimizer.zero_grad()
            self.model(features).square().mean().backward()
            self.optimizer.step()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the state, by name."""
        named = [*self.model.state_dict().items()]
        for name, state in self.optimizer.state_dict()["state"].items():
            named += [(f"{name}/{key}", value) for key, value in state.items()]
        for name, value in named:
            yield name, value.local_shards()[0].tensor if hasattr(value, "local_shards") else value


class Partial(Training):
    """With scarctl attached."""

    def __init__(self, rows: int, store: Path, arena: str, tracker: Any, interval: int) -> None:
        super().__init__(rows)
        self.interval, self.nbytes = interval, list[int]()
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=store,
            fraction=1 / 8,
            interval=interval,
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


class Whole(Training):
    """Without scarctl: DCP saves all of it."""

    def __init__(self, rows: int, folder: Path, interval: int) -> None:
        super().__init__(rows)
        self.steps(2)
        self.path, self.interval = folder / "whole", interval
        self.nbytes = sum(tensor.nbytes for _, tensor in self.tensors())
        self.kept = DefaultStager(StagingOptions(False, False, False, False))

    def stall(self, stager: DefaultStager | None) -> float:
        """Train as long, and save."""
        self.steps(self.interval - 1)
        settle()
        start = time.perf_counter()
        saved: Any = dcp.async_save(
            dict(self.tensors()), checkpoint_id=self.path, no_dist=True, async_stager=stager
        )
        stall = time.perf_counter() - start
        self.steps(1)
        saved.result()
        shutil.rmtree(self.path)
        return stall


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=4_000_000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--interval", type=int, default=10, help="steps between two checkpoints")
    args = options.parse_args()
    if find_spec("torchrec") is None:
        sys.exit(print("TorchRec is not installed here: `make frameworks` makes an environment for it"))
    warnings.simplefilter("ignore")  # DCP's, that it runs alone and overwrites; and TorchRec's
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with scratch(args.folder) as folder, arenas(args.folder) as arena:
        whole = Whole(args.rows, folder, args.interval)
        partial = {
            name: Partial(args.rows, folder / tracker, arena, tracker, args.interval)
            for name, tracker in (("scarctl", "overlapped"), ("scarctl, touched", "touched"))
        }
        cases = {
            **{name: run.stall for name, run in partial.items()},
            "DCP async_save": lambda: whole.stall(None),
            "DCP async_save, kept stager": lambda: whole.stall(whole.kept),
        }
        seconds = interleaved(cases, args.rounds)
        for run in partial.values():
            run.session.close()
    rows = []
    for name, taken in seconds.items():
        sizes = partial[name].nbytes[1:] if name in partial else [whole.nbytes]
        rows.append(
            (name, spread(sizes, 1e6, 1) if name in partial else f"{sizes[0] / 1e6:.1f}", spread(taken))
        )
    print_table(("checkpoint", "MB (range)", "stall in s (range)"), rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
