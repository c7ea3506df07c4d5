"""Test how far lost values were from the copies that a plan takes, as far as memory knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scarctl.arena.distances import with_errors
from scarctl.recovery.execute import last_distances
from scarctl.recovery.plan import MEMORY, STORE
from tests.daemon.rig import acknowledge
from tests.recovery.test_plan import Job


def test_each_place_has_its_own_distance(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.change(job.all, 2)
    job.save(job.all, 2)
    acknowledge(job.live, job.all)
    job.change(job.all, 4)
    job.live.note_distances(3.0)
    job.live.encoding_error[0] = 16.0
    plan = job.plan(np.array([0, 1, 2]), arena=job.live)
    assert (plan.tier == MEMORY).all()
    assert last_distances(plan, job.live).tolist() == [0.0, 0.0, 0.0]
    stored = job.plan(np.array([0, 1, 2]))
    assert (stored.tier == STORE).all()
    assert last_distances(stored, job.live).tolist() == [5.0, 3.0, 3.0]


def test_errors_of_encoded_copies_are_added_as_squares() -> None:
    assert with_errors(np.array([3.0, 3.0, 0.0]), np.array([16.0, -1.0, 4.0])).tolist() == [5.0, 3.0, 2.0]
