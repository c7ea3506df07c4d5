"""Run `scarctl run` as a process, in a folder, with its output in files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
PLACES = os.pathsep.join((str(ROOT), str(ROOT / "adapters")))


class Running:
    """`scarctl run` in the folder `place`, without a terminal; its output goes to files there."""

    def __init__(self, place: Path, *arguments: object, **options: Any) -> None:
        self._out, self._err = place / "out", place / "err"
        settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scarctl", "run", *map(str, arguments)],
                cwd=place,
                # With numpy's threads, which could take a signal that is not meant for them.
                env={**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "2"},
                **{"stdout": out, "stderr": err, **settings},
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
