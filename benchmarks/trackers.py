"""Measure the worth and the time of each way to find distances: small real trainings, passes over large states.

python benchmarks/trackers.py [--only NAME] [--rounds 7] [--mb 128]

First table: trainings with Adam on data made from a seed, and on scikit-learn's digits. Alongside each of them, running
checkpoints save 1/8 of the state every 10 iterations: round-robin, aged, and priority with each tracker. Measured is
the perturbation of losing everything, right before each checkpoint of the second half of the training (root mean
square). "exact" is how much smaller it is than round-robin's, and "aged" the same of that policy; the others, what
share of the reduction by "exact" they keep. "overlapped" looks at a tenth of the state after every iteration, as it
does of large states.

Partitions of 1,024 to 4,095 values are sampled here, as they are on a GPU; in the host's memory a session compares them
whole.

Second table: the time of one distance pass ("overlapped" is "exact", in pieces), next to one `a.sub_(b)` over the same
parameters and one plain copy of 1/8 of the state's bytes, all in one process, interleaved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from timing import interleaved, parser, print_table, ratio, spread
from torch import nn
from torch.nn import functional

import scarctl.checkpoint.tracker
from scarctl.arena.arena import Arena
from scarctl.checkpoint.binding import layout_of, tensors_of
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.sampled import NARROW
from scarctl.checkpoint.tracker import Tracker
from scarctl.policy.select import Candidates, select, squared
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.state.version import pack, step_of
from scarctl.store import Settings
from scarctl_adapters.torch import TorchAdapter

FRACTION = Fraction(1, 8)
INTERVAL = 10
ITERATIONS = 200
SLOTS = ("", "exp_avg", "exp_avg_sq")
WAYS = ("exact", "overlapped", "sampled", "touched")
POLICIES = ("round", "aged")
"""Policies that are compared with priority, by exact distances."""
PASS = ("exact", "sampled", "touched")
"""Trackers that do all their work at the checkpoint."""


@dataclass(frozen=True)
class Training:
    """A model, its optimizers, what one iteration's loss is, and how its state is cut."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    loss: Callable[[], torch.Tensor]
    rows: dict[str, int]


class Keeper:
    """A running checkpoint of a training, as `scarctl.checkpoint.engine` keeps it."""

    def __init__(self, layout: Layout, policy: str, tracker: str) -> None:
        self.arena = Arena.anonymous(layout)
        self.tracker = Tracker(layout, tracker)
        self._policy = policy
        self._live: LiveState | None = None
        self._credit = self._cursor = 0

    def look(self, tensors: list[list[torch.Tensor]]) -> None:
        """After every iteration."""
        if self.tracker.overlaps:
            self.tracker.look(self.live(tensors), 1 / INTERVAL)

    def live(self, tensors: list[list[torch.Tensor]]) -> LiveState:
        if self._live is None:
            self._live = LiveState(self.arena.layout, tensors, self.arena)
        return self._live.with_tensors(dict(enumerate(tensors)))

    def save(self, live: LiveState, step: int, *, everything: bool = False) -> None:
        layout = self.arena.layout
        if everything:
            live.save(np.arange(layout.partitions), pack(1, step))
            self.tracker.saved_all(but=np.empty(0, np.int64))
            return
        distance = self.tracker.distances(live, step)
        among = Candidates(
            distance_sq=squared(distance),
            nbytes=layout.partition_bytes,
            staleness=step - step_of(self.arena.version),
            eligible=np.ones(layout.partitions, dtype=bool),
        )
        budget = int(FRACTION * layout.nbytes)
        chosen = select(self._policy, among, budget, credit=self._credit, cursor=self._cursor)
        self._credit, self._cursor = chosen.credit, chosen.cursor
        ids, _ = self.tracker.check(live, chosen.ids, distance)
        live.save(ids, pack(1, step))
        self.tracker.saved(ids)


def perturbations(training: Training) -> dict[str, float]:
    """Root mean square of the perturbation, by tracker; "round": of round-robin."""
    adapter = TorchAdapter.build(training.model, training.optimizers)
    keepers: dict[str, Keeper] = {}
    squares: dict[str, list[float]] = {}
    for step in range(1, ITERATIONS + 1):
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        training.loss().backward()
        touched = adapter.touched_rows(dense=True)
        for keeper in keepers.values():
            keeper.tracker.touch(touched)
        for optimizer in training.optimizers:
            optimizer.step()
        if step == 1:
            layout = layout_of(adapter, Settings(rows=tuple(training.rows.items())))
            for name in (*POLICIES, *WAYS):
                exact = name in POLICIES
                keepers[name] = Keeper(layout, name if exact else "priority", "exact" if exact else name)
        tensors = tensors_of(adapter, layout)
        for name, keeper in keepers.items():
            if step > 1 and step % INTERVAL:
                keeper.look(tensors)
                continue
            live = keeper.live(tensors)
            if step > ITERATIONS // 2:
                squares.setdefault(name, []).append(float(np.square(live.distances()).sum()))
            keeper.save(live, step, everything=step == 1)
            keeper.look(tensors)
    return {name: math.sqrt(sum(found) / len(found)) for name, found in squares.items()}


# --- trainings ----------------------------------------------------------------------------------------------


def zipf(rng: np.random.Generator, rows: int, size: tuple[int, ...], exponent: float = 1.1) -> torch.Tensor:
    """Draw rows by Zipf's law, the most frequent first."""
    weights = 1.0 / np.arange(1, rows + 1) ** exponent
    drawn = np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(size))
    return torch.from_numpy(np.minimum(drawn, rows - 1))


def embedding(
    width: int, per_partition: int, *, sparse: bool, ranked: bool = False, rows: int = 4_001
) -> Training:
    """Return a table whose bags of rows say a class; the teacher is such a table too."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    teacher = torch.randn(rows, 4)
    model = nn.Sequential(nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse), nn.Linear(width, 4))
    nn.init.normal_(model[0].weight, std=0.1)
    if sparse:
        table = [torch.optim.SparseAdam([model[0].weight], lr=0.01)]
        optimizers: list[torch.optim.Optimizer] = [*table, torch.optim.Adam(model[1].parameters(), lr=0.01)]
    else:
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.01)]

    def loss() -> torch.Tensor:
        bags = zipf(rng, rows, (256, 4))
        if not ranked:
            bags = bags * 1999 % rows
        return functional.cross_entropy(model(bags), teacher[bags].sum(dim=1).argmax(dim=1))

    return Training(model, optimizers, loss, {"0.weight": per_partition})


class Experts(nn.Module):
    """A mixture of experts, one per input, before a linear layer."""

    def __init__(self, count: int, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.up = nn.ModuleList(nn.Linear(width, hidden) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(hidden, width) for _ in range(count))
        self.out = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, expert = self.router(x).softmax(dim=1).max(dim=1)
        y = x.clone()
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            mine = expert == number
            y[mine] = y[mine] + weight[mine, None] * down(up(x[mine]).relu())
        return self.out(y)  # type: ignore[no-any-return]


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images, float32 of shape (1797, 64), and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


def classifier(build: Callable[[], nn.Module], values: int) -> Training:
    """Return a network that reads digits, cut into partitions of about so many values."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    images, labels = digits()
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows = {
        name: max(1, values // max(1, math.prod(p.shape[1:])))
        for name, p in model.named_parameters()
        if p.dim() > 1
    }

    def loss() -> torch.Tensor:
        batch = torch.from_numpy(rng.integers(len(images), size=64))
        return functional.cross_entropy(model(images[batch]), labels[batch])

    return Training(model, [optimizer], loss, rows)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def mlp() -> nn.Module:
    layers = (nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return nn.Sequential(*layers)


TRAININGS: dict[str, Callable[[], Training]] = {
    "rows of 16, sparse": lambda: embedding(16, 1, sparse=True),
    "rows of 16, dense": lambda: embedding(16, 1, sparse=False),
    "rows of 64, sparse": lambda: embedding(64, 1, sparse=True),
    "rows of 64, dense": lambda: embedding(64, 1, sparse=False),
    "64 wide, blocks of 16 rows": lambda: embedding(64, 16, sparse=True, ranked=True),
    "64 wide, blocks of 64 rows": lambda: embedding(64, 64, sparse=True, ranked=True),
    "experts, 1,024 values": lambda: classifier(lambda: Experts(16, 64, 128, 10), 1024),
    "experts, 8,192 values": lambda: classifier(lambda: Experts(16, 64, 128, 10), 8192),
    "CNN, 1,152 values": lambda: classifier(cnn, 1152),
    "CNN, 8,192 values": lambda: classifier(cnn, 8192),
    "MLP, 1,024 values": lambda: classifier(mlp, 1024),
    "MLP, 4,096 values": lambda: classifier(mlp, 4096),
}


# --- times --------------------------------------------------------------------------------------------------

PASSES = {
    "rows of 16": (16, 1),
    "rows of 64": (64, 1),
    "64 wide, blocks of 16 rows": (64, 16),
    "64 wide, blocks of 64 rows": (64, 64),
    "1,024 wide, 8 rows": (1024, 8),
    "1,024 wide, 256 rows": (1024, 256),
}
"""Width of a matrix, and rows per partition."""
TOUCHED = 1 / 64
"""Share of the rows that got a gradient since the last look."""


def times(width: int, per_partition: int, mb: int, rounds: int) -> list[str]:
    """Cells of one line: seconds of a pass of each tracker by those of `a.sub_(b)`, and seconds of the copy."""
    rows = mb * 1_000_000 // 4 // width
    specs = tuple(TensorSpec(slot, "F32", (rows, width)) for slot in SLOTS)
    layout = build_layout([("a", "parameter", specs)], rows={"a": per_partition})
    tensors = [[torch.randn(rows, width) if not t else torch.zeros(1).expand(rows, width) for t in range(3)]]
    arena = Arena.anonymous(layout)
    live = LiveState(layout, tensors, arena)
    live.save(np.arange(layout.partitions), pack(1, 1))
    a, b = tensors[0][0], tensors[0][0] + 0.01
    source = torch.zeros(int(FRACTION * layout.nbytes) // 4)
    target = torch.zeros_like(source)
    touched = torch.randint(rows, (int(TOUCHED * rows),))

    def timed(call: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        return run

    def look(kind: str) -> Callable[[], float]:
        tracker = Tracker(layout, kind)
        if kind == "touched":
            tracker.touch({"a": touched})
            tracker.saved_all(but=np.empty(0, np.int64))
            live.save(np.arange(layout.partitions), pack(1, 1))

        def run() -> float:
            if kind == "touched":
                tracker.touch({"a": touched})
            return timed(lambda: tracker.distances(live, 1))()

        return run

    cases = {"sub": timed(lambda: b.sub_(a)), "copy": timed(lambda: target.copy_(source))}
    cases |= {kind: look(kind) for kind in PASS}
    seconds = interleaved(cases, rounds)
    cells = [f"{ratio(seconds[kind], seconds['sub']):.2f}x" for kind in PASS]
    of_copy = [f"{ratio(seconds[kind], seconds['copy']):.1f}x" for kind in PASS]
    return [*cells, *of_copy, spread(seconds["sub"], 1e-3, 0), spread(seconds["copy"], 1e-3, 0)]


def share(kept: float, gained: float) -> str:
    """Return the kept share of a reduction, "-" if that is almost nothing."""
    return f"{kept / gained:.1%}" if gained > 0.05 else "-"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="cases with this in their name")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--mb", type=int, default=128, help="MB of parameters of a pass")
    args = options.parse_args()
    # The smallest samples that there are: of a GPU's state.
    scarctl.checkpoint.tracker.NARROW_HERE = NARROW
    scarctl.checkpoint.tracker.SMALL = 0
    lines = []
    for name, build in TRAININGS.items():
        if args.only in name:
            found = perturbations(build())
            gains = {way: 1 - found[way] / found["round"] for way in ("aged", *WAYS)}
            exact = gains["exact"]
            shares = [share(gains[way], exact) for way in WAYS[1:]]
            lines.append([name, f"{gains['aged']:.1%}", f"{exact:.1%}", *shares])
    if lines:
        print_table(["training", "aged", *WAYS], lines)
        print()
    passes = [
        [name, *times(width, rows, args.mb, args.rounds)]
        for name, (width, rows) in PASSES.items()
        if args.only in name
    ]
    if passes:
        heads = ["pass", *PASS, *(f"{way}, of copy" for way in PASS), "sub_, ms", "copy, ms"]
        print_table(heads, passes)


if __name__ == "__main__":
    main()
