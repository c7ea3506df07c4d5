"""Run a training that gets SIGTERM in its fourth step. Its argument is the folder for its files."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import jax.numpy as jnp

from scarctl.config import grouped
from scarctl_adapters.jax import attach
from tests.adapters.jax import models


def main(folder: Path) -> None:
    """Train, with the next checkpoint due only after the first step."""
    (folder / "arena").mkdir()
    options = grouped(daemon=False, interval=1000, arena_dir=str(folder / "arena"), rows={"*": 1})
    with attach(models.build(), store=folder / "store", **options) as session:
        state = session.resume()
        for number in range(6):
            state = models.step(state, models.batch(number), jnp.float32(1.0))
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                while True:  # this step takes longer than the process lasts
                    signal.pause()
            state = session.step(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
