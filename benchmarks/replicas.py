"""Measure the cost of a copy of memory on another host, and of fetching it: throughput, and CPU per GiB.

    python benchmarks/replicas.py --mib 512 --rounds 3

Both ends are processes of this machine, over the loopback interface. Each round sends the whole state to a host that
has nothing, then all of it, when all has changed, then a quarter of it that has changed. Then it sends the same bytes
over a plain connection, whose receiver drops them, and over another one, whose receiver writes them to a new file.
Before that it is fetched to a third host, and the owner's arena is moved as ranks move it, over a group of gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import secrets
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch.distributed as dist

from scarctl.arena.arena import Arena
from scarctl.arena.folder import host_folder
from scarctl.arena.header import FILE
from scarctl.arena.line import FILE as LINE
from scarctl.arena.transfer import Incoming, Outgoing
from scarctl.distributed.collectives import Team
from scarctl.distributed.host_memory import receive, send
from scarctl.peers.fetch import Asker, fetch_memory
from scarctl.peers.handshake import SECRET_BYTES
from scarctl.peers.host import Host
from scarctl.peers.sender import Candidate, Sender, Source
from scarctl.peers.tls import Tls
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import pack
from scarctl.store import Store

START = "11" * 16
GIB = 1 << 30


def host(folder: str, secret: bytes, runs: str, told: Connection, files: list[str] | None) -> None:
    """Keep replicas until asked to end. Then report the CPU time."""
    kept = Host(Path(folder))
    told.send(kept.admit(START, secret, runs, "127.0.0.1", 0, None if files is None else Tls(files)))
    while told.recv():
        told.send(time.process_time())
    kept.close()


def sink(told: Connection) -> None:
    """Receive what plain connections bring, until None comes.

    A path that came before is that of a new file for it.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        told.send(listener.getsockname()[1])
        buffer = memoryview(bytearray(8 << 20))
        while (path := told.recv()) is not None:
            began = time.process_time()
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) if path else -1
            connection, _ = listener.accept()
            with connection:
                while size := connection.recv_into(buffer, flags=socket.MSG_WAITALL):
                    if path:
                        os.write(file, buffer[:size])
            if path:
                os.close(file)
                os.unlink(path)
            told.send(time.process_time() - began)


def plain(
    results: dict[str, list[float]], name: str, data: memoryview, told: Connection, port: int, path: str
) -> None:
    """Send the bytes over a plain connection, and note throughput and CPU time. path: a new file for them, or ""."""
    told.send(path)
    gib = len(data) / GIB
    here, began = time.process_time(), time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as raw:
        for at in range(0, len(data), 8 << 20):
            raw.sendall(data[at : at + (8 << 20)])
        raw.shutdown(socket.SHUT_WR)
        receiver = float(told.recv())
    note(results, f"{name}: GiB/s", gib / (time.perf_counter() - began))
    note(results, f"{name}: CPU s per GiB, sender", (time.process_time() - here) / gib)
    note(results, f"{name}: CPU s per GiB, receiver", receiver / gib)


def rank(number: int, port: int, store: str, base: str, told: Connection) -> None:
    """Move the arena of shard 0 from rank 0 to rank 1 whenever asked to, and report the seconds."""
    options = {"rank": number, "world_size": 2, "init_method": f"tcp://127.0.0.1:{port}"}
    dist.init_process_group("gloo", **options)
    team, view = Team(), Store.open(store).of_shard(0)
    while told.recv():
        dist.barrier()
        began = time.perf_counter()
        if number == 0:
            outgoing = Outgoing.open(view, base)
            assert outgoing is not None
            team.from_rank(0, [outgoing.size, dict(outgoing.files())])
            send(outgoing, 1, team)
            team.from_rank(0, outgoing.digest())
            outgoing.close()
        else:
            size, files = team.from_rank(0, None)
            incoming = Incoming(view, base, size, sum(map(len, files.values())))
            for name, data in files.items():
                incoming.keep(name, data)
            receive(incoming, 0, team)
            incoming.install(team.from_rank(0, None))
            incoming.close()
            shutil.rmtree(incoming.folder)
        told.send(time.perf_counter() - began)


def spent(told: Connection) -> float:
    told.send(True)
    return float(told.recv())


def copy(arena: Arena, ids: np.ndarray, step: int) -> None:
    """Make a checkpoint of these partitions. Their bytes do not matter to the speed."""
    arena.begin(ids)
    arena.end(ids, pack(1, step))
    arena.reach(step)


def until_current(sender: Sender) -> None:
    """Wait until the host has all of it. Looking costs next to nothing, so that it does not count as sending."""
    number = sender.ask()
    while not sender.has_acknowledged(number):
        time.sleep(0.001)


@contextlib.contextmanager
def measured(
    results: dict[str, list[float]],
    name: str,
    gib: float,
    told: Connection,
    after: float = 0.0,
    here: str = "sender",
) -> Iterator[None]:
    """Note the throughput of sending so many GiB, and the CPU time of both ends per GiB.

    here: name of this process. after: seconds that count for the CPU time alone: memory is mapped when nothing comes.
    """
    there, used, began = spent(told), time.process_time(), time.perf_counter()
    yield
    note(results, f"{name}: GiB/s", gib / (time.perf_counter() - began))
    time.sleep(after)
    note(results, f"{name}: CPU s per GiB, {here}", (time.process_time() - used) / gib)
    note(results, f"{name}: CPU s per GiB, host", (spent(told) - there) / gib)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--rows", type=int, default=256, help="rows of 1 KiB per partition")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default="/dev/shm")
    parser.add_argument("--tls", nargs=3, metavar="PEM", help="certificate, key and authority of both ends")
    arguments = parser.parse_args()
    rows = arguments.mib << 10
    specs = [("a", "parameter", (TensorSpec("", "F32", (rows, 256)),))]
    layout = build_layout(specs, rows={"a": arguments.rows})
    everything = np.arange(layout.partitions)
    secret = secrets.token_bytes(SECRET_BYTES)
    context = multiprocessing.get_context("spawn")
    results: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as base:
        store = Store.create(str(Path(base, "store")), shards=1)
        view = store.of_shard(0)
        run, runs = view.run_id, view.run_id.partition("-")[0]
        homes = {name: host_folder(str(Path(base, name))) for name in ("east", "west", "north", "south")}
        for home in homes.values():
            home.mkdir(parents=True, mode=0o700)
        with socket.create_server(("127.0.0.1", 0)) as free:
            group_port = int(free.getsockname()[1])
        pipes = [context.Pipe() for _ in range(2)]
        for number, name in enumerate(("east", "south")):
            words = (number, group_port, str(store.root), str(Path(base, name)), pipes[number][1])
            context.Process(target=rank, args=words, daemon=True).start()
        ours, theirs = context.Pipe()
        receiver = context.Process(target=sink, args=(theirs,), daemon=True)
        receiver.start()
        raw_port = ours.recv()
        for round_number in range(arguments.rounds):
            arena = Arena.create(homes["east"] / run, layout, run_id=run, epoch=1)
            arena.take_over(0)  # no process: so it may move
            (arena.folder / LINE).unlink(missing_ok=True)  # it belongs to a store that nobody has claimed
            arena.close()  # the lock
            arena.memory()[:] = round_number + 1
            copy(arena, everything, 1)
            told, other = context.Pipe()
            process = context.Process(
                target=host, args=(str(homes["west"]), secret, runs, other, arguments.tls), daemon=True
            )
            process.start()
            port = told.recv()
            tls = None if arguments.tls is None else Tls(arguments.tls)
            source = Source(run, "", "east", START, secret, None, tls)
            sender = Sender(source, [Candidate("west", "127.0.0.1", port)], arena)
            gib = layout.nbytes / GIB
            with measured(results, "first copy", gib, told, 0.5 + 2 * gib):
                sender.start()
                until_current(sender)
            with measured(results, "everything changed", gib, told):
                copy(arena, everything, 2)
                until_current(sender)
            generator = np.random.default_rng(round_number)
            quarter = np.sort(generator.permutation(everything)[: everything.size // 4])
            with measured(results, "a quarter changed", gib * quarter.size / everything.size, told):
                copy(arena, quarter, 3)
                until_current(sender)
            used = (Path(homes["west"], run, FILE).stat().st_blocks << 9) - layout.nbytes
            note(results, "a replica: MiB more than the state", used / (1 << 20))
            with measured(results, "fetched to a third host", gib, told, here="receiver"):
                places = [Candidate("west", "127.0.0.1", port)]
                found = fetch_memory(view, str(Path(base, "north")), places, Asker(START, secret, tls, 60.0))
            assert found is not None
            shutil.rmtree(homes["north"] / run)
            for pipe, _ in pipes:
                pipe.send(True)
            note(results, "moved over gloo: GiB/s", gib / max(float(pipe.recv()) for pipe, _ in pipes))
            sender.close(done=True, patience=30.0)
            told.send(False)
            process.join()
            data = memoryview(arena.memory())[: layout.nbytes]
            plain(results, "plain TCP", data, ours, raw_port, "")
            plain(results, "plain TCP into new memory", data, ours, raw_port, str(Path(base, "new")))
            there = np.empty(layout.nbytes, np.uint8)
            for _ in range(2):  # the first one touches the pages
                began = time.perf_counter()
                there[:] = arena.memory()[: layout.nbytes]
            note(results, "plain copy in memory: GiB/s", gib / (time.perf_counter() - began))
            shutil.rmtree(homes["east"] / run)
        ours.send(None)
        receiver.join()
        for pipe, _ in pipes:
            pipe.send(False)
    print(
        f"{arguments.mib} MiB in {layout.partitions} partitions, {os.cpu_count()} cores, loopback; median (all rounds)"
    )
    for name, values in results.items():
        print(f"{name}: {statistics.median(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})")


def note(results: dict[str, list[float]], name: str, value: float) -> None:
    results.setdefault(name, []).append(value)


if __name__ == "__main__":
    main()
