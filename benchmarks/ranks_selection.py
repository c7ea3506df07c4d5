"""Measure time and traffic of selection over many ranks, compared with one `policy.select` over the same partitions.

python benchmarks/ranks_selection.py [--repeats 5] [--largest 10000000] [--ranks 10000] [--each 1000]

First table, one rank of a few: seconds of this rank's own work (its order, its histograms, its picks), of
`policy.select` on the same arrays, and the bytes that it adds up with the others, by its number of partitions. Second
table, many ranks in one process: how many histograms a round takes, how far the picks are from the budget, what each
rank sends in a ring, and how long one rank's part of the work takes. Third table: what a round takes over gloo on the
loopback interface, with a process per rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray
from timing import print_table

from scarctl.distributed.global_selection import BINS, MOST, SUMS, Books, Offer, Turn, pick
from scarctl.policy.select import Candidates, select

FRACTION = 1 / 8
HEAD = 4
"""Numbers that the exchange adds to each message."""
MESSAGE = 8 * (HEAD + MOST + SUMS + BINS)
KINDS = {
    "skewed": lambda rng, n: np.exp(rng.normal(scale=3.0, size=n)),
    "equal": lambda rng, n: np.ones(n),
}


def offer_of(kind: str, rank: int, n: int) -> Offer:
    rng = np.random.default_rng([rank, n])
    return Offer("priority", candidates(KINDS[kind](rng, n), step=10), shard=rank)


def candidates(distance_sq: NDArray[np.float64], step: int) -> Candidates:
    n = distance_sq.size
    return Candidates(
        distance_sq=distance_sq,
        nbytes=np.full(n, 4096),
        staleness=np.zeros(n, dtype=np.int64),
        eligible=np.ones(n, dtype=bool),
        step=step,
    )


def rounds(turns: list[Turn]) -> int:
    """Carry a round out; returns how many histograms it took."""
    taken, more = 0, True
    while more:
        most, sums = turns[0].send()
        for turn in turns[1:]:
            high, more_sums = turn.send()
            most, sums = np.maximum(most, high), sums + more_sums
        more = {turn.receive(most, sums) for turn in turns} == {True}
        taken += 1
    return taken


def of_one(n: int, repeats: int) -> list[str]:
    rng = np.random.default_rng(n)
    distance_sq = KINDS["skewed"](rng, n)
    budget = int(FRACTION * 4096 * n)
    shared, alone, levels = [], [], 0
    for number in range(repeats + 1):
        started = time.perf_counter()
        offer = Offer("priority", candidates(distance_sq, number), shard=0)
        turn = Turn(Books(), offer, budget=budget)
        levels = rounds([turn])
        picked = pick(offer, turn.threshold)
        middle = time.perf_counter()
        whole = select("priority", candidates(distance_sq, 0), budget)
        if number:
            shared.append(middle - started)
            alone.append(time.perf_counter() - middle)
        assert abs(picked.size - whole.ids.size) <= 0.02 * whole.ids.size
    a, b = statistics.median(shared), statistics.median(alone)
    return [
        f"{n:,}",
        f"{a * 1e3:.2f}",
        f"{b * 1e3:.2f}",
        f"{a / b:.2f}",
        str(levels),
        f"{levels * MESSAGE:,}",
    ]


def of_many(kind: str, ranks: int, each: int) -> list[str]:
    budget = int(FRACTION * 4096 * each)
    turns = [Turn(Books(), offer_of(kind, rank, each), budget=budget) for rank in range(ranks)]
    started = time.perf_counter()
    levels = rounds(turns)
    seconds = (time.perf_counter() - started) / ranks
    threshold = turns[0].threshold
    nbytes = sum(4096 * pick(turn.offer, threshold).size for turn in turns)
    assert nbytes == threshold.taken
    ring = 2 * levels * MESSAGE * (ranks - 1) // ranks
    return [
        kind,
        f"{ranks:,}",
        str(levels),
        f"{100 * (nbytes / (budget * ranks) - 1):+.3f} %",
        f"{ring:,}",
        f"{ranks * levels * MESSAGE:,}",
        f"{2 * levels * (ranks - 1):,}",
        f"{seconds * 1e3:.2f}",
    ]


def member(rank: int, world: int, folder: str, each: int, count: int) -> None:
    """Run one rank of the third table. Prints the seconds of its rounds."""
    import torch
    import torch.distributed as dist

    from scarctl.distributed.rounds import Exchange

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/rendezvous", world)
    group = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=60))
    exchange = Exchange(group, rank, world)
    books, seconds = Books(), []
    exchange.hurry()
    for number in range(count + 3):
        offer = offer_of("skewed", rank, each)
        turn = Turn(books, offer, budget=int(FRACTION * 4096 * each))
        started = time.perf_counter()
        assert exchange.wait(exchange.join(number, turn), 60.0), exchange.failure
        if number >= 3:
            seconds.append(time.perf_counter() - started)
    print(json.dumps(seconds))
    exchange.close()


def over_gloo(world: int, each: int, count: int = 30) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--each", str(each), "--member"]
        members = [
            subprocess.Popen(
                [*command, str(rank), str(world), folder, str(count)], stdout=subprocess.PIPE, text=True
            )
            for rank in range(world)
        ]
        try:
            taken = [json.loads(process.communicate(timeout=120)[0]) for process in members]
        finally:
            for process in members:
                process.kill()
                process.wait()
    longest = [max(of_round) for of_round in zip(*taken, strict=True)]
    return [
        str(world),
        f"{each:,}",
        f"{statistics.median(longest) * 1e3:.2f}",
        f"{min(longest) * 1e3:.2f}-{max(longest) * 1e3:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--largest", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--each", type=int, default=1000, help="partitions of each of many ranks")
    parser.add_argument("--member", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        rank, world, folder, count = args.member
        member(int(rank), int(world), folder, args.each, int(count))
        return

    sizes = [10**k for k in range(3, 10) if 10**k <= args.largest]
    print_table(
        ["partitions", "this rank ms", "policy.select ms", "ratio", "histograms", "bytes summed"],
        [of_one(n, args.repeats) for n in sizes],
    )
    print()
    worlds = [world for world in (10, 100, 1000, 10_000) if world <= args.ranks]
    heads = ["scores", "ranks", "histograms", "off budget", "ring: B sent", "gather: B at root", "ring: hops"]
    print_table(
        [*heads, "ms per rank"],
        [of_many(kind, world, args.each) for kind in KINDS for world in worlds],
    )
    print(f"({args.each:,} partitions each; a ring's bytes are per rank)\n")
    print_table(
        ["ranks", "partitions each", "round over gloo ms", "range"],
        [over_gloo(world, each) for world in (2, 4) for each in (1000, 1_000_000)],
    )


if __name__ == "__main__":
    main()
