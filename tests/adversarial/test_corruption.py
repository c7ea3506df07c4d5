"""Run the short form of the attack by damage."""

from __future__ import annotations

from tests.adversarial import corruption


def test_damage_is_found_and_never_returned() -> None:
    attack = corruption.Attack(corruption.make(1))
    outcome = corruption.Outcome()
    for k, case in enumerate(corruption.flips(attack.image, range(100), seed=1)):
        outcome.add(attack.play(case, by_command=k % 25 == 0))
    attack = corruption.Attack(corruption.make(1, shards=2, rounds=1))
    for case in list(corruption.cuts(attack.image))[::151]:
        outcome.add(attack.play(case, by_command=False))
    assert outcome.violations == []
    assert outcome.done["segment data"] > 5
    assert outcome.results["recover: degraded"] > 0
