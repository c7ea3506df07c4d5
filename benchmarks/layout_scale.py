"""Measure layout and selection of an embedding table with one row per partition.

    python benchmarks/layout_scale.py [--rows 10000000] [--repeats 5] [--fraction 0.125]

Seconds of the first call and of the best of all, and the best next to one pass over as many values (`np.cumsum` of
int64). The first call also pays the operating system for memory that this process has not touched before. Peak
memory is what the process held at most above what it held after imports, the arrays given to the calls included.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable

import numpy as np

from scarctl.policy.select import POLICIES, Candidates, select
from scarctl.state.layout import TensorSpec, build_layout

SHARDS = 8


def peak_bytes() -> int:
    """Return the most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Wall-clock seconds of every call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def lay_out(rows: int) -> None:
    """Make a layout and every array over its partitions."""
    slots = ("", "exp_avg", "exp_avg_sq")
    specs = tuple(TensorSpec(slot, "F32", (rows, 16)) for slot in slots)
    layout = build_layout([("emb.weight", "parameter", specs)], rows={"emb.*": 1})
    assert layout.partition_bytes.size == layout.shards(SHARDS, 0).size == rows
    ids = np.arange(rows)
    layout.group_of(ids)
    layout.row_ranges(ids)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fraction", type=float, default=0.125, help="budget as a share of all bytes")
    args = parser.parse_args()

    held = peak_bytes()
    figures = {"lay out": seconds(lambda: lay_out(args.rows), args.repeats)}
    layout_peak = peak_bytes() - held

    rng = np.random.default_rng(0)
    distance_sq = rng.standard_normal(args.rows) ** 2
    nbytes = np.full(args.rows, 192)
    staleness = rng.integers(0, 100, args.rows)
    eligible = np.ones(args.rows, dtype=bool)
    budget = int(args.fraction * nbytes.sum())

    def pick(policy: str, max_staleness: int | None = None) -> None:
        among = Candidates(
            distance_sq=distance_sq,
            nbytes=nbytes,
            staleness=staleness,
            eligible=eligible,
            max_staleness=max_staleness,
        )
        select(policy, among, budget)

    for policy in POLICIES:
        figures[f"select, {policy}"] = seconds(lambda policy=policy: pick(policy), args.repeats)  # type: ignore[misc]
    figures["select, priority, a tenth due"] = seconds(lambda: pick("priority", 90), args.repeats)
    select_peak = peak_bytes() - held

    one_pass = min(seconds(lambda: np.cumsum(nbytes), max(3, args.repeats)))
    print(f"{args.rows:,} partitions of one row; one pass takes {one_pass:.3f} s")
    print(f"{'':32}{'first':>9}{'best':>9}{'passes':>9}")
    for what, times in figures.items():
        print(f"{what:32}{times[0]:8.3f}s{min(times):8.3f}s{min(times) / one_pass:8.1f}x")
    print(
        f"peak memory: {layout_peak / 2**30:.2f} GiB to lay out, {select_peak / 2**30:.2f} GiB with selection"
    )


if __name__ == "__main__":
    main()
