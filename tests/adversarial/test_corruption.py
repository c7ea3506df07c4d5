"""Run the short form of the attack by damage."""

from __future__ import annotations

from tests.adversarial import corruption


def test_damage_is_found_and_never_returned() -> None:
    outcome = corruption.Outcome()
    for n, attack in enumerate(corruption.attacks(1)):
        for k, case in enumerate(corruption.flips(attack.image, range(20 * n + 30, 20 * n + 50), seed=1)):
            outcome.add(attack.play(case, by_command=k % 20 == 0))
    for attack in corruption.attacks(1, shards=2, rounds=1):
        for case in list(corruption.cuts(attack.image))[::1250]:
            outcome.add(attack.play(case, by_command=False))
    assert outcome.violations == []
    assert outcome.done["segment data"] > 3
    assert outcome.results["recover: degraded"] > 0
    assert outcome.results["read: around a damaged record"] > 0
