"""Count the outcomes of all configurations.

python -m tests.optimizers [--third-party] [--killed] [--device cuda] [PATTERN]
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import tempfile
import warnings
from pathlib import Path

import torch

from tests.optimizers import killed, torchs
from tests.optimizers.sweep import BROKEN, EXACT, SILENT, deterministic, outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--third-party", action="store_true", help="those of other packages instead of torch's own"
    )
    parser.add_argument(
        "--killed", action="store_true", help="end the run by SIGKILL in the middle of an iteration"
    )
    parser.add_argument("--device", default="cpu", help="of the parameters and the data, for torch's own")
    parser.add_argument("pattern", nargs="?", default="*")
    arguments = parser.parse_args()
    torch.set_default_device(arguments.device)
    cases = (
        killed.cases(third_party=arguments.third_party)
        if arguments.device == "cpu"
        else torchs.cases(arguments.device)
    )
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    with deterministic():
        for case in cases:
            if fnmatch.fnmatch(case.name, arguments.pattern):
                with tempfile.TemporaryDirectory() as folder:
                    if arguments.killed:
                        found, why = killed.outcome(case, Path(folder), third_party=arguments.third_party)
                    else:
                        found, why = outcome(case, Path(folder))
                counts[found] += 1
                if found != EXACT:
                    print(f"{found:8} {case.name}: {why}", flush=True)
    print(f"{sum(counts.values())} cases: {dict(counts)}")
    print(f"not usable without scarctl either: {counts[BROKEN]}")
    return 1 if counts[SILENT] else 0


if __name__ == "__main__":
    raise SystemExit(main())
