"""Fused distance pass over a GPT-2-small state, next to one `a.sub_(b)` pass over the same parameters.

python benchmarks/distance.py [--repeats 9] [--threads N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from states import gpt2_small_shapes

from scarctl.distance import distances
from scarctl.layout import TensorSpec, build_layout


def median(call: Callable[[], object], repeats: int) -> float:
    """Median wall-clock seconds of `call` after one warm-up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    shapes = gpt2_small_shapes()
    slots = ("", "exp_avg", "exp_avg_sq")
    layout = build_layout(
        [
            (name, "parameter", tuple(TensorSpec(s, "F32", shape) for s in slots))
            for name, shape in shapes.items()
        ]
    )
    live = [torch.randn(shape) for shape in shapes.values()]
    saved = [t + 0.01 for t in live]

    def subtract() -> None:
        for a, b in zip(live, saved, strict=True):
            a.sub_(b)

    def fused(norm: str) -> None:
        for group, a, b in zip(layout.groups, live, saved, strict=True):
            distances(group, [a], [b], norm)

    nbytes = sum(t.nbytes for t in live)
    print(f"{nbytes / 1e9:.2f} GB of parameters, {layout.partitions} partitions, {args.threads} threads")
    base = median(subtract, args.repeats)
    print(f"a.sub_(b)            {base * 1e3:8.1f} ms   1.00x")
    for norm in ("l2", "rms", "relative"):
        seconds = median(lambda norm=norm: fused(norm), args.repeats)  # type: ignore[misc]
        print(f"distances, {norm:9} {seconds * 1e3:8.1f} ms   {seconds / base:.2f}x")


if __name__ == "__main__":
    main()
