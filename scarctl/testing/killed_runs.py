"""Run trainings in a separate process, and kill it with SIGKILL."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from scarctl.config import grouped
from scarctl.session.session import Session
from scarctl.testing.fingerprint import Description, Recorder, Seen

SECONDS = 300.0
"""Timeout in seconds for importing the framework and a few iterations, even on a busy machine."""


def checkpoint(session: Session) -> None:
    """Save a full checkpoint and wait until it is durable."""
    session.checkpoint(full=True, wait=True)


def _flush(session: Session) -> None:
    assert session.flush(), "flush() returned False between two iterations"


ACTIONS: dict[str, Callable[[Session], None]] = {"checkpoint": checkpoint, "flush": _flush}


@dataclass(frozen=True)
class Killed:
    """A training in its own `folder` that acts after one iteration, and is killed after another."""

    folder: str
    action: str
    """One of `ACTIONS`."""
    after: int
    die_after: int
    options: Mapping[str, Any]


def run_and_kill(
    suite: type, runs: Sequence[Killed], *, hash_seed: int
) -> list[tuple[dict[int, Seen], dict[int, Description]]]:
    """Train in a new interpreter, and kill it. Returns fingerprints and layouts of each training, by iteration.

    Several trainings run nested in one process, which is killed once: importing a framework takes longer than all of
    them.

    suite: a subclass of `AdapterConformance` at the top level of a module. hash_seed: the interpreter's; another seed
    changes every order that depends on hashing.
    """
    if "<" in suite.__qualname__:
        raise AssertionError(
            f"{suite.__qualname__} is defined inside a function, where another process cannot find it"
        )
    task = {
        "file": inspect.getfile(suite),
        "module": suite.__module__,
        "suite": suite.__qualname__,
        "runs": [asdict(run) for run in runs],
        "threads": torch.get_num_threads(),
    }
    search = os.pathsep.join(path or os.getcwd() for path in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", "from scarctl.testing.killed_runs import main; main()", json.dumps(task)],
        env={**os.environ, "PYTHONPATH": search, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == -signal.SIGKILL, (
        f"the process that trains ended with {done.returncode} before it could be killed\n{done.stdout}{done.stderr}"
    )
    return [_read(_report(run)) for run in runs]


def _report(run: Killed) -> Path:
    return Path(run.folder, "seen.json")


def _read(report: Path) -> tuple[dict[int, Seen], dict[int, Description]]:
    seen = json.loads(report.read_text())
    return (
        {int(step): Seen(**item) for step, item in seen["seen"].items()},
        {int(step): item for step, item in seen["layouts"].items()},
    )


def main() -> None:
    """Run the trainings in the process that `run_and_kill` starts, and die."""
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])  # as many threads as in the comparing process, for equal sums
    suite = _load(task["file"], task["module"], task["suite"])()
    _train(suite, [Killed(**run) for run in task["runs"]])


def _train(suite: Any, runs: Sequence[Killed]) -> None:
    run, *others = runs
    training = suite.training()

    def die(session: Session) -> None:
        _report(run).write_text(
            json.dumps(
                {
                    "seen": {step: asdict(seen) for step, seen in recorder.seen.items()},
                    "layouts": recorder.layouts,
                }
            )
        )
        if others:
            _train(suite, others)
        os.kill(os.getpid(), signal.SIGKILL)

    def act(session: Session) -> None:
        ACTIONS[run.action](session)
        if run.after == run.die_after:
            die(session)

    recorder = Recorder(training, suite.generators, {run.die_after: die} | {run.after: act})
    training.run(
        Path(run.folder, "store"), run.die_after + 1, recorder, resume={}, options=grouped(**run.options)
    )


def _load(file: str, module: str, name: str) -> Any:
    """Load a class by its module's file. The module need not be importable by name: pytest imports it differently."""
    spec = importlib.util.spec_from_file_location(module, file)
    if spec is None or spec.loader is None:
        raise AssertionError(f"{file} is not a Python file")
    found: Any = importlib.util.module_from_spec(spec)
    sys.modules[module] = found
    spec.loader.exec_module(found)
    for part in name.split("."):
        found = getattr(found, part)
    return found
