"""Define an episode: a store, a run that is restarted in it, and the rounds with their events."""

from __future__ import annotations

import random
from dataclasses import dataclass

ROUNDS_PER_EPISODE = 20
"""Rounds per store: checking a store gets slower with everything that was ever saved in it."""

KINDS = {
    "kill trainer": 4,
    "kill daemon": 3,
    "kill both": 3,
    "terminate trainer": 2,
    "terminate daemon": 2,
    "terminate both": 1,
    "pause trainer": 1,
    "pause daemon": 1,
    "pause both": 1,
    "kill trainer while the daemon is paused": 2,
    "kill daemon while the trainer is paused": 2,
    "reboot": 1,
}
"""Events of a round, and their relative frequency."""


@dataclass(frozen=True, slots=True)
class Episode:
    """Settings of one run, drawn from a seed."""

    number: int
    seed: int
    shards: int
    policy: str
    interval: int
    fraction: float
    rows: int
    """Rows per partition."""
    pause: float
    """Longest seconds of simulated work before a step."""
    meddles: bool
    """Whether the loop writes to its parameters after a step, while they may be copied."""

    @classmethod
    def draw(cls, seed: int, number: int) -> Episode:
        """Draw the settings of episode `number` of a torture with this seed."""
        rng = random.Random(f"{seed} episode {number}")
        return cls(
            number=number,
            seed=seed,
            shards=rng.choice((1, 2, 4)),
            policy=rng.choice(("priority", "round", "random", "full")),
            interval=rng.choice((1, 2, 5)),
            fraction=rng.choice((0.1, 0.25, 0.6)),
            rows=rng.choice((1, 4)),
            pause=rng.choice((0.002, 0.008, 0.03)),
            meddles=rng.random() < 0.3,
        )


@dataclass(frozen=True, slots=True)
class Round:
    """The event of one round, and its time."""

    number: int
    kind: str
    delay: float
    """Seconds from the start of the round, or of the process, to the event."""
    pause: float
    """Seconds for which a process stays stopped."""
    settle: bool
    """Whether the daemon gets time to finish what the dead trainer handed over."""

    @classmethod
    def draw(cls, seed: int, number: int) -> Round:
        """Draw round `number` of a torture with this seed."""
        rng = random.Random(f"{seed} round {number}")
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        # Many moments within the start of a process: attaching, resuming, the first checkpoint.
        delay = rng.choice((rng.uniform(0.0, 0.15), rng.uniform(0.0, 0.6), rng.uniform(0.0, 1.5)))
        return cls(number, kind, delay, pause=rng.uniform(0.01, 0.8), settle=rng.random() < 0.5)
