"""Test how long a survivor looks at another rank's arena. Real ranks are in `test_replicas` and `test_sessions`."""

from __future__ import annotations

import pytest

from scarctl.distributed.rescue import MOST, SECONDS, Looks


def test_an_arena_without_copies_from_its_owner_is_looked_at_for_a_moment() -> None:
    looks = Looks(100.0)
    assert not looks.last(0, 100.0)
    assert not looks.last(0, 100.0 + SECONDS)
    assert looks.last(0, 100.1 + SECONDS)


def test_a_replica_is_left_to_its_owner_until_it_has_not_changed_for_a_while() -> None:
    """A copy that comes at the very end counts, too."""
    looks = Looks(100.0)
    assert not looks.last(7, 100.3)
    assert not looks.last(8, 100.4 + SECONDS), "it has just received a copy"
    assert not looks.last(8, 100.4 + 2 * SECONDS)
    assert looks.last(8, 100.5 + 2 * SECONDS)


@pytest.mark.parametrize(("grace", "most"), [(None, MOST), (1000.0, MOST), (25.0, 2.5), (2.0, SECONDS)])
def test_a_replica_that_never_rests_is_taken_at_last(grace: float | None, most: float) -> None:
    """Most of a grace period is for the evacuation, which comes afterwards."""
    looks = Looks(100.0, grace)
    pause = SECONDS / 4
    assert not any(looks.last(n + 1, 100.0 + n * pause) for n in range(int(most / pause)))
    assert looks.last(99, 100.1 + most)
