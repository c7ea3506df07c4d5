"""Run `scarctl run` as a process, in a folder, with its output in files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.daemons import MODULES
from tests.support.forkserver import Program
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
PLACES = os.pathsep.join((str(ROOT), str(ROOT / "adapters")))


class Running:
    """`scarctl run` in the folder `place`, without a terminal; its output goes to files there.

    It is forked, unless it is `fresh` or has options of `subprocess.Popen`: then it has numpy's threads, which could
    take a signal that is not meant for them.
    """

    def __init__(self, place: Path, *arguments: object, fresh: bool = False, **options: Any) -> None:
        self._out, self._err = place / "out", place / "err"
        command = ["-m", "scarctl", "run", *map(str, arguments)]
        env = {**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "2"}
        self.process: Any
        with self._out.open("wb") as out, self._err.open("wb") as err:
            if fresh or options:
                settings = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **options}
                self.process = subprocess.Popen(
                    [sys.executable, *command], cwd=place, env=env, start_new_session=True, **settings
                )
            else:
                self.process = Program(
                    command, cwd=place, env=env, stdout=out, stderr=err, imports=MODULES, session=True
                )

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def says(self, text: str, count: int = 1) -> None:
        """Wait until its output has so many occurrences of `text`."""
        wait_until(lambda: self.stdout.count(text) >= count or self.process.poll() is not None)
        assert self.stdout.count(text) >= count, (self.stdout, self.stderr)

    def handles_signals(self) -> None:
        """Wait until it handles signals. SIGUSR2 is set up last, so it shows that the others are."""
        path, bit = Path(f"/proc/{self.process.pid}/status"), 1 << (signal.SIGUSR2 - 1)
        wait_until(lambda: int(path.read_text().split("SigCgt:\t")[1].split()[0], 16) & bit)

    def ends(self, code: int, seconds: float = 30.0) -> Running:
        """Wait until it ends with this exit code."""
        assert self.process.wait(seconds) == code, (self.stdout[-500:], self.stderr)
        assert "Traceback" not in self.stderr
        return self
