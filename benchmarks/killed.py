"""Train one of four programs, saved in one of four ways: the job that `kills.py` and `ettr.py` kill.

python benchmarks/killed.py --place DIR --program mlp --way scarctl [--until 100]

Programs, all on the processor, in float32:

  mlp          784 -> 1280 -> 1280 -> 10, AdamW: 30 MiB with its moments
  embeddings   30,000 users and 10,000 items of 32 numbers, a small top, clicks; Adagrad with sparse gradients: 10 MiB
  small        64 -> 256 -> 10, AdamW: 0.2 MiB
  large        784 -> 10,000 -> 10,000 -> 10, AdamW: 1.2 GiB

Ways: none; save (torch.save of everything into a new file, fsync, rename); dcp (torch.distributed.checkpoint's
async_save with a stager that keeps its memory); scarctl (default options). `save` and `dcp` measure what a save costs,
and wait so long after each that this is 1 % of the time. All ways restore the data's position and generators, too.

Several processes with RANK and WORLD_SIZE train under DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from killing import OVERHEAD, Board, remove
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 1_000_000
SIZES = {"mlp": (784, 1280, 12_800, 64), "small": (64, 256, 12_800, 32), "large": (784, 10_000, 1_280, 8)}
"""By program: values of an example, of a hidden layer; examples, and those in a batch."""


class Clicks(nn.Module):
    """Two tables and a small top."""

    def __init__(self, users: int, items: int, width: int = 32) -> None:
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=True)
        self.items = nn.Embedding(items, width, sparse=True)
        self.top = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, 1))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.2)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        logits: torch.Tensor = self.top(torch.cat([user, item, user * item], 1))
        return logits.squeeze(1)


class Program:
    """A model, its optimizer, data of this rank, and a fixed batch to evaluate."""

    def __init__(self, name: str, rank: int = 0, ranks: int = 1) -> None:
        draw = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.criterion: nn.Module = nn.CrossEntropyLoss()
        if name == "embeddings":
            users, items, count, batch = 30_000, 10_000, 51_200, 128
            # Some are popular, and popularity says nothing about the place in the table.
            pairs = torch.stack(
                [
                    (torch.rand(count, generator=draw) ** 2 * n).long() * 2654435761 % n
                    for n in (users, items)
                ],
                1,
            )
            taste, kind = torch.randn(users, 8, generator=draw), torch.randn(items, 8, generator=draw)
            clicked = torch.rand(count, generator=draw) < torch.sigmoid(
                (taste[pairs[:, 0]] * kind[pairs[:, 1]]).sum(1)
            )
            inputs, labels = pairs, clicked.float()
            self.model: nn.Module = Clicks(users, items)
            self.criterion = nn.BCEWithLogitsLoss()
            self.optimizer: torch.optim.Optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.01)
        else:
            features, hidden, count, batch = SIZES[name]
            inputs = torch.randn(count, features, generator=draw)
            labels = (inputs[:, :32] @ torch.randn(32, 10, generator=draw)).argmax(1)
            layers = [nn.Linear(features, hidden), nn.ReLU()]
            layers += [nn.Linear(hidden, hidden), nn.ReLU()] if features > 64 else []
            self.model = nn.Sequential(*layers, nn.Linear(hidden, 10))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        fixed = min(256, count // 40)
        self._fixed = inputs[:fixed], labels[:fixed]
        self.loader = DataLoader(
            TensorDataset(inputs[rank::ranks], labels[rank::ranks]),
            batch // ranks,
            shuffle=True,
            drop_last=True,
        )
        if ranks > 1:
            self.model = nn.parallel.DistributedDataParallel(self.model)
        torch.manual_seed(rank)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss on the fixed batch."""
        inputs, labels = self._fixed
        return float(self.criterion(getattr(self.model, "module", self.model)(inputs), labels))


class Way:
    """Train without saving anything. `resume` returns the iteration at which to continue."""

    stall = 0.0
    """Seconds in which saves kept this start's training waiting."""
    saves = 0
    whole = True
    paid = 0.0
    """Seconds that a save took in earlier starts, 0 if there was none."""

    def __init__(self, program: Program, place: Path) -> None:
        self.program = program
        self.place = place

    def resume(self) -> int:
        return 0

    def epochs(self, count: int) -> Iterator[int]:
        return iter(range(count))

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        return iter(loader)

    def after(self, step: int) -> None:
        """Called when an iteration has ended."""


class Positioned(Way):
    """Keep the data's position, and save when the budget allows."""

    rank = int(os.environ.get("RANK", 0))

    def __init__(self, program: Program, place: Path, overhead: float) -> None:
        super().__init__(program, place)
        self._overhead = overhead
        self._epoch = self._used = self._skip = 0
        self._begun: torch.Tensor | None = None
        self._due = time.monotonic()

    def epochs(self, count: int) -> Iterator[int]:
        for epoch in range(self._epoch, count):
            self._epoch = epoch
            if self._begun is None:
                self._begun = torch.get_rng_state()
            else:
                torch.set_rng_state(self._begun)
            yield epoch
            self._begun, self._used, self._skip = None, 0, 0

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        for number, batch in enumerate(loader):
            if number >= self._skip:
                self._used = number + 1
                yield batch

    def position(self, step: int) -> dict[str, Any]:
        """Return what is saved in addition to model and optimizer."""
        numbers = torch.tensor([step, self._epoch, self._used])
        return {"numbers": numbers, "begun": self._begun}

    def restore(self, position: dict[str, Any]) -> int:
        step, self._epoch, self._skip = position["numbers"].tolist()
        self._begun = position["begun"]
        self._due = time.monotonic() + self.pause(self.paid)
        return int(step)

    def pause(self, cost: float) -> float:
        """Return the seconds of training that pay for a save."""
        return cost * (1 / self._overhead - 1)

    def after(self, step: int) -> None:
        if self.due(step):
            began = time.monotonic()
            self.save(step)
            now = time.monotonic()
            self.saves += 1
            self.stall += now - began
            self._due = now + self.pause(now - began)

    def due(self, step: int) -> bool:
        return time.monotonic() >= self._due

    def save(self, step: int) -> None:
        raise NotImplementedError


class Save(Positioned):
    """torch.save of everything by rank 0: all other ranks have the same."""

    def resume(self) -> int:
        path = self.place / "checkpoint"
        if not path.exists():
            return 0
        state = torch.load(path, weights_only=True)
        self.program.model.load_state_dict(state["model"])
        self.program.optimizer.load_state_dict(state["optimizer"])
        return self.restore(state["position"])

    def due(self, step: int) -> bool:
        return self.rank == 0 and super().due(step)

    def save(self, step: int) -> None:
        state = {"model": self.program.model.state_dict(), "optimizer": self.program.optimizer.state_dict()}
        path = self.place / "checkpoint.new"
        with open(path, "wb") as file:
            torch.save(state | {"position": self.position(step)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, self.place / "checkpoint")


class Dcp(Positioned):
    """torch.distributed.checkpoint's async_save of everything: training waits for its staging alone."""

    def __init__(self, program: Program, place: Path, overhead: float) -> None:
        super().__init__(program, place, overhead)
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._dcp: Any = dcp
        self._of = state_dict
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._group = (
            torch.distributed.new_group(backend="gloo") if torch.distributed.is_initialized() else None
        )
        self._saving: Future[Any] | None = None
        self._folder = place / "dcp"
        self._folder.mkdir(exist_ok=True)

    def _finished(self) -> list[int]:
        """Return the iterations of checkpoints that can be read, the oldest first."""
        return sorted(int(path.parent.name) for path in self._folder.glob("*/.metadata"))

    def _state(self, position: dict[str, Any]) -> dict[str, Any]:
        model, optimizer = self._of.get_state_dict(self.program.model, self.program.optimizer)
        return {"model": model, "optimizer": optimizer, "position": position}

    def resume(self) -> int:
        found = self._finished()
        if not found:
            return 0
        self._begun = torch.get_rng_state()
        state = self._state(self.position(0))
        self._dcp.load(state, checkpoint_id=self._folder / str(found[-1]))
        self._of.set_state_dict(
            self.program.model,
            self.program.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return self.restore(state["position"])

    def due(self, step: int) -> bool:
        chosen = super().due(step) and (self._saving is None or self._saving.done())
        if torch.distributed.is_initialized():
            if step % 8:  # so seldom that the ranks' agreement costs nothing
                return False
            agreed = torch.tensor(int(chosen))
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN)
            chosen = bool(agreed)
        return chosen

    def save(self, step: int) -> None:
        if self._saving is not None:
            self._saving.result()
        saved: Any = self._dcp.async_save(
            self._state(self.position(step)),
            checkpoint_id=self._folder / str(step),
            process_group=self._group,
            async_stager=self._stager,
        )
        self._saving = saved
        if self.rank == 0:
            for old in self._finished()[:-2]:
                remove(self._folder / str(old))


class Scarctl(Way):
    """README's lines."""

    def __init__(self, program: Program, place: Path) -> None:
        super().__init__(program, place)
        import scarctl

        self._session = scarctl.attach(program.model, program.optimizer, store=place / "store")
        self.epochs, self.batches = self._session.epochs, self._session.batches  # type: ignore[method-assign]

    def resume(self) -> int:
        resumed = self._session.resume()
        print(resumed, flush=True)
        self.whole = resumed.consistent
        return resumed.step

    def after(self, step: int) -> None:
        self.stall, self.saves = self._session.stats.stall_seconds, self._session.stats.checkpoints


def train(args: argparse.Namespace, board: Board | None, rank: int, ranks: int) -> None:
    """Train until the parent says stop. board: None in ranks that report nothing."""
    program = Program(args.program, rank, ranks)
    if args.way in ("save", "dcp"):
        way: Way = {"save": Save, "dcp": Dcp}[args.way](program, args.place, args.overhead)
    else:
        way = {"none": Way, "scarctl": Scarctl}[args.way](program, args.place)
    before = (board["stall"], board["saves"]) if board else (0.0, 0.0)
    way.paid = before[0] / max(1.0, before[1])
    step = way.resume()
    if board:
        ready, loss_then = time.monotonic(), program.evaluate()
        board["resumed"], board["whole"], board["loss"] = step, way.whole, loss_then
        board["ready"] = ready  # last, because the parent waits for it
        if not step:
            board.evaluated(0, loss_then)
    evaluated, wanted = 0.0, args.evaluate

    parent = os.getppid()

    def ended() -> bool:
        if os.getppid() != parent:
            return True  # the benchmark was killed
        if board is None or not (board["stop"] or (args.until is not None and step >= args.until)):
            return False
        board["end step"], board["end loss"], board["ended"] = step, program.evaluate(), time.monotonic()
        return True

    if ended():
        return
    for _ in way.epochs(EPOCHS):
        for inputs, labels in way.batches(program.loader):
            time.sleep(args.sleep)
            loss = program.criterion(program.model(inputs), labels)
            program.optimizer.zero_grad()
            loss.backward()
            program.optimizer.step()
            step += 1
            if board:
                board.step(step)
            way.after(step)
            if board:
                board["stall"], board["saves"] = before[0] + way.stall, before[1] + way.saves
                if wanted and time.monotonic() - evaluated >= wanted:
                    board.evaluated(step, program.evaluate())
                    evaluated = time.monotonic()
                if args.every and step % args.every == 0:
                    board.evaluated(step, program.evaluate())
            if ended():
                return


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--place", type=Path, required=True, help="folder of the board and of what is saved")
    options.add_argument("--program", choices=("embeddings", *SIZES), default="mlp")
    options.add_argument("--way", choices=("none", "save", "dcp", "scarctl"), default="none")
    options.add_argument(
        "--sleep", type=float, default=0.0, help="seconds in which an accelerator would work"
    )
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--overhead", type=float, default=OVERHEAD)
    options.add_argument(
        "--evaluate", type=float, default=0.0, help="seconds between two evaluations; 0: none"
    )
    options.add_argument("--every", type=int, default=0, help="iterations between two evaluations; 0: none")
    options.add_argument("--until", type=int, help="iteration after which to end")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    train(args, None if rank else Board(args.place / "board"), rank, ranks)
    os._exit(0)  # whatever runs here in the background ends as by a kill


if __name__ == "__main__":
    main()
