"""Kill a run by SIGKILL in the middle of an iteration, and resume it in another process.

    python -m tests.optimizers.killed NAME STORE [--third-party]

trains a configuration until it kills itself. `outcome` starts that, and compares as `tests.optimizers.sweep` does.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from scarctl.errors import ScarError
from tests.optimizers import torchs
from tests.optimizers.sweep import (
    BROKEN,
    EXACT,
    FAILED,
    REFUSED,
    SAID,
    SILENT,
    STEPS,
    STOP,
    Case,
    Run,
    deterministic,
)
from tests.support import forkserver
from tests.support.training import drain

_THEIRS = "--third-party"
_LAST = 100.0
"""Seconds after which a run counts as hanging."""
_REFUSAL = 40
"""Exit code of a run that scarctl refuses."""


def cases(*, third_party: bool) -> Iterator[Case]:
    """Yield all configurations of one of the two sweeps."""
    if third_party:
        from tests.optimizers import third_party as others

        return others.cases()
    return torchs.cases()


def outcome(case: Case, folder: Path, *, third_party: bool = False) -> tuple[str, str]:
    """Return the outcome and its reason, for configurations that `sweep.outcome` finds exact."""
    store = folder / "store"
    arguments = ["-m", "tests.optimizers.killed", case.name, str(store), *([_THEIRS] if third_party else [])]
    environ = {**os.environ, "SCARCTL_ARENA_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = forkserver.run(
        arguments, timeout=_LAST, env=environ, imports=(*forkserver.TORCH, "tests.optimizers.killed")
    )
    if done.returncode == _REFUSAL:
        return REFUSED, done.stderr.strip()[-300:]
    if done.returncode != -signal.SIGKILL:
        try:
            Run(case, None).train(0, STEPS)
        except Exception as error:
            return BROKEN, f"without scarctl: {type(error).__name__}: {error}"
        return FAILED, f"it ended with {done.returncode}: {done.stderr[-300:]}"
    after = Run(case, store, arena_dir=str(folder))
    assert after.session is not None
    with after.session:
        resumed = after.session.resume("rollback")
        if not 0 < resumed.step <= STOP:
            return SILENT, f"resumed {resumed.step}"
        after.train(resumed.step, STEPS)
        if not resumed.consistent:
            return SAID, "; ".join(resumed.reasons)
        whole = Run(case, None)
        whole.train(0, STEPS)
        return (EXACT, "") if after.digest() == whole.digest() else (SILENT, "exact, and it is not")


def main() -> None:
    """Train, and die in the iteration after `STOP`: between its gradients and the end of its step."""
    name, store, *more = sys.argv[1:]
    case = next(case for case in cases(third_party=_THEIRS in more) if case.name == name)
    with deterministic():
        try:
            run = Run(case, Path(store), policy="full")
            assert run.session is not None
            run.session.resume()
            for step in range(STOP):
                run.train(step, step + 1)
                assert drain(run.session)
        except ScarError as error:
            sys.stderr.write(str(error))
            sys.exit(_REFUSAL)
        assert not run.session.stats.errors, run.session.stats.last_error
        run.die = lambda: os.kill(os.getpid(), signal.SIGKILL)
        run.train(STOP, STEPS)


if __name__ == "__main__":
    main()
