"""Run a short form of the attack by hostile files and names."""

from __future__ import annotations

import pytest

from tests.adversarial.hostile import Attack
from tests.adversarial.hostile_cases import cases

FOUND_BEFORE = (
    "store: link as segments",
    "store: hard link as lock",
    "store: huge sparse file as record",
    "arena: link as host folder",
    "arena: pipe as arena folder",
    "arena: hard link as arena",
    "arena: hard link as daemon's log",
    "arena: folder for file or file for folder as extras",
    "state: pipe as scarctl.toml",
    "state: loop as state file",
    "store: loop as lane",
    "names: 1 as the store's folder",
    "names: 2 as the holder of the lock",
)
"""Each was a defect."""


@pytest.mark.filterwarnings("ignore")
def test_nothing_outside_is_touched_and_nothing_waits() -> None:
    attack = Attack()
    known = list(cases())
    assert {case.name for case in known} >= set(FOUND_BEFORE)
    assert len(known) >= 200
    for k, case in enumerate(known):
        if case.name in FOUND_BEFORE or k % 50 == 0:
            attack.play(case)
    assert attack.violations == []
