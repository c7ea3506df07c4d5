"""Run an actor that counts, as a process that can be killed: it answers calls that come over a Unix socket.

    python -m tests.adapters.kept_actor STORE SOCKET EVERY

A request is a line of JSON, [caller, number]; the answer is the count after the call.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import numpy as np

from scarctl_adapters.actor import Kept, once

ROWS = 64


class Counter:
    """Every call adds 1 to all rows, one after the other: a state whose rows differ mixes two calls."""

    def __init__(self, store: str, every: int) -> None:
        self.state = {"rows": np.zeros((ROWS, 256)), "calls": np.zeros(1, np.int64)}
        self.kept = Kept(self.state, store=store, every=every)

    @once
    def add(self) -> list[float]:
        for row in self.state["rows"]:
            row += 1
        self.state["calls"] += 1
        return [float(self.state["rows"].min()), float(self.state["rows"].max())]


def main(store: str, address: str, every: str) -> None:
    counter = Counter(store, int(every))
    with socket.socket(socket.AF_UNIX) as listening:
        Path(address).unlink(missing_ok=True)
        listening.bind(address)
        listening.listen()
        while True:
            connection, _ = listening.accept()
            with connection, connection.makefile("rw") as stream:
                for line in stream:
                    caller, number = json.loads(line)
                    if caller == "end":
                        counter.kept.close()
                        return
                    answer = counter.add(call=(caller, number))  # type: ignore[call-arg]
                    stream.write(json.dumps(answer) + "\n")
                    stream.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
