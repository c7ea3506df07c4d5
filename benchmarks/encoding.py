"""Measure copies in fewer bits, in real sessions: the perturbation that remains at the same number of bytes.

    PYTHONPATH=. python benchmarks/encoding.py [--seeds 4] [--only NAME]
    PYTHONPATH=. python benchmarks/encoding.py --speed

The workloads are those of docs/beyond.md: one row is one partition, and a session saves an eighth of the exact bytes in
every second iteration, by priority. Nothing is simulated: what comes back is read from the store.

One line per workload and `Selection.encoding`: bytes of all partial commits and the squared perturbation of the
parameters if everything is lost right before a checkpoint (mean over the last half of the run), both relative to
"exact"; the squared error of the slots, relative as well; and the rework after losing a random half of the rows after
three quarters of the iterations: iterations more than an undisturbed run needs to reach its last loss. Median and range
over seeds.

--speed: CPU seconds per GiB of float32 state (a parameter and two slots, rows of 1,024 values, every second row) to
encode, to decode, and to copy the same rows.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import parser, print_table, spread

import scarctl
from examples.beyond import workloads
from scarctl.config import Partitioning, Selection, Settings
from scarctl.state.encoding import decode
from scarctl.state.encodings import ENCODINGS, Encoding
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.store import Store
from scarctl.store.encoder import Encoder

EVERY, SHARE = 2, 8
LOOKS = 8
"""Iterations between two looks at what a loss would restore."""
NAMES = ("embedding_adagrad", "embedding_adam", "experts", "transformer", "lora")
MOST = 100
"""Iterations after which a perturbed run is given up."""


@dataclass
class Outcome:
    """One run with one encoding."""

    nbytes: int
    squared: float
    slots: float
    rework: int


class Stored:
    """The newest copies in a store, decoded, next to the live tensors of a session."""

    def __init__(self, session: scarctl.Session, store: Path) -> None:
        self._store, self._layout = store, session.layout
        groups = {group.name: group.tensors for group in session.adapter.groups()}
        self._live = [list(groups[group.name].values()) for group in self._layout.groups]

    def each(self) -> Any:
        """Yield (is a parameter, live tensor, row numbers, stored rows, partition ids)."""
        store = Store.open(self._store)
        state, corrupt = store.state(0), list[Any]()
        for batch in store.read(state, state.ids, corrupt=corrupt):
            starts, stops = self._layout.row_ranges(batch.ids)
            rows = torch.from_numpy(
                np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])
            )
            of = np.repeat(batch.ids, stops - starts)
            for t, data in enumerate(batch.tensors):
                live = self._live[batch.group][t]
                found = (
                    torch.from_numpy(data.reshape(-1).copy())
                    .view(live.dtype)
                    .reshape(len(rows), *live.shape[1:])
                )
                yield t == 0, live, rows, found, of
        assert not corrupt
        store.close()

    @torch.no_grad()
    def distances(self) -> tuple[float, float]:
        """Return squared distance of all stored values from the live ones: of parameters, and of slots."""
        total = {True: 0.0, False: 0.0}
        for own, live, rows, found, _ in self.each():
            if live.is_floating_point():
                total[own] += float((live[rows] - found).double().square().sum())
        return total[True], total[False]

    @torch.no_grad()
    def restore(self, lost: np.ndarray) -> None:
        """Overwrite the live rows of lost partitions."""
        for _, live, rows, found, of in self.each():
            mine = torch.from_numpy(lost[of])
            live[rows[mine]] = found[mine]


def settle(session: scarctl.Session) -> None:
    """Wait until the store has all copies."""
    session._saving.finish()
    assert session._engine is not None
    assert session._engine.saver.drain(60)


def run(
    name: str, encoding: Encoding, seed: int, folder: Path, target: float | None
) -> tuple[Outcome, float]:
    """Train with a session. Return the outcome, and the last loss of the undisturbed run. target: that loss."""
    workload = getattr(workloads, name)()
    workload.reset(seed)
    memory = folder / "memory"
    memory.mkdir()
    model, optimizer = workload.state()
    session = scarctl.attach(
        model,
        optimizer,
        store=str(folder / "store"),
        interval=EVERY,
        fraction=1 / SHARE,
        partitioning=Partitioning(rows=workload.rows),
        selection=Selection(encoding=encoding, tracker="exact"),
        settings=Settings(daemon=False, arena_dir=str(memory), flush_on_signal=False),
    )
    failing, squared, slots = workload.iterations * 3 // 4, list[float](), list[float]()
    stored: Stored | None = None
    for step in range(1, failing + 1):
        workload.step(step)
        settle(session)
        stored = stored or Stored(session, folder / "store")
        # Right before a checkpoint: the copies are those of the checkpoint before.
        if step > workload.iterations // 2 and step % LOOKS == 1:
            one, other = stored.distances()
            squared.append(one)
            slots.append(other)
    assert stored is not None
    nbytes = session.stats.saved_bytes - session.layout.nbytes  # the first checkpoint saves everything
    lost = np.random.default_rng(seed).random(session.layout.partitions) < 1 / 2
    keep = [t.detach().clone() for tensors in stored._live for t in tensors]
    session.close(seal=False)
    if target is None:
        for step in range(failing + 1, workload.iterations + 1):
            workload.step(step)
        target = float(workload.metric())
        with torch.no_grad():
            for live, before in zip([t for tensors in stored._live for t in tensors], keep, strict=True):
                live.copy_(before)
    stored.restore(lost)
    step = failing
    while float(workload.metric()) > target and step < workload.iterations + MOST:
        step += 1
        workload.step(step)
    return Outcome(nbytes, float(np.mean(squared)), float(np.mean(slots)), step - workload.iterations), target


def speed() -> None:
    """CPU seconds per GiB of exact bytes."""
    rows, width = 32_768, 1_024
    specs = tuple(TensorSpec(slot, "F32", (rows, width)) for slot in ("", "exp_avg", "exp_avg_sq"))
    layout = build_layout([("w", "parameter", specs)], rows={"*": 1})
    rng = np.random.default_rng(0)
    tensors = [rng.standard_normal((rows, width), dtype=np.float32) for _ in specs]
    tensors[2] **= 2
    ids = np.arange(0, rows, 2)
    gib = sum(t[ids].nbytes for t in tensors) / 2**30

    def source(g: int, t: int, start: int, stop: int) -> memoryview:
        return memoryview(tensors[t][start:stop].reshape(-1)).cast("B")

    def seconds(call: Any) -> float:
        found = []
        for _ in range(4):
            began = time.process_time()
            call()
            found.append(time.process_time() - began)
        return min(found[1:]) / gib

    def chunks(count: int) -> list[np.ndarray]:
        return [ids[a : a + count] for a in range(0, len(ids), count)]

    lines = [
        ("copy", f"{seconds(lambda: [t[some].copy() for t in tensors for some in chunks(1024)]):.2f}", "")
    ]
    for encoding in ("bfloat16", "int8"):
        encoder = Encoder(layout, encoding, source, ids)
        parts = range(len(encoder.layout.groups[0].tensors))
        stored = [np.concatenate([encoder.pieces(0, t, some) for some in chunks(1024)]) for t in parts]
        taken = seconds(lambda e=encoder, p=parts: [e.pieces(0, t, some) for t in p for some in chunks(1024)])
        back = seconds(lambda e=encoding, s=stored: decode(layout.groups[0], e, s))
        lines.append((encoding, f"{taken:.2f}", f"{back:.2f}"))
    print_table(("CPU s per GiB", "encode", "decode"), lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=4)
    options.add_argument("--only", choices=NAMES)
    options.add_argument("--speed", action="store_true")
    args = options.parse_args()
    if args.speed:
        speed()
        return
    rows = []
    for name in [args.only] if args.only else NAMES:
        found: dict[Encoding, list[Outcome]] = {encoding: [] for encoding in ENCODINGS}
        for seed in range(args.seeds):
            target = None
            for encoding in ENCODINGS:
                with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                    outcome, target = run(name, encoding, seed, Path(folder), target)
                found[encoding].append(outcome)
        exact = found["consistent"]
        for encoding, outcomes in found.items():
            pairs = list(zip(outcomes, exact, strict=True))
            rows.append(
                (
                    name,
                    encoding,
                    spread([a.nbytes / b.nbytes for a, b in pairs], digits=2),
                    spread([a.squared / b.squared for a, b in pairs], digits=2),
                    spread([a.slots / b.slots for a, b in pairs], digits=2),
                    spread([a.rework for a in outcomes], digits=1),
                )
            )
    print_table(("workload", "encoding", "bytes", "parameters", "slots", "rework"), rows)


if __name__ == "__main__":
    main()
