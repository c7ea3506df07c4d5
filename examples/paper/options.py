"""Share what the programs that write documents have in common: options, and a line about the machine."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import torch


def parser(doc: str, *, name: str, writes: str, trials: int, of: str) -> argparse.ArgumentParser:
    """doc: of the program. name: of its results' folder in build. writes: into --out. of: what has so many trials."""
    made = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--trials", type=int, default=trials, help=of)
    made.add_argument(
        "--results", type=Path, default=Path("build") / name, help="folder that keeps every trial"
    )
    made.add_argument("--out", type=Path, default=Path("docs"), help=f"folder for {writes}")
    made.add_argument("--kept", action="store_true", help="run no trials, write about those that are kept")
    made.add_argument(
        "--quick", action="store_true", help="a few iterations of everything: shows that it runs"
    )
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line's options. Quick trials are few, and kept apart."""
    arguments = made.parse_args()
    if arguments.quick:
        arguments.trials, arguments.results = 2, arguments.out / "results"
    return arguments


def machine() -> str:
    """Return a line about the machine of the measurement."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, shared; Python {platform.python_version()}, "
        f"PyTorch {torch.__version__}"
    )
