"""Measure the fused distance pass over a GPT-2-small state, compared with one `a.sub_(b)` pass over the same
parameters; and over hundreds of biases, all together and one by one.

python benchmarks/distance.py [--repeats 9] [--threads N] [--device cuda]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from states import gpt2_small_shapes

from scarctl.checkpoint.batched import distances_of_groups
from scarctl.checkpoint.distance import distances
from scarctl.state.layout import TensorSpec, build_layout

BIASES = 400


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
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)

    shapes = gpt2_small_shapes()
    slots = ("", "exp_avg", "exp_avg_sq")
    layout = build_layout(
        [
            (name, "parameter", tuple(TensorSpec(s, "F32", shape) for s in slots))
            for name, shape in shapes.items()
        ]
    )
    saved = [torch.randn(shape) for shape in shapes.values()]
    live = [t.to(device, copy=True).add_(0.01) for t in saved]
    beside = [t + 0.01 for t in live]

    def subtract() -> None:
        for a, b in zip(beside, live, strict=True):
            a.sub_(b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    nbytes = sum(t.nbytes for t in live)
    print(
        f"{nbytes / 1e9:.2f} GB of parameters, {layout.partitions} partitions, {args.threads} threads, {device}"
    )
    base = median(subtract, args.repeats)
    print(f"a.sub_(b)            {base * 1e3:8.1f} ms   1.00x")
    whole = [[t] for t in live], [[t] for t in saved]
    for norm in ("l2", "rms", "relative"):
        seconds = median(lambda norm=norm: distances_of_groups(layout.groups, *whole, norm), args.repeats)  # type: ignore[misc]
        print(f"distances, {norm:9} {seconds * 1e3:8.1f} ms   {seconds / base:.2f}x")

    specs = [(f"bias{i}", "parameter", (TensorSpec("", "F32", (768,)),)) for i in range(BIASES)]
    groups = build_layout(specs).groups
    biases = [torch.randn(768) for _ in groups]
    apart = [([t.to(device) + 1], [t]) for t in biases]
    together = [a for a, _ in apart], [b for _, b in apart]

    def one_by_one() -> None:
        for group, (a, b) in zip(groups, apart, strict=True):
            distances(group, a, b)

    slow = median(one_by_one, args.repeats)
    fast = median(lambda: distances_of_groups(groups, *together), args.repeats)
    print(
        f"{BIASES} biases of 768 values: one by one {slow * 1e3:.2f} ms, "
        f"together {fast * 1e3:.2f} ms, {slow / fast:.1f}x"
    )


if __name__ == "__main__":
    main()
