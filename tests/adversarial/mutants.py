"""Break the product on purpose, one claim of docs/guarantees.md at a time: the tests named there have to notice.

    python -m tests.adversarial.mutants [--list] [WORD ...]

Runs the mutants of claims that contain one of the words, or all, each in a copy of this tree. Exit code 1 if a test
passes although the line that it is about is broken.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUARANTEES = ROOT / "docs/guarantees.md"
_SECONDS = 900
"""A broken product may wait for ever; that is noticed, too."""


@dataclass(frozen=True)
class Mutant:
    """One claim, and a change of the code after which it no longer holds."""

    claim: str
    """How its line in docs/guarantees.md begins."""
    file: str
    old: str
    """Text that occurs once in the file."""
    new: str


MUTANTS = (
    Mutant(
        "Memory is used only by the store and line",
        "scarctl/arena/lines.py",
        "return found.keys() == lines.keys() and all(lines[shard] in found[shard] for shard in lines)",
        "return True",
    ),
    Mutant(
        "A copy in memory whose bytes have changed",
        "scarctl/recovery/memory.py",
        "    return ids[wrong]",
        "    return ids[:0]",
    ),
    Mutant(
        "Two whole states of one step",
        "scarctl/state/identity.py",
        "            name = uuid.uuid4().hex",
        "            pass",
    ),
    Mutant(
        "Places that look before they create",
        "scarctl/store/backends/exclusive.py",
        'if owner.__module__.startswith("fsspec."):',
        "if True:\n        return None\n    if not owner:",
    ),
    Mutant(
        "A session more than the daemon can serve",
        "scarctl/daemon/crowd.py",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))",
        "pass",
    ),
    Mutant(
        "A `scarctl.toml` that others may write",
        "scarctl/util/trust.py",
        '        return f"{who} may write it"',
        "        return None",
    ),
    Mutant(
        "A loop that is closed between",
        "scarctl/session/saving.py",
        "(kept if begun else self.take())",
        "self.take()",
    ),
    Mutant(
        "Reading extras leaves all generators alone",
        "scarctl/checkpoint/randomness.py",
        "            torch.set_rng_state(before.torch)",
        "            pass",
    ),
    Mutant(
        "`session.step()` next to hooks",
        "scarctl/session/session.py",
        "        if self._hooked:\n            raise UsageError(",
        "        if False:\n            raise UsageError(",
    ),
    Mutant(
        "A partial recovery leaves no lost value",
        "scarctl/session/completing.py",
        "            restore(lost_rows(engine.layout, ids), found.newest)",
        "            pass",
    ),
    Mutant(
        "A cell that is run again",
        "scarctl/session/attached.py",
        "        earlier._close(Ending.FAILED)",
        "        earlier._close(Ending.CLOSED)",
    ),
    Mutant(
        "An unknown mode is refused",
        "scarctl/session/session.py",
        "        check_mode(mode)\n",
        "",
    ),
    Mutant(
        "A store that falls behind",
        "scarctl/checkpoint/behind.py",
        "            self._caveats.say(KIND, self._text(lag, step, saver.speed), inexact=False)",
        "            pass",
    ),
    Mutant(
        "Ages are lower bounds",
        "scarctl/ops/ages.py",
        "not alive or not all(alive)",
        "False",
    ),
    Mutant(
        "One line each at attach",
        "scarctl/session/recover.py",
        '        log.info("resumed %s at %s", store.url, resumed)',
        "        pass",
    ),
)


def named_by(claim: str) -> list[str]:
    """Return the ids of the tests that the claim's line names. Raises ValueError unless one line begins so."""
    found = [
        line for line in GUARANTEES.read_text(encoding="utf-8").splitlines() if line[2:].startswith(claim)
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} lines of {GUARANTEES.name} begin with {claim!r}")
    return re.findall(r"`(tests/[^`]+::[^`]+)`", found[0])


def applied(mutant: Mutant, text: str) -> str:
    """Return the changed text of the mutant's file. Raises ValueError unless `old` occurs once."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {text.count(mutant.old)} times {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def passes(tree: Path, tests: list[str]) -> bool:
    """Return whether these tests pass in `tree`, a copy of this one. Raises RuntimeError if they cannot run."""
    places = os.pathsep.join(map(str, (tree, tree / "adapters")))
    environ = {**os.environ, "PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environ, timeout=_SECONDS, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def survives(tree: Path, mutant: Mutant) -> bool:
    """Return whether the tests of the mutant's claim pass, although the mutant breaks what they check."""
    path = tree / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(applied(mutant, before), encoding="utf-8")
    try:
        return passes(tree, named_by(mutant.claim))
    finally:
        path.write_text(before, encoding="utf-8")


def main() -> int:
    """Run the mutants that are named, or all; print one line each."""
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.mutants", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the claims, and run nothing")
    parser.add_argument(
        "word", nargs="*", help="run mutants of claims that contain one of these; default: all"
    )
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.word or any(word in m.claim for word in given.word)]
    if given.list:
        print("\n".join(mutant.claim for mutant in chosen))  # noqa: T201
        return 0
    alive = 0
    with tempfile.TemporaryDirectory(prefix="scarctl-") as folder:
        tree = Path(folder)
        for name in ("scarctl", "adapters", "tests", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        if not passes(tree, sorted({test for mutant in chosen for test in named_by(mutant.claim)})):
            print("the tests do not pass as the code is")  # noqa: T201
            return 1
        for mutant in chosen:
            left = survives(tree, mutant)
            alive += left
            print(f"{'NOT NOTICED' if left else 'noticed':12} {mutant.claim}", flush=True)  # noqa: T201
    print(f"{len(chosen)} mutants, {alive} not noticed")  # noqa: T201
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
