"""Test that the history of a run shows the steps that a death has lost, about when it happened."""

from __future__ import annotations

import datetime

from scarctl.ops.falls import with_falls
from scarctl.state.journal import Event, Sample


def sample(seconds: float, head: float) -> Sample:
    return Sample(seconds, head, head - 1, head - 5, 0.5)


def resumed(seconds: float, step: int, reached: object) -> Event:
    at = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat()
    return Event("resumed", at, step, {"reached": reached})  # type: ignore[dict-item]


def test_the_line_rises_to_the_last_step_and_falls_at_the_death() -> None:
    samples = [sample(100.0, 0), sample(110.0, 100), sample(130.0, 150), sample(140.0, 250)]
    found = with_falls(samples, [resumed(125.0, 100, 130)])
    # 0.1 s per step until the death, and 12 s until the resume.
    assert [(one.seconds, one.head) for one in found] == [
        (100.0, 0),
        (110.0, 100),
        (113.0, 130),
        (113.0, 100),
        (125.0, 100),
        (130.0, 150),
        (140.0, 250),
    ]
    assert [one.durable for one in found[2:5]] == [95, 95, 95]


def test_two_deaths_have_the_pace_of_their_own_runs() -> None:
    samples = [sample(100.0, 0), sample(110.0, 100), sample(130.0, 110), sample(150.0, 120)]
    events = [resumed(125.0, 100, 130), resumed(200.0, 120, 125)]
    heads = [(one.seconds, one.head) for one in with_falls(samples, events)]
    assert (113.0, 130) in heads
    assert (160.0, 125) in heads
    assert heads[-1] == (200.0, 120)


def test_the_death_is_never_after_the_resume_nor_made_up() -> None:
    samples = [sample(100.0, 0), sample(110.0, 10)]
    assert [one.seconds for one in with_falls(samples, [resumed(111.0, 10, 500)])][2:] == [111.0] * 3
    for event in (
        resumed(111.0, 10, 10),
        resumed(111.0, 10, "many"),
        resumed(90.0, 10, 50),
        Event("started", "never", 0),
    ):
        assert with_falls(samples, [event]) == samples
