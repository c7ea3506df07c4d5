"""Measure what losing one of four ranks costs a DLRM, by the way in which its rows were saved, for the same bytes.

python benchmarks/lost_rows.py [--rows 200000] [--trials 6] [--failures 3] [--per 1,4,16] [--json FILE]

It needs TorchRec (`make frameworks` makes an environment), and says so if that is missing. A simulation in one
process: the model and the trace of `recommender.py`, smaller, so that ten iterations look up a fifth of the rows. Every
trial is a run with a seed of its own. Every way keeps copies of all rows, and may write 1/8 of the state's bytes per
ten iterations. `--failures` times, spread evenly over the time between two full checkpoints, a rank is lost with a
quarter of each table's rows. The dense layers are on every rank, and survive. Each way's copies of these rows take
their place, and the run continues with the same batches for `--after` iterations. Then its loss on examples that it
does not train on is compared with that of the undisturbed run at the same iterations. Rework is this excess, over the
loss that an undisturbed run gains per iteration. The noise of batches is the same in both runs, and cancels.

  scarctl                     `scarctl.policy.select` as a session calls it; "aged" with the default partitions and with
                              `--per` rows in each, also with the norm `curvature`; with the first of `--per` also
                              "priority", "round", and a checkpoint every 20 iterations, which is half of the bytes
  CPR-MFU, CPR-SSU            the same budget every interval, for rows that lookups choose: `row_baselines.py`
  Check-N-Run, in 8 bits      all rows used since the last full checkpoint, as soon as the bytes saved up allow it
  all                         everything at once, every 8 intervals, as with DCP; once with only the lost rows restored,
                              and once as a rollback: every rank repeats what came after the checkpoint

Printed are bytes per interval, the squared perturbation of the lost rows (relative to "all"), the mean rework, and the
difference from the first line for the same failures; with 95 % intervals over trials.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from recommender import ROW_BYTES, WIDTH, Batch, Ids, Training, alone
from row_baselines import Choice, MostUsed, SinceFull, SubSampled, from_8_bits, in_8_bits
from timing import parser, print_table

from scarctl.policy.select import Candidates, select
from scarctl.simulate.intervals import mean_of
from scarctl.state.layout import MAX_PARTITION_BYTES, MIN_PARTITION_BYTES

BAGS, IDS = 1024, 2
INTERVAL, PARTS, RANKS = 10, 8, 4
CYCLE = INTERVAL * PARTS
"""Iterations between two full checkpoints."""
ITERATIONS = 4 * CYCLE
"""Length of the undisturbed run. Failures are in the third cycle."""
SMOOTH = 8
"""Losses whose mean is compared."""
LOOKED = 4
"""Iterations between two losses of the undisturbed run."""
WATCHED = 4096
"""Examples of the loss that decides."""


class Way:
    """Copies of all rows, and how they are renewed. Its budget is the same as that of every other one."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.weights, self.sums = whole(training)
        self.budget = training.rows * ROW_BYTES // PARTS
        self.written = 0

    def note(self, rows: Ids) -> None:
        """Learn what an iteration has looked up."""

    def save(self, iteration: int) -> None:
        """Write, at the end of an interval."""
        raise NotImplementedError

    def _copy(self, rows: Ids, row_bytes: int = ROW_BYTES) -> None:
        ids = torch.from_numpy(rows)
        self.weights[ids], self.sums[ids] = self._training.take(rows)
        self.written += len(rows) * row_bytes


class All(Way):
    """Everything at once, when the bytes are there."""

    def save(self, iteration: int) -> None:
        if iteration % CYCLE == 0:
            self._copy(np.arange(self._training.rows))


class Partitions(Way):
    """As a session of scarctl chooses."""

    def __init__(
        self, training: Training, policy: str, per: int = 0, *, curved: bool = False, every: int = INTERVAL
    ) -> None:
        """per: rows in a partition, 0 for the default. curved: with the norm `curvature`. every: iterations."""
        super().__init__(training)
        state = training.rows * ROW_BYTES
        usual = min(max(state // 1024, MIN_PARTITION_BYTES), MAX_PARTITION_BYTES) // ROW_BYTES
        pairs = zip(training.first, training.first[1:], strict=False)
        self._starts = np.concatenate([np.arange(first, stop, per or usual) for first, stop in pairs])
        self._counts = np.diff(self._starts, append=training.rows)
        self._saved = np.zeros(self._starts.size, dtype=np.int64)
        self._policy, self._curved, self._every = policy, curved, every
        self._credit = self._cursor = 0

    def save(self, iteration: int) -> None:
        if iteration % self._every:
            return
        weights, sums = whole(self._training)
        moved = weights.sub_(self.weights).square_().sum(1, dtype=torch.float64)
        if self._curved:
            moved *= sums.double().sqrt_().add_(1e-8)
        among = Candidates(
            distance_sq=np.add.reduceat(moved.numpy(), self._starts),
            nbytes=self._counts * ROW_BYTES,
            staleness=iteration - self._saved,
            eligible=np.ones(self._starts.size, dtype=np.bool_),
        )
        found = select(self._policy, among, self.budget, credit=self._credit, cursor=self._cursor)
        self._credit, self._cursor = found.credit, found.cursor
        self._saved[found.ids] = iteration
        taken = np.zeros(self._starts.size, dtype=np.bool_)
        taken[found.ids] = True
        self._copy(np.flatnonzero(np.repeat(taken, self._counts)))


class Looked(Way):
    """As CPR chooses, by lookups."""

    def __init__(self, training: Training, choice: Choice) -> None:
        super().__init__(training)
        self._choice, self.note = choice, choice.note

    def save(self, iteration: int) -> None:
        self._copy(self._choice.choose(self.budget // ROW_BYTES))


class Increments(Way):
    """As Check-N-Run does, whenever the bytes that were not written yet suffice."""

    def __init__(self, training: Training, *, quantized: bool) -> None:
        super().__init__(training)
        self._choice = SinceFull(training.rows)
        self.note = self._choice.note
        self._quantized = quantized
        self._row_bytes = ROW_BYTES - 3 * WIDTH + 8 if quantized else ROW_BYTES
        self._unspent = 0

    def save(self, iteration: int) -> None:
        self._unspent += self.budget
        rows = self._choice.choose()
        full = self._choice.is_full_cheaper(len(rows))
        if full:
            rows = np.arange(self._training.rows)
        if len(rows) * self._row_bytes > self._unspent:
            return
        self._unspent -= len(rows) * self._row_bytes
        self._copy(rows, self._row_bytes)
        if self._quantized:
            ids = torch.from_numpy(rows)
            self.weights[ids] = from_8_bits(*in_8_bits(self.weights[ids]))
        if full:
            self._choice.saved_all()
        else:
            self._choice.saved(len(rows))


@dataclass(frozen=True, slots=True)
class State:
    """All that training changes, after so many iterations."""

    iteration: int
    weights: torch.Tensor
    sums: torch.Tensor
    dense: list[torch.Tensor]
    adam: dict[str, Any]

    @classmethod
    def of(cls, training: Training, iteration: int) -> State:
        """Return a copy of the state of a training."""
        dense = [parameter.detach().clone() for parameter in training.parameters]
        return cls(iteration, *whole(training), dense, copy.deepcopy(training.dense.state_dict()))

    @torch.no_grad()
    def load(self, training: Training) -> None:
        """Restore the state into a training."""
        training.put(self.weights, self.sums)
        for parameter, value in zip(training.parameters, self.dense, strict=True):
            parameter.copy_(value)
        training.dense.load_state_dict(copy.deepcopy(self.adam))


@dataclass(slots=True)
class Failure:
    """The loss of a rank, and each way's copies of its rows at that moment."""

    state: State
    lost: Ids
    copies: dict[str, tuple[torch.Tensor, torch.Tensor]]
    squares: dict[str, float] = field(default_factory=dict)
    excess: dict[str, float] = field(default_factory=dict)
    """Excess of the loss, `--after` iterations later."""

    @property
    def repeated(self) -> int:
        """Iterations since the newest full checkpoint."""
        return self.state.iteration % CYCLE


def whole(training: Training) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of the weights and sums of all rows."""
    return torch.cat([w for w, _ in training.tables]), torch.cat([s for _, s in training.tables])


def rows_of_rank(training: Training, rank: int) -> Ids:
    """Return the rows of a rank if every table is sharded by rows: a block of each."""
    found = []
    for first, size in zip(training.first, training.sizes, strict=False):
        block = -(-size // RANKS)
        found.append(first + np.arange(min(rank * block, size), min((rank + 1) * block, size)))
    return np.concatenate(found)


def ways_of(training: Training, sizes: list[int], seed: int) -> dict[str, Way]:
    """Return one way of each kind, with copies of the current state. sizes: rows per partition."""
    room = training.rows // PARTS
    return {
        **{f"scarctl, partitions of {per}": Partitions(training, "aged", per) for per in sizes},
        "scarctl, default partitions": Partitions(training, "aged"),
        **{f"scarctl, curvature, of {per}": Partitions(training, "aged", per, curved=True) for per in sizes},
        "scarctl, curvature, default": Partitions(training, "aged", curved=True),
        f"scarctl, priority, curvature, of {sizes[0]}": Partitions(
            training, "priority", sizes[0], curved=True
        ),
        f"scarctl, half as often, of {sizes[0]}": Partitions(training, "aged", sizes[0], every=2 * INTERVAL),
        f"scarctl, priority, of {sizes[0]}": Partitions(training, "priority", sizes[0]),
        f"scarctl, round, of {sizes[0]}": Partitions(training, "round", sizes[0]),
        "CPR-MFU": Looked(training, MostUsed(training.rows)),
        "CPR-SSU": Looked(training, SubSampled(training.rows, room, seed)),
        "Check-N-Run": Increments(training, quantized=False),
        "Check-N-Run, 8 bits": Increments(training, quantized=True),
        "all": All(training),
    }


@dataclass(frozen=True, slots=True)
class Trial:
    """Results of one run."""

    failures: list[Failure]
    written: dict[str, float]
    """Bytes per interval."""
    slope: float
    """Loss that the undisturbed run gains per iteration, in its second half."""


def trial(number: int, args: Any) -> Trial:
    """Run once, lose rows, and continue for every way."""
    training = Training(args.rows, bags=BAGS, ids=IDS, seed=number, rate=args.rate)
    chance = np.random.default_rng(number)
    watched = training.batch(-1, WATCHED)
    stride = CYCLE / args.failures
    moments = {2 * CYCLE + int((k + chance.random()) * stride) for k in range(args.failures)}
    ways: dict[str, Way] = {}
    losses: dict[int, float] = {}
    failures = []
    for iteration in range(1, ITERATIONS + 1):
        batch = training.batch(iteration)
        training.step(batch)
        if iteration % LOOKED == 0:
            losses[iteration] = training.loss(watched)
        if iteration == 1:
            ways = ways_of(training, args.per, number)
            continue
        for way in ways.values():
            way.note(batch.rows)
            if iteration % INTERVAL == 0:
                way.save(iteration)
        if iteration in moments:
            failures.append(_fail(training, ways, iteration, int(chance.integers(RANKS))))
    for failure in failures:
        undisturbed = _continue(training, failure.state, watched, args.after)
        if any(loss != losses.get(k, loss) for k, loss in undisturbed.items()):
            raise SystemExit("the same run again was another one: what a loss costs cannot be measured")
        for name, copies in failure.copies.items():
            changed = copy.deepcopy(failure.state)
            ids = torch.from_numpy(failure.lost)
            failure.squares[name] = float((changed.weights[ids] - copies[0]).square().sum())
            changed.weights[ids], changed.sums[ids] = copies
            disturbed = _continue(training, changed, watched, args.after)
            failure.excess[name] = float(np.mean([disturbed[k] - undisturbed[k] for k in undisturbed]))
        failure.copies.clear()
    half = [k for k in losses if k > ITERATIONS // 2]
    slope = -float(np.polyfit(half, [losses[k] for k in half], 1)[0])
    intervals = ITERATIONS // INTERVAL
    return Trial(failures, {name: way.written / intervals for name, way in ways.items()}, slope)


def _fail(training: Training, ways: dict[str, Way], iteration: int, rank: int) -> Failure:
    lost = rows_of_rank(training, rank)
    ids = torch.from_numpy(lost)
    copies = {name: (way.weights[ids], way.sums[ids]) for name, way in ways.items()}
    return Failure(State.of(training, iteration), lost, copies)


def _continue(training: Training, state: State, watched: Batch, after: int) -> dict[int, float]:
    """Continue from a state. Return the losses of SMOOTH iterations around the one `after` it, by iteration."""
    state.load(training)
    losses = {}
    last = state.iteration + after + SMOOTH // 2
    for iteration in range(state.iteration + 1, last + 1):
        training.step(training.batch(iteration))
        if iteration > last - SMOOTH:
            losses[iteration] = training.loss(watched)
    return losses


def _mean(values: NDArray[np.float64], sign: str = "") -> str:
    found = mean_of(values)
    spread = "" if found.low is None else f" ({found.low:{sign}.1f} to {found.high:{sign}.1f})"
    return f"{found.mean:{sign}.1f}{spread}"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=200_000)
    options.add_argument("--trials", type=int, default=6)
    options.add_argument("--failures", type=int, default=3, help="in a trial")
    options.add_argument(
        "--per",
        type=lambda text: [int(one) for one in text.split(",")],
        default=[1, 4, 16],
        help="rows in a partition",
    )
    options.add_argument("--after", type=int, default=40, help="iterations from a failure to the comparison")
    options.add_argument("--rate", type=float, default=0.05, help="learning rate of the rows")
    options.add_argument("--json", type=Path, help="file for every failure's result")
    args = options.parse_args()
    if find_spec("torchrec") is None:
        sys.exit(print("TorchRec is not installed here: `make frameworks` makes an environment for it"))
    warnings.simplefilter("ignore")  # TorchRec's
    torch.set_num_threads(1)  # sums in one order are the same in every run
    alone()
    started = time.perf_counter()
    trials = []
    for number in range(args.trials):
        trials.append(trial(number, args))
        print(f"trial {number}: {time.perf_counter() - started:.0f} s", flush=True)
    dist.destroy_process_group()
    slope = float(np.mean([one.slope for one in trials]))

    def of(name: str, what: str) -> NDArray[np.float64]:
        return np.array([np.mean([getattr(f, what)[name] for f in one.failures]) for one in trials])

    names = list(trials[0].written)
    rows = []
    for name in names:
        rework = of(name, "excess") / slope
        more = _mean(rework - of(names[0], "excess") / slope, "+") if name != names[0] else ""
        nbytes = np.mean([one.written[name] for one in trials])
        square = of(name, "squares").mean() / of("all", "squares").mean()
        rows.append((name, f"{nbytes / 1e6:.2f}", f"{square:.2f}x", _mean(rework), more))
    repeated = np.array([np.mean([f.repeated for f in one.failures]) for one in trials])
    rows.append(("all, rollback", "", "", _mean(repeated), ""))
    print_table(("saved as", "MB per interval", "squared perturbation", "rework", "less the first's"), rows)
    print(f"the loss falls by {slope:.2e} per iteration")
    if args.json:
        found = [
            {
                "slope": one.slope,
                "bytes": one.written,
                "failures": [
                    {"iteration": f.state.iteration, "excess": f.excess, "squares": f.squares}
                    for f in one.failures
                ],
            }
            for one in trials
        ]
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
