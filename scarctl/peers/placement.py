"""Choose the hosts that keep copies of each other's memory: a pure function of the hosts and their failure domains.

Hosts form groups of `copies + 1`, in which each has a copy of all others. The remaining hosts form a ring. With groups,
more simultaneous losses of several hosts are survived than with one ring (Wang et al., Gemini, SOSP 2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb


def place(domains: Sequence[str], copies: int) -> list[list[int]]:
    """Return for each host the hosts that may keep its copies, best first: the first `copies` of them do.

    domains: failure domain of each host, such as a rack or zone; "" if the host is its own domain.
    copies: number of hosts that keep a copy; fewer if the job has fewer hosts.
    """
    assert copies >= 0
    named = [domain or f"\0{host}" for host, domain in enumerate(domains)]
    copies = min(copies, len(named) - 1)
    if copies < 1:
        return [[] for _ in named]
    groups, ring = _divided(named, copies)
    first: list[list[int]] = [[] for _ in named]
    for group in groups:
        for at, host in enumerate(group):
            first[host] = [*group[at + 1 :], *group[:at]]
    for at, host in enumerate(ring):
        first[host] = [ring[(at + n + 1) % len(ring)] for n in range(copies)]
    return [_then_others(host, chosen, named) for host, chosen in enumerate(first)]


def survival(hosts: int, copies: int, lost: int) -> float:
    """Return the share of all sets of `lost` hosts whose loss at once leaves a copy of every host's memory.

    Each host is its own domain. Losses one after the other are safer, if each leaves time for another copy.
    """
    if copies < 1 or hosts < 2:
        return float(lost == 0)
    copies = min(copies, hosts - 1)
    groups, ring = _divided([f"\0{host}" for host in range(hosts)], copies)
    # A group survives if one of its hosts remains, a ring if one of each `copies + 1` neighbours remains.
    ways = [1]
    for group in groups:
        ways = _product(ways, [comb(len(group), n) for n in range(len(group))])
    if ring:
        ways = _product(ways, _of_ring(len(ring), copies))
    return (ways[lost] if lost < len(ways) else 0) / comb(hosts, lost)


def _product(first: Sequence[int], second: Sequence[int]) -> list[int]:
    found = [0] * (len(first) + len(second) - 1)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            found[i + j] += a * b
    return found


def _of_ring(size: int, copies: int) -> list[int]:
    """Count, by n, the sets of n hosts of a ring that may be lost: no `copies + 1` of them are adjacent.

    Each survivor is followed by 0 to `copies` lost hosts.
    """
    found = []
    for lost in range(size):
        left = size - lost
        ways = [1]
        for _ in range(left):
            ways = _product(ways, [1] * (copies + 1))
        # Each circular set is counted once for every survivor with which it may begin.
        found.append((ways[lost] if lost < len(ways) else 0) * size // left)
    return found


def _divided(named: Sequence[str], copies: int) -> tuple[list[list[int]], list[int]]:
    """Return the groups, and the ring of the remaining hosts."""
    size, hosts = copies + 1, _by_domain(range(len(named)), named)
    count = len(hosts) // size
    ring: list[int] = []
    if len(hosts) % size:
        count -= 1
        for _ in range(len(hosts) - count * size):
            ring.append(_next_of_ring(hosts, ring, named))
            hosts.remove(ring[-1])
        ring = _spread(ring, named)
    # Hosts of one domain are adjacent, so no group gets two of them unless they outnumber the groups.
    return [hosts[n::count] for n in range(count)], ring


def _next_of_ring(left: Sequence[int], ring: Sequence[int], named: Sequence[str]) -> int:
    """Return the host to add to the ring: from a domain that is rare in it, and that has many hosts left."""
    there, sizes = Counter(named[host] for host in ring), Counter(named[host] for host in left)
    return min(left, key=lambda host: (there[named[host]], -sizes[named[host]], host))


def _by_domain(hosts: Sequence[int], named: Sequence[str]) -> list[int]:
    """Return the hosts ordered by domain, large domains first."""
    sizes = Counter(named[host] for host in hosts)
    return sorted(hosts, key=lambda host: (-sizes[named[host]], named[host], host))


def _spread(hosts: Sequence[int], named: Sequence[str]) -> list[int]:
    """Order the hosts so that neighbours have different domains, if possible: the largest rest comes next."""
    left = list(hosts)
    found: list[int] = []
    while left:
        sizes = Counter(named[host] for host in left)
        others = [host for host in left if not found or named[host] != named[found[-1]]]
        # The last one is a neighbour of the first.
        best = max(
            others or left,
            key=lambda host: (sizes[named[host]], bool(found) and named[host] == named[found[0]], -host),
        )
        found.append(best)
        left.remove(best)
    return found


def _then_others(host: int, chosen: list[int], named: Sequence[str]) -> list[int]:
    """Return the chosen hosts, then all others in reserve: other domains first, then the next by number."""
    count = len(named)
    others = [other for n in range(1, count) if (other := (host + n) % count) not in chosen]
    return chosen + sorted(others, key=lambda other: named[other] == named[host])
