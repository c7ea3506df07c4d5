"""Compare scarctl and its peers in one table: the same state, the same training loop, each in a separate process.

python benchmarks/peers.py [--rounds 3] [--only NAME] [--python NAME=INTERPRETER] [--plot FILE.svg] [--folder DIR]

The state is that of GPT-2 small with AdamW: 1.49 GB. A cycle is `--steps` steps of AdamW with `--seconds` of sleep
between them, as if an accelerator had the forward and backward. Each peer trains some cycles without checkpoints, then
with them: one of the whole state per cycle, or eight of 1/8 of it, which are as many bytes. A library that is installed
elsewhere is measured with `--python Orbax=/there/bin/python`. Files are in the page cache.

  stall       seconds that the training thread is held, per checkpoint
  slowdown    of a cycle, against cycles without checkpoints in the same process
  GB          written per checkpoint
  durable     seconds from the beginning of a checkpoint to its completion, with nothing else running; * without fsync
  load        seconds to bring the whole state back into the live tensors
  1/8 lost    the same when 1/8 of the state is lost
  memory      GB beyond training without checkpoints, at most: private and shared, of all processes
  lines       that a user adds to a loop

Medians over rounds with (lowest-highest). What cannot be run says why.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import threading
import time
import warnings
import zlib
from html import escape
from pathlib import Path
from typing import Any

import torch
from peer_savers import PARTS, SAVERS, timed
from timing import arenas, parser, print_table, scratch, settle, spread
from training import build, tensors

MARKER = "BENCHMARK_PEER"
SYNCED = ("scarctl", "DCP", "torchsnapshot")
"""Peers that sync their files."""
_PAUSE = 0.02


# -- one peer, in its own process --------------------------------------------------------------------------------


def worker(name: str, args: Any) -> dict[str, Any]:
    """Return all figures of one peer, by name, as lists of seconds or bytes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, optimizer = build(args.scale)
    optimizer.step()
    told: dict[str, list[float]] = {
        key: [] for key in ("base", "cycle", "stall", "bytes", "durable", "load", "part")
    }

    def work() -> None:
        time.sleep(args.seconds)

    def bare() -> None:
        for _ in range(args.steps):
            work()
            optimizer.step()

    print("trains", flush=True)
    for _ in range(args.rounds):
        settle()
        told["base"].append(timed(bare))
    print("saves", flush=True)
    try:
        saver = SAVERS[name](model, optimizer, Path(args.work_folder))
    except ImportError as error:
        return {"missing": str(error).partition("\n")[0]}
    for number in range(args.rounds + 1):
        saver.begin(args.steps)
        settle()
        taken = sum(timed(lambda i=i: saver.iteration(i, work)) for i in range(args.steps))
        nbytes = saver.end()
        if number:  # the first one warms up
            told["cycle"].append(taken)
            told["stall"].append(saver.held / saver.parts)
            told["bytes"].append(nbytes / saver.parts)
    for _ in range(args.rounds):
        settle()
        told["durable"].append(timed(saver.save_now))
    print("loads", flush=True)
    saver.save_whole()
    saved = _digest(model, optimizer)
    for _ in range(args.rounds):
        for key, load in (("load", saver.load), ("part", saver.load_part)):
            if key == "load" or saver.parts == 1:
                for _, tensor in tensors(model, optimizer):
                    tensor.zero_()
            told[key].append(timed(load))
            if _digest(model, optimizer) != saved:
                raise AssertionError(f"{name} has not brought the state back")
    saver.close()
    return {**told, "lines": len(saver.lines.splitlines())}


def _digest(model: Any, optimizer: Any) -> int:
    found = 0
    for _, tensor in tensors(model, optimizer):
        found = zlib.crc32(tensor.numpy(), found)
    return found


# -- the driver ----------------------------------------------------------------------------------------------------


def measure(name: str, args: Any, folder: Path) -> dict[str, Any]:
    """Run one peer's process, and watch the memory of all that belong to it."""
    command = [args.pythons.get(name, sys.executable), __file__, "--worker", name]
    command += ["--rounds", str(args.rounds), "--steps", str(args.steps), "--seconds", str(args.seconds)]
    command += ["--scale", str(args.scale), "--work-folder", str(folder)]
    with arenas(folder.parent) as arena_dir:
        env = {**os.environ, MARKER: str(folder), "SCARCTL_ARENA_DIR": arena_dir}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        ) as child:
            assert child.stdout is not None
            memory = _Memory(f"{MARKER}={folder}")
            lines = []
            errors: list[str] = []
            reader = threading.Thread(target=lambda: errors.extend(child.stderr or ()))
            reader.start()
            for line in child.stdout:
                lines.append(line)
                memory.phase = line.strip()
            reader.join()
            memory.stop()
    if child.returncode:
        # The first one: what fails after that, while all is torn down, comes of it.
        said = [line.strip() for line in errors if re.match(r"[\w.]+(Error|Exception)\b", line)]
        return {"missing": said[0] if said else "it ended without a word"}
    found: dict[str, Any] = json.loads(lines[-1])
    peak = memory.peaks
    found["memory"] = max(0, peak.get("saves", 0) - peak.get("trains", 0))
    return found


class _Memory:
    """Looks often how much memory the processes have that were started with `marker` in their environment."""

    def __init__(self, marker: str) -> None:
        self.phase = ""
        self.peaks: dict[str, int] = {}
        self._marker = marker.encode()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_PAUSE):
            phase, now = self.phase, self._now()
            self.peaks[phase] = max(self.peaks.get(phase, 0), now)

    def _now(self) -> int:
        private, shared = 0, 0
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self._marker not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                fields = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
            except (OSError, ValueError):
                continue  # ended meanwhile, or another user's
            private += int(fields.get("RssAnon", "0 kB").split()[0]) << 10
            shared = max(shared, int(fields.get("RssShmem", "0 kB").split()[0]) << 10)
        return private + shared


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=32, help="of a cycle, a multiple of 8")
    options.add_argument("--seconds", type=float, default=0.25, help="of sleep in a step")
    options.add_argument("--only", action="append", choices=SAVERS, help="these peers alone")
    options.add_argument("--python", action="append", default=[], metavar="NAME=INTERPRETER")
    options.add_argument("--plot", type=Path, help="draw stall and recovery into this file")
    options.add_argument("--scale", type=int, default=1, help="divide the state's size by this")
    options.add_argument("--worker", help="for the driver's own use")
    options.add_argument("--work-folder", type=Path, help="for the driver's own use")
    args = options.parse_args()
    if args.steps % PARTS:
        options.error(f"--steps has to be a multiple of {PARTS}")
    if args.worker:
        found = worker(args.worker, args)
        print(json.dumps(found), flush=True)
        return
    args.pythons = dict(text.split("=", 1) for text in args.python)
    results = {}
    for name in args.only or SAVERS:
        with scratch(args.folder) as folder:
            work_folder = folder / "peer"
            work_folder.mkdir()
            results[name] = measure(name, args, work_folder)
            print(f"{name}: {results[name].get('missing', 'done')}", file=sys.stderr, flush=True)
    heads = ("", "stall, s", "slowdown", "GB", "durable, s", "load, s", "1/8 lost, s", "memory, GB", "lines")
    print_table(heads, [row(name, found) for name, found in results.items()])
    for name, found in results.items():
        if "missing" in found:
            print(f"{name} could not be run: {found['missing']}")
    if args.plot:
        args.plot.write_text(draw({n: f for n, f in results.items() if "missing" not in f}))


def row(name: str, found: dict[str, Any]) -> list[str]:
    """Return a line of the table."""
    if "missing" in found:
        return [name, *["-"] * 8]
    base = statistics.median(found["base"])
    slower = [100 * (cycle / base - 1) for cycle in found["cycle"]]
    durable = spread(found["durable"], digits=2) + ("" if name.startswith(SYNCED) else " *")
    return [
        name,
        spread(found["stall"]),
        f"{spread(slower, digits=1)} %",
        f"{statistics.median(found['bytes']) / 1e9:.2f}",
        durable,
        spread(found["load"], digits=2),
        spread(found["part"], digits=2),
        f"{found['memory'] / 1e9:.2f}",
        str(found["lines"]),
    ]


def draw(results: dict[str, Any]) -> str:
    """Two bars per peer as SVG, on logarithmic scales: stall per checkpoint, and recovery of 1/8."""
    bars = [
        (name, statistics.median(found["stall"]), statistics.median(found["part"]))
        for name, found in results.items()
    ]
    low = min(min(stall, part) for _, stall, part in bars) / 2
    span = math.log(max(max(stall, part) for _, stall, part in bars) / low)
    parts = []
    for number, (name, stall, part) in enumerate(bars):
        y = 40 + 44 * number
        parts.append(f'<text x="190" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        for offset, colour, value in ((0, "#0072b2", stall), (16, "#e69f00", part)):
            width = 420 * math.log(value / low) / span
            parts.append(f'<rect x="200" y="{y + offset}" width="{width:.1f}" height="14" fill="{colour}"/>')
            parts.append(f'<text x="{206 + width:.1f}" y="{y + offset + 12}">{value:.3g} s</text>')
    legend = (
        '<text x="200" y="22" fill="#0072b2">stall per checkpoint</text>'
        '<text x="360" y="22" fill="#e69f00">recovery when 1/8 is lost</text>'
    )
    height = 60 + 44 * len(bars)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{height}" font-family="sans-serif" '
        f'font-size="12">{legend}{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    main()
