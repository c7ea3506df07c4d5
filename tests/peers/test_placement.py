"""Test placement: with up to 16 hosts in any domains, every host gets and keeps as many copies as the others."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.peers.placement import place, survival

WORLDS = [(hosts, copies) for hosts in range(17) for copies in range(4)]


def chosen(domains: list[str], copies: int) -> list[list[int]]:
    return [found[: min(copies, len(domains) - 1)] for found in place(domains, copies)]


@pytest.mark.parametrize(("hosts", "copies"), WORLDS)
def test_everybody_gets_and_keeps_as_many(hosts: int, copies: int) -> None:
    found = place([""] * hosts, copies)
    wanted = max(0, min(copies, hosts - 1))
    for host, candidates in enumerate(found):
        # All other hosts are fallbacks, each once, and never the host itself.
        assert sorted(candidates) == ([other for other in range(hosts) if other != host] if wanted else [])
    kept = Counter(peer for candidates in found for peer in candidates[:wanted])
    assert all(kept[host] == wanted for host in range(hosts))


@pytest.mark.parametrize(("hosts", "copies"), [(h, c) for h, c in WORLDS if c and h > c and h % (c + 1) == 0])
def test_groups_keep_each_other(hosts: int, copies: int) -> None:
    found = chosen([""] * hosts, copies)
    assert all(host in found[peer] for host, peers in enumerate(found) for peer in peers)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("hosts", range(2, 17))
def test_racks_of_equal_size_never_hold_their_own(hosts: int, size: int) -> None:
    """With one copy, no rack has more than half of the hosts."""
    domains = [f"rack{host // size}" for host in range(hosts)]
    if max(Counter(domains).values()) * 2 > hosts:
        return
    found = chosen(domains, 1)
    assert all(domains[peer] != domains[host] for host, peers in enumerate(found) for peer in peers), found


@given(st.lists(st.sampled_from(["a", "b", "c", "d", ""]), max_size=16), st.integers(0, 3))
def test_any_domains(domains: list[str], copies: int) -> None:
    found = place(domains, copies)
    wanted = max(0, min(copies, len(domains) - 1))
    kept = Counter(peer for candidates in found for peer in candidates[:wanted])
    assert all(kept[host] == wanted for host in range(len(domains)))
    assert all(host not in candidates for host, candidates in enumerate(found))
    assert place(domains, copies) == found


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("hosts", range(2, 11))
def test_odds_are_those_of_counting(hosts: int, copies: int) -> None:
    found = chosen([""] * hosts, copies)
    for lost in range(hosts + 1):
        sets = [set(some) for some in combinations(range(hosts), lost)]
        good = sum(all(not {host, *found[host]} <= some for host in some) for some in sets)
        assert survival(hosts, copies, lost) == good / len(sets), (lost, good)


def test_odds_without_copies_and_of_many_hosts() -> None:
    assert survival(8, 0, 1) == 0.0
    assert survival(1, 1, 1) == 0.0
    assert survival(16, 1, 2) == pytest.approx(0.9333, abs=1e-4)
    assert 0.99 < survival(1001, 1, 2) < 1.0
