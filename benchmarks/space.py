"""Measure what a store takes on disk, and the bytes written to keep it that small, compared with the priority policy.

A state whose partitions change at very different rates is saved 1/8 at a time, as a session does it: real policy, real
files. The table says, over the second half of the run: bytes of all files per byte of newest copies (`space`), the same
without what only the kept sealed state holds (`own`), the largest of that right after a commit, before anything is
collected (`peak`), and bytes written per byte handed over: of partitions (`copied`), and with headers, tables and
records (`written`).

    python benchmarks/space.py [--mib 32] [--commits 200]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from scarctl.policy.select import Candidates, select
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.store import Collector, Store, open_writer, verify
from scarctl.store.usage import usage

PATTERNS = ("uniform", "lognormal", "zipf", "hot tenth")


def rates(pattern: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the speed of change of each partition."""
    if pattern == "uniform":
        return np.ones(count)
    if pattern == "lognormal":
        return np.exp(rng.standard_normal(count))
    if pattern == "zipf":
        return rng.permutation(1 / np.arange(1, count + 1))
    return np.where(rng.random(count) < 0.1, 1.0, 0.02)


def run(
    pattern: str, policy: str, seals: bool, layout: Layout, commits: int, folder: Path
) -> dict[str, float]:
    """Simulate the life of one store, and return its figures."""
    rng = np.random.default_rng(0)
    speed = rates(pattern, layout.partitions, rng)
    distance = np.zeros(layout.partitions)
    data = [
        [rng.integers(0, 256, (s.rows, s.row_bytes), dtype=np.uint8) for s in g.tensors]
        for g in layout.groups
    ]
    store = Store.create(folder)
    space, own, peak, spent = [], [], [], 0.0
    with open_writer(store, layout=layout) as writer:
        collector = Collector(writer)

        def source(g: int, t: int, start: int, stop: int) -> np.ndarray:
            return data[g][t][start:stop]

        writer.commit(np.arange(layout.partitions), source, step=0, sealed=True, extras={"step": 0})
        saved = np.zeros(layout.partitions, np.int64)
        credit = cursor = 0
        for step in range(1, commits + 1):
            distance += speed * np.abs(rng.standard_normal(layout.partitions))
            sealed = seals and step % 20 == 0
            among = Candidates(
                distance_sq=distance**2,
                nbytes=layout.partition_bytes,
                staleness=step - saved,
                eligible=np.ones(layout.partitions, bool),
                step=step,
            )
            picked = select(policy, among, layout.nbytes // 8, credit=credit, cursor=cursor)
            ids = np.arange(layout.partitions) if sealed else picked.ids
            credit, cursor = picked.credit, picked.cursor
            distance[ids], saved[ids] = 0.0, step
            writer.commit(ids, source, step=step, sealed=sealed, extras={"step": step})
            before = usage(store, [writer.state])["bytes"]
            started = time.perf_counter()
            collector.settle()
            spent += time.perf_counter() - started
            if step == commits // 2:
                moved = collector.done.moved_bytes
                handed, written = writer.ledger.handed_bytes, writer.ledger.written_bytes
            if step > commits // 2:
                total = usage(store, [writer.state])["bytes"]
                kept = collector.space().pinned
                space.append(total / layout.nbytes)
                own.append((total - kept) / layout.nbytes)
                peak.append((before - kept) / layout.nbytes)
        copied = 1 + (collector.done.moved_bytes - moved) / (writer.ledger.handed_bytes - handed)
        amplification = (writer.ledger.written_bytes - written) / (writer.ledger.handed_bytes - handed)
        seconds = time.perf_counter()
        reopened = Store.open(folder).state(0)
        seconds = time.perf_counter() - seconds
    assert verify(store, read_data=True).intact
    assert reopened.saved.all()
    return {
        "space": max(space), "own": max(own), "peak": max(peak), "copied": copied, "written": amplification,
        "segments": len(list(folder.glob("lanes/0/seg/*"))), "records": len(list(folder.glob("lanes/0/log/*/*"))),
        "open ms": seconds * 1000, "turn ms": spent / commits * 1000,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--commits", type=int, default=200)
    given = parser.parse_args()
    rows = given.mib * 1024 // 12
    moments = tuple(TensorSpec(name, "F32", (rows, 1024)) for name in ("", "exp_avg", "exp_avg_sq"))
    layout = build_layout([("layer", "parameter", moments)], rows={"layer": max(1, rows // 1024)})
    print(
        f"state of {layout.nbytes / 2**20:.0f} MiB, {layout.partitions} partitions, {given.commits} commits of 1/8"
    )
    columns = ("space", "own", "peak", "copied", "written", "segments", "records", "open ms", "turn ms")
    print(f"{'changes':<12}{'policy':<10}{'sealed':<10}" + "".join(f"{c:>10}" for c in columns))
    cases = [(p, "priority", seals) for p in PATTERNS for seals in (False, True)]
    cases += [("uniform", "round", False), ("uniform", "random", False)]
    for pattern, policy, seals in cases:
        with tempfile.TemporaryDirectory(prefix="scarctl-space-") as folder:
            found = run(pattern, policy, seals, layout, given.commits, Path(folder) / "run")
        digits = {c: 0 if c in ("segments", "records") else 2 for c in columns}
        figures = "".join(f"{found[c]:>10.{digits[c]}f}" for c in columns)
        print(f"{pattern:<12}{policy:<10}{'each 20th' if seals else 'first':<10}{figures}", flush=True)


if __name__ == "__main__":
    main()
