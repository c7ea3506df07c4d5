"""Count the requests that a store on S3 takes: per start, per checkpoint, and per day; and what they cost.

A writer saves a state of 4 MiB to moto's S3 server, through a proxy that counts. Requests do not depend on the size of
the state, as long as a segment is below a part of an upload (8 MiB). A larger one takes a request for each part, and
three more. A day has a whole state every 30 s, which is the default, and the collection that this brings.

    python benchmarks/s3_requests.py [--commits 40]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from scarctl.policy.turns import REQUESTS, REQUESTS_WHOLE
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.store import Collector, Store, open_writer
from tests.support.places import KEY, SECRET, s3_client, s3_server
from tests.support.proxy import Proxy, Request, proxy

PER_DAY = 24 * 3600 // 30
PRICES = {"PUT": 0.005, "POST": 0.005, "LIST": 0.005, "GET": 0.0004, "HEAD": 0.0004, "DELETE": 0.0}
"""Dollars per 1,000 requests, from the public list."""


def kind(request: Request) -> str:
    """Return the kind by which a request is charged."""
    return "LIST" if request.method == "GET" and "list-type" in request.query else request.method


@contextmanager
def counted(wire: Proxy) -> Iterator[Counter[str]]:
    """Count the requests of a block."""
    wire.seen.clear()
    count: Counter[str] = Counter()
    yield count
    count.update(map(kind, wire.seen))


def show(what: str, count: Counter[str], per: int = 1) -> None:
    """Print one line: all requests, by kind, and dollars."""
    kinds = ", ".join(f"{count[name] / per:.4g} {name}" for name in PRICES if count[name])
    dollars = sum(count[name] / per * price / 1000 for name, price in PRICES.items())
    print(f"{what:<34}{sum(count.values()) / per:>9,.4g}   ${dollars:<10.4g}{kinds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=40)
    commits = parser.parse_args().commits
    layout = build_layout([("w", "parameter", (TensorSpec("", "F32", (64, 16384)),))], rows={"w": 8})
    values = np.zeros((64, 16384), np.float32)
    everything = np.arange(layout.partitions)
    with s3_server() as endpoint, proxy(endpoint) as wire:
        s3_client(endpoint).create_bucket(Bucket="requests")
        options = {"endpoint_url": wire.url, "key": KEY, "secret": SECRET}
        url = "s3://requests/run"
        print(f"{'':<34}{'requests':>9}   dollars")
        with counted(wire) as count:
            store = Store.create(url, storage_options=options)
        show("a new store", count)
        for what in ("the first start", "each later start"):
            with counted(wire) as count:
                writer = open_writer(Store.open(url, storage_options=options), layout=layout)
            show(what, count)
            with writer:
                writer.commit(everything, lambda g, t, a, b: values[a:b], step=1, sealed=True)
        with open_writer(Store.open(url, storage_options=options), layout=layout) as writer:
            source = lambda g, t, a, b: values[a:b]  # noqa: E731
            with counted(wire) as count:
                for step in range(2, commits + 2):
                    writer.commit(everything[:4], source, step=step)
            show("a checkpoint of a part", count, commits)
            collector, step = Collector(writer), commits + 2
            with counted(wire) as count:
                for part in np.array_split(np.tile(everything, commits // 8), commits):
                    writer.commit(np.unique(part), source, step=(step := step + 1))
                    collector.settle()
            show("an eighth, with collection", count, commits)
            began = time.perf_counter()
            with counted(wire) as count:
                for _ in range(commits):
                    step += 1
                    writer.commit(everything, source, step=step, sealed=True, extras={"step": step})
                    collector.settle()
            took = (time.perf_counter() - began) / commits
            show("a whole state, with collection", count, commits)
            day = Counter({name: round(n * PER_DAY / commits) for name, n in count.items()})
            show(f"a day of {PER_DAY:,} whole states", day)
        with counted(wire) as count:
            store = Store.open(url, storage_options=options)
            store.read_extras(store.state(0))
        show("reading the newest state's extras", count)
    print(f"{1000 * took:.0f} ms per whole state")
    print(f"`scarctl plan` expects {REQUESTS} requests per part, {REQUESTS_WHOLE} per whole state")


if __name__ == "__main__":
    main()
