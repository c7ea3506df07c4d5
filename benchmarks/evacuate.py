"""Measure the change lost when a host shuts down: an evacuation, a full save in the order of names, a full DCP save.

    PYTHONPATH=. python benchmarks/evacuate.py

A model with an embedding table trains after a full checkpoint, with a skewed choice of rows. Then its store takes
`--bandwidth` bytes per second, and the host shuts down after 5, 15 and 30 s. What counts is the squared distance of the
live parameters from what the store has then. All three write the same state through the same throttle.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import scarctl
from scarctl.config import grouped
from tests.support.throttled import ThrottledBlobs

CUTS = (5.0, 15.0, 30.0)


def train(rows: int, steps: int, folder: Path | None) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Return model, session (None without a folder) and the parameters of the checkpoint."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(rows, 64), "out": nn.Linear(64, 256)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = None
    if folder is not None:
        options = {
            "interval": 10**6,
            "daemon": False,
            "arena_dir": str(folder),
            "tracker": "exact",
            "partition_bytes": 4096,
        }
        session = scarctl.attach(model, optimizer, store=folder / "store", **grouped(**options))
    generator = np.random.default_rng(0)
    names = generator.permutation(rows)  # how often a row is used says nothing about its place
    before = {}
    for step in range(steps):
        ids = torch.from_numpy(names[np.minimum(generator.zipf(1.3, 4096) - 1, rows - 1)])
        loss = model["out"](model["embed"](ids)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            if session is not None:
                session.checkpoint(full=True, wait=True)
            before = {name: value.detach().clone() for name, value in model.named_parameters()}
    return model, session, before


def squared(model: nn.Module, saved: dict[str, torch.Tensor]) -> float:
    return sum(float((p.detach() - saved[n]).double().square().sum()) for n, p in model.named_parameters())


def evacuate(rows: int, steps: int, bandwidth: float, cut: float, *, by_name: bool) -> float:
    """Return what is left after a cut, of the parameters as another process reads them from the store."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, session, before = train(rows, steps, folder)
        if by_name:
            # The order of the queue is that of these distances per byte.
            order = np.linspace(2.0, 1.0, session.layout.partitions) * np.sqrt(session.layout.partition_bytes)
            session._engine.sent.unsaved = lambda: order.astype(np.float32)
        saver = session._saver
        slow = ThrottledBlobs(saver.store.blobs, bandwidth)
        saver.store.blobs = slow
        began = time.monotonic()
        session.evacuate(cut)
        assert time.monotonic() - began < cut + 1
        saved = _stored(folder / "store", before)
        slow.bytes_per_second = 1e12
        left = squared(model, saved)
        session.close()
    return left


def _stored(store: Path, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from scarctl.store import Store

    opened = Store.open(str(store))
    layout = opened.current_layout()
    assert layout is not None
    found = {name: value.clone() for name, value in before.items()}
    for shard in opened.shards():
        state = opened.state(shard)
        for batch in opened.read(state, state.ids[state.saved], corrupt=[]):
            groups = layout.group_of(batch.ids)
            at = 0
            for g, start, stop in zip(groups.tolist(), *layout.row_ranges(batch.ids), strict=True):
                rows = np.ascontiguousarray(batch.tensors[0][at : at + int(stop - start)])
                at += int(stop - start)
                name = layout.groups[g].name
                target = found[name].view(found[name].shape[0], -1)
                target[int(start) : int(stop)] = torch.from_numpy(rows.view(np.float32).copy())
    opened.close()
    return found


def _dcp(rows: int, steps: int, bandwidth: float, folder: str, ready: Any) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import filesystem

    model, _, _ = train(rows, steps, None)
    line = ThrottledBlobs(None, bandwidth)  # type: ignore[arg-type]

    class Slow(filesystem.FileSystem):
        def create_stream(self, path: Any, mode: str) -> Any:
            stream = super().create_stream(path, mode)
            return _throttled(stream, line) if "w" in mode else stream

    state = {"model": model.state_dict()}
    # As much as the others write: parameters and both of Adam's moments.
    for slot in ("exp_avg", "exp_avg_sq"):
        state[slot] = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    writer = dcp.FileSystemWriter(folder)
    writer.fs = Slow()
    ready.set()
    dcp.save(state, storage_writer=writer, no_dist=True)
    os._exit(0)


class _throttled:  # noqa: N801
    def __init__(self, context: Any, line: ThrottledBlobs) -> None:
        self._context, self._line = context, line

    def __enter__(self) -> Any:
        stream, line = self._context.__enter__(), self._line
        write = stream.write

        class Stream:
            def write(self, data: Any) -> int:
                view = memoryview(data).cast("B")
                for at in range(0, view.nbytes, 1 << 20):
                    line.pass_through(view[at : at + (1 << 20)].nbytes)
                    write(view[at : at + (1 << 20)])
                return view.nbytes

            def __getattr__(self, name: str) -> Any:
                return getattr(stream, name)

        return Stream()

    def __exit__(self, *error: Any) -> Any:
        return self._context.__exit__(*error)


def dcp_save(rows: int, steps: int, bandwidth: float, cut: float) -> float:
    """Return what is left if the process is killed during its save; DCP writes the file that makes it loadable last."""
    model, _, before = train(rows, steps, None)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        child = context.Process(target=_dcp, args=(rows, steps, bandwidth, folder, ready))
        child.start()
        ready.wait()
        child.join(cut)
        if child.is_alive():
            os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        return 0.0 if (Path(folder) / ".metadata").exists() else squared(model, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bandwidth", type=float, default=2e6, help="bytes per second")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    given = (arguments.rows, arguments.steps, arguments.bandwidth)
    model, _, before = train(*given[:2], None)
    everything = squared(model, before)
    nbytes = 3 * sum(p.numel() * 4 for p in model.parameters())
    print(
        f"{nbytes / 1e6:.0f} MB, {arguments.bandwidth / 1e6:.1f} MB/s: {nbytes / arguments.bandwidth:.0f} s for all"
    )
    print("left of the squared distance after | evacuate | by name | DCP")
    for cut in CUTS:
        left = [
            evacuate(*given, cut, by_name=False),
            evacuate(*given, cut, by_name=True),
            dcp_save(*given, cut),
        ]
        print(f"{cut:g} s | " + " | ".join(f"{100 * one / everything:.2f} %" for one in left), flush=True)


if __name__ == "__main__":
    main()
