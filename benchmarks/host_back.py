"""Measure the time from a host's death to the first step after it, by part.

    python benchmarks/host_back.py [--mb 200] [--rounds 3] [--folder DIR]

Two ranks of FSDP2 on a CPU, each on a host of its own: a folder of arenas and a daemon, gloo over the loopback
interface. The host of rank 0 dies: its rank, its daemon and its memory. Ways back:

  peer      scarctl with peers=1, all ranks restart: rank 0's part comes from the other host's memory
  store     the same with peers=0: rank 0's part comes from the store
  DCP       torch.distributed.checkpoint from the same disk, all ranks restart; a full save every `--every` steps
  lm-resiliency  0.2.0 (--python lm-resiliency=INTERPRETER): copies on the paired rank and on node-local disk every
            `--every` steps, all ranks restart; attach includes its read. When rank 1 ends it writes both copies to its
            disk; the supervisor then copies these files to the new host, as a launcher would (part of detect)
  in place  as `peer`, but rank 1 lives: it destroys its process group and makes another with a new store. Only a new
            rank 0 starts
  standby   as `in place`, and the new rank 0 is a process that waits with torch imported
  warm      as `peer`, but all ranks are processes that wait with torch imported

`in place` and `standby` are prototypes. They measure process groups only: rank 1 makes its session anew, and resumes.

  detect    until the supervisor, which looks every 0.1 s as torchrun does, has ended the other rank; or until rank 1
            finds that its collective has failed
  start     of an interpreter, until the first line
  import    of torch and scarctl
  group     init_process_group; before that, in place, destroy_process_group
  build     model and optimizer
  attach    and opening the store
  read      session.resume, or dcp.load
  step      the first one
  total     from the kill to the end of the first step of all ranks
  lost      iterations that are trained again

The slowest rank counts for each part. So parts may add up to more than the total. Medians over rounds (lowest-highest).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()  # the first line, before the imports that take long

PARTS = ("start", "import", "group", "build", "attach", "read", "step")
WAYS = ("peer", "store", "DCP", "in place", "standby", "warm")
"""Ways that need no other package."""
LOOK_SECONDS = 0.1
DIES_AFTER = 30
"""Iterations before the host dies."""
LIMIT = 120.0


# -- a rank ----------------------------------------------------------------------------------------------------------


class Rank:
    """One rank's process: it trains until it is killed, or for one step after a death."""

    def __init__(self, argument: dict[str, Any], began: float) -> None:
        self.argument = argument
        self.folder = Path(argument["folder"])
        self.times: dict[str, float] = {}
        self.at = began

    def part(self, name: str) -> None:
        """End a part: what follows is another one."""
        now = time.monotonic()
        self.times[name] = now - self.at
        self.at = now

    def run(self) -> None:
        import torch
        from torch import distributed as dist

        import scarctl
        import scarctl.session.session  # noqa: F401

        torch.set_num_threads(1)
        self.part("import")
        if self.argument.get("waits"):
            note(self.folder / f"waits-{self.argument['rank']}", {})
            while not (path := self.folder / f"go-{self.argument['rank']}").exists():
                time.sleep(0.002)
            self.argument |= json.loads(path.read_text())
            self.times, self.at = {}, time.monotonic()
        self.join(self.argument["port"])
        try:
            self.train(again=self.argument["again"])
        except Exception:
            if not self.argument.get("lives"):
                raise
            note(self.folder / "found-out", {"at": time.monotonic()})
            self.session.close(seal=False)
            while not (path := self.folder / "rejoin").exists():
                time.sleep(0.002)
            self.times, self.at = {}, time.monotonic()
            dist.destroy_process_group()
            self.join(json.loads(path.read_text())["port"])
            self.train(again=True)

    def join(self, port: int) -> None:
        from datetime import timedelta

        from torch import distributed as dist

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        dist.init_process_group(
            "gloo", rank=self.argument["rank"], world_size=2, timeout=timedelta(seconds=LIMIT)
        )
        self.part("group")

    def train(self, *, again: bool) -> None:
        import torch
        from torch import nn
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        width = 512
        rows = int(self.argument["mb"]) * 1_000_000 // (3 * 4 * width)
        model = nn.Sequential(nn.Embedding(rows, width), nn.Linear(width, 64))
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.part("build")
        library = {"DCP": self.dcp, "lm-resiliency": self.lm_resiliency}.get(
            self.argument["way"], self.scarctl
        )
        saves = library(model, optimizer, again)
        for number in range(self.first + 1, self.first + 10**6):
            ids = torch.randint(0, rows, (64,), generator=torch.Generator().manual_seed(number))
            loss = model(ids).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if again:
                self.part("step")
                note(
                    self.folder / f"back-{self.argument['rank']}",
                    {"at": time.monotonic(), "from": self.first, **self.times},
                )
                break
            time.sleep(self.argument["pace"])
            saves(number)
            note(self.folder / f"at-{self.argument['rank']}", {"step": number})
        if self.session is not None:
            self.session.close(seal=False)

    session: Any = None
    first = 0

    def scarctl(self, model: Any, optimizer: Any, again: bool) -> Any:
        import scarctl

        self.session = session = scarctl.attach(
            model,
            optimizer,
            store=self.folder / "store",
            fraction=1 / self.argument["every"],
            interval=1,
            settings=scarctl.Settings(
                arena_dir=self.argument["home"], peers=int(self.argument["way"] != "store"), daemon=True
            ),
        )
        self.part("attach")
        self.first = session.resume().step
        self.part("read")
        return lambda number: None

    def lm_resiliency(self, model: Any, optimizer: Any, again: bool) -> Any:
        import torch
        from lm_resiliency import InMemoryCkptConfig, enable_resiliency

        every = self.argument["every"]
        config = InMemoryCkptConfig(
            interval=every,
            replication_jump=1,
            disk_flush_interval=every,
            disk_folder=f"{self.argument['home']}/lm-resiliency",
            run_id="benchmark",
            pin_memory=False,
        )
        handle = enable_resiliency(
            model,
            optimizer,
            interval=every,
            enable_detection=False,
            checkpoint=config,
            device=torch.device("cpu"),
        )
        self.first = handle.step_count
        self.part("attach")
        self.part("read")
        return lambda number: None

    def dcp(self, model: Any, optimizer: Any, again: bool) -> Any:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        place = self.folder / "dcp"
        self.part("attach")
        if again:
            done = sorted((int(p.parent.name) for p in place.glob("*/.metadata")), reverse=True)
            self.first = done[0] if done else 0
            values, slots = get_state_dict(model, optimizer)
            state = {"model": values, "optimizer": slots}
            dcp.load(state, checkpoint_id=place / str(self.first))
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        self.part("read")

        def save(number: int) -> None:
            if number % self.argument["every"] == 0:
                values, slots = get_state_dict(model, optimizer)
                dcp.save({"model": values, "optimizer": slots}, checkpoint_id=place / str(number))

        return save


def note(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value))
    os.replace(temporary, path)


# -- the supervisor ----------------------------------------------------------------------------------------------------


def start(folder: Path, way: str, rank: int, home: Path, args: Any, **more: Any) -> tuple[Any, float]:
    """Start a rank. Returns the process, and when it was started."""
    home.mkdir(exist_ok=True)
    argument = {"folder": str(folder), "way": way, "rank": rank, "home": str(home), "mb": args.mb}
    argument |= {"every": args.every, "pace": args.pace, "again": False, **more}
    before = time.monotonic()
    with (folder / f"{rank}.err").open("ab") as errors:
        process = subprocess.Popen(
            [args.pythons.get(way, sys.executable), __file__, "--rank", json.dumps(argument)], stderr=errors
        )
    return process, before


def wait_for(path: Path, *processes: Any) -> dict[str, Any]:
    until = time.monotonic() + LIMIT
    while not path.exists():
        if time.monotonic() > until or any(process.poll() for process in processes):
            errors = "\n".join(p.read_text()[-2000:] for p in path.parent.glob("*.err"))
            raise SystemExit(f"{path.name} never came\n{errors}")
        time.sleep(0.002)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def daemon_of(home: Path) -> Any:
    from scarctl.arena.folder import host_folder
    from scarctl.daemon.client import ask_status

    return ask_status(host_folder(str(home)), patience=30.0)


def one_round(folder: Path, way: str, args: Any) -> dict[str, float]:
    """Measure one death, and the way back."""
    homes = [folder / "east", folder / "west"]
    alive = way in ("in place", "standby")
    first = free_port()
    ranks = [start(folder, way, r, homes[r], args, port=first, lives=alive and r == 1)[0] for r in range(2)]
    waiting = {
        r: start(folder, way, r, folder / "north" if r == 0 else homes[1], args, waits=True, port=0)[0]
        for r in {"standby": [0], "warm": [0, 1]}.get(way, [])
    }
    for r in waiting:
        wait_for(folder / f"waits-{r}")
    while int(wait_for(folder / "at-0", *ranks)["step"]) < DIES_AFTER:
        time.sleep(0.01)
    if way not in ("store", "DCP", "lm-resiliency"):
        while "following" not in str(daemon_of(homes[0])):
            time.sleep(0.01)
    killed = time.monotonic()
    if way not in ("DCP", "lm-resiliency"):
        os.kill(daemon_of(homes[0])["pid"], signal.SIGKILL)
    ranks[0].kill()
    reached = int(json.loads((folder / "at-0").read_text())["step"])
    shutil.rmtree(homes[0])
    if alive:
        ranks[0].wait()
        found = wait_for(folder / "found-out", ranks[1])["at"]
    else:
        while ranks[0].poll() is None:
            time.sleep(LOOK_SECONDS)
        ranks[1].terminate()
        ranks[1].wait()
        if way == "lm-resiliency":
            shutil.copytree(homes[1] / way, folder / "north" / way)
        found = time.monotonic()
    port = free_port()
    began = {}
    processes = []
    for rank in range(2):
        home = folder / "north" if rank == 0 else homes[1]
        began[rank] = time.monotonic()
        if alive and rank == 1:
            note(folder / "rejoin", {"port": port})
            processes.append(ranks[1])
        elif rank in waiting:
            note(folder / f"go-{rank}", {"port": port, "again": True})
            processes.append(waiting[rank])
        else:
            process, began[rank] = start(
                folder, way, rank, home, args, port=port, again=True, began=time.monotonic()
            )
            processes.append(process)
    back = [wait_for(folder / f"back-{rank}", *processes) for rank in range(2)]
    for process in processes:
        process.wait()
    times = {part: max(one.get(part, 0.0) for one in back) for part in PARTS}
    times |= {"detect": found - killed, "total": max(one["at"] for one in back) - killed}
    return times | {"lost": reached - min(one["from"] for one in back)}


def stop_daemons(folder: Path) -> None:
    for home in ("east", "west", "north"):
        said = daemon_of(folder / home) if (folder / home).exists() else None
        if said is not None:
            os.kill(said["pid"], signal.SIGKILL)


def main() -> None:
    from timing import parser, print_table, scratch, spread

    made = parser(__doc__)
    made.add_argument("--mb", type=int, default=200, help="MB of parameters and optimizer state, both ranks")
    made.add_argument("--every", type=int, default=10, help="iterations in which all of the state is saved")
    made.add_argument("--pace", type=float, default=0.05, help="seconds of sleep in an iteration")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--ways", default=",".join(WAYS), help="only these, separated by commas")
    made.add_argument(
        "--python", action="append", default=[], metavar="WAY=INTERPRETER", help="for another library"
    )
    args = made.parse_args()
    args.pythons = dict(one.split("=", 1) for one in args.python)
    ways = args.ways.split(",")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(args.rounds):
        shift = number % len(ways)
        for way in ways[shift:] + ways[:shift]:
            with scratch(args.folder) as folder:
                try:
                    found[way].append(one_round(folder, way, args))
                finally:
                    stop_daemons(folder)
            print(f"# {way}: {found[way][-1]['total']:.1f} s; load {os.getloadavg()[0]:.1f}", flush=True)
    heads = ("detect", *PARTS, "total", "lost")
    print_table(
        ("way", *heads),
        [
            (
                way,
                *(spread([one[head] for one in rounds], digits=0 if head == "lost" else 2) for head in heads),
            )
            for way, rounds in found.items()
        ],
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        given = json.loads(sys.argv[2])
        rank = Rank(given, given.get("began", BEGAN))
        rank.part("start")
        rank.at = time.monotonic()
        rank.run()
    else:
        main()
