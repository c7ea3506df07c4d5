"""Simulate copies in fewer bits: the remaining perturbation when as many bytes are saved.

PYTHONPATH=. python benchmarks/encoding.py [--seeds 4] [--only NAME]

The workloads are those of docs/beyond.md: one row is one partition, and an eighth of the exact bytes is saved in every
second iteration, by priority. An encoding with fewer bytes per row saves more rows at a time. Distances, as in a
session, are those of the live values from the exact copy in memory; what comes back after a failure is the decoded one.

  exact           parameters and slots in float32
  bf16 slots      parameters exact, slots in bfloat16
  int8 slots      parameters exact, slots in 8 bits with a scale per row; of the root where no value is negative
  bf16            all in bfloat16
  int8            all in 8 bits with a scale per row
  int8 + bf16     parameters in 8 bits, slots in bfloat16
  nothing stored  parameters and slots exact, but slots cost no bytes: the limit for any encoding of slots

One line per workload and encoding: the squared perturbation of the parameters if everything is lost right before a
checkpoint, mean over the second half of the run, relative to that of "exact" (median and range over seeds); and the
same relative error of the slots, as the squared distance of the decoded from the live slots relative to exact's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from timing import parser, print_table, spread

from examples.beyond import workloads
from scarctl.policy.select import select

EVERY = 2
SHARE = 8
NAMES = ("embedding_adagrad", "embedding_adam", "experts", "transformer", "lora")

Codec = Callable[[torch.Tensor], torch.Tensor]
"""Returns decoded rows, float32 of the shape of the given rows (rows, width)."""


def exact(rows: torch.Tensor) -> torch.Tensor:
    """Four bytes per value."""
    return rows


def bfloat16(rows: torch.Tensor) -> torch.Tensor:
    """Two bytes per value."""
    return rows.to(torch.bfloat16).float()


def int8(rows: torch.Tensor) -> torch.Tensor:
    """One byte per value and a float32 scale per row; of the square root where no value is negative."""
    if bool((rows >= 0).all()):
        root = rows.sqrt()
        scale = root.amax(1, keepdim=True).clamp_min(1e-30) / 255
        return ((root / scale).round() * scale).square()
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (rows / scale).round() * scale


BYTES: dict[Codec, Callable[[int], int]] = {
    exact: lambda width: 4 * width,
    bfloat16: lambda width: 2 * width,
    int8: lambda width: min(4 * width, width + 4),
}


@dataclass(frozen=True)
class Encoding:
    """How a copy's parameter and slots are stored."""

    parameter: Codec
    slots: Codec
    free: bool = False
    """Slots cost nothing."""

    def nbytes(self, width: int, slots: int) -> int:
        """Bytes of one row with its slots."""
        return BYTES[self.parameter](width) + (0 if self.free else slots * BYTES[self.slots](width))


ENCODINGS = {
    "exact": Encoding(exact, exact),
    "bf16 slots": Encoding(exact, bfloat16),
    "int8 slots": Encoding(exact, int8),
    "bf16": Encoding(bfloat16, bfloat16),
    "int8": Encoding(int8, int8),
    "int8 + bf16": Encoding(int8, bfloat16),
    "nothing stored": Encoding(exact, exact, free=True),
}


class Keeper:
    """The running checkpoint of one encoding: exact copies in memory, decoded ones as they come back from the store."""

    def __init__(self, encoding: Encoding, tensors: list[list[torch.Tensor]]) -> None:
        self._encoding = encoding
        self._memory = [group[0].clone() for group in tensors]
        self._stored = [[part.clone() for part in group] for group in tensors]
        ends = np.cumsum([group[0].shape[0] for group in tensors])
        self._bounds = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
        self._nbytes = np.concatenate(
            [
                np.full(len(group[0]), encoding.nbytes(group[0].shape[1], len(group) - 1), np.int64)
                for group in tensors
            ]
        )
        self._budget = sum(part.numel() * 4 for group in tensors for part in group) // SHARE
        self._credit = 0

    def lost(self, tensors: list[list[torch.Tensor]]) -> tuple[float, float]:
        """Squared distance of what would come back from the live values: of parameters, and of slots."""
        parameter = slots = 0.0
        for live, stored in zip(tensors, self._stored, strict=True):
            parameter += float((live[0] - stored[0]).double().square().sum())
            slots += sum(
                float((a - b).double().square().sum()) for a, b in zip(live[1:], stored[1:], strict=True)
            )
        return parameter, slots

    def save(self, tensors: list[list[torch.Tensor]], step: int) -> None:
        """One partial checkpoint."""
        distance: NDArray[np.float64] = np.concatenate(
            [
                (live[0] - saved).double().square().sum(1).numpy()
                for live, saved in zip(tensors, self._memory, strict=True)
            ]
        )
        chosen = select(
            "priority",
            distance_sq=distance,
            nbytes=self._nbytes,
            staleness=np.zeros(distance.size, np.int64),
            eligible=np.ones(distance.size, bool),
            budget=self._budget,
            credit=self._credit,
            step=step,
        )
        self._credit = chosen.credit
        for (start, stop), live, memory, stored in zip(
            self._bounds, tensors, self._memory, self._stored, strict=True
        ):
            first, last = np.searchsorted(chosen.ids, (start, stop))
            rows = torch.from_numpy(chosen.ids[first:last] - start)
            if not len(rows):
                continue
            memory[rows] = live[0][rows]
            stored[0][rows] = self._encoding.parameter(live[0][rows])
            for there, slot in zip(stored[1:], live[1:], strict=True):
                there[rows] = self._encoding.slots(slot[rows])


def tensors_of(workload: workloads.Trained) -> list[list[torch.Tensor]]:
    """Parameters with their slots, each of shape (rows, width)."""
    return [
        [part.detach().reshape(part.shape[0], -1) for part in (p, *workload._slots(p))]
        for p in workload._parameters()
    ]


def run(name: str, seed: int) -> dict[str, tuple[float, float]]:
    """Mean squared perturbation of parameters and of slots, by encoding."""
    workload = getattr(workloads, name)()
    workload.reset(seed)
    keepers: dict[str, Keeper] = {}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ENCODINGS}
    for step in range(1, workload.iterations + 1):
        workload.step(step)
        if step % EVERY and keepers:
            continue
        tensors = tensors_of(workload)
        if not keepers:
            keepers = {name: Keeper(encoding, tensors) for name, encoding in ENCODINGS.items()}
            continue
        for name, keeper in keepers.items():
            if step > workload.iterations // 2:
                found[name].append(keeper.lost(tensors))
            keeper.save(tensors, step)
    means = {name: np.mean(values, axis=0).tolist() for name, values in found.items()}
    return {name: (mean[0], mean[1]) for name, mean in means.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=4)
    options.add_argument("--only", choices=NAMES)
    args = options.parse_args()
    rows = []
    for name in [args.only] if args.only else NAMES:
        runs = [run(name, seed) for seed in range(args.seeds)]
        rows += [
            (
                name,
                encoding,
                spread([one[encoding][0] / one["exact"][0] for one in runs], digits=2),
                spread([one[encoding][1] / one["exact"][1] for one in runs], digits=2),
            )
            for encoding in ENCODINGS
        ]
    print_table(("workload", "copies", "of exact: parameters", "slots"), rows)


if __name__ == "__main__":
    main()
