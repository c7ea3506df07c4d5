"""Remove the store of a killed run, and start the same command again. `make attack` does so for long."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adversarial.removed import DEEDS, Round, Yard
from tests.support import daemons

pytestmark = [pytest.mark.leaves_arena, pytest.mark.timeout(300)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "daemon", [pytest.param(deed, marks=[pytest.mark.long] * (deed != "nothing")) for deed in DEEDS]
)
def test_the_new_store_has_nothing_of_the_old_run(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch, daemon: str
) -> None:
    daemons.fork(monkeypatch)
    yard = Yard(tmp_path, arena_dir)
    yard.play(Round(0, trained=0.3, waited=0.0, began=0.1, steps=20, daemon=daemon))
    yard.end()
