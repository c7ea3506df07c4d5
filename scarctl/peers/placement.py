"""Choose the hosts that keep copies of each other's memory: pure functions of the hosts and their failure domains.

`place` decides for all hosts of a job that start together, `choose` for one host among others that join at any time.

Hosts form groups of `copies + 1`, in which each has a copy of all others. The remaining hosts form a ring. With groups,
more simultaneous losses of several hosts are survived than with one ring (Wang et al., Gemini, SOSP 2023).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any


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


@dataclass(frozen=True, slots=True)
class Site:
    """A host that can keep copies, as it describes itself to hosts that join at any time."""

    place: str
    """Identifies the host."""
    domain: str = ""
    """Failure domain; "" if the host is its own domain."""
    to: tuple[str, ...] = ()
    """Places of the hosts that keep its copies."""
    fresh: bool = True
    """Whether it has described itself lately: if not, it may be gone."""


def choose(
    own: Site, others: Iterable[Site], copies: int, *, kept: Sequence[str] = (), failing: Container[str] = ()
) -> list[str]:
    """Return the places of the hosts that may keep the copies of `own`, best first: the first `copies` of them do.

    own: its `to` is the present choice. others: all other hosts. kept: places that have a complete copy, or receive
    one. failing: places that cannot be reached, or refuse.

    Hosts join one by one, and each chooses alone, so `place` cannot decide for all. Each host that keeps a copy stays,
    as far as possible, because another one would need all of the state again. Another host that keeps fewer copies
    than `copies` replaces it in three cases: it keeps more than `copies`; it is in the same domain; or, with one copy,
    the other one has chosen this host, because pairs survive more simultaneous losses than rings. All hosts that see
    the same descriptions find the same replacements. Hosts without any copy yet are placed together, as by `place`.
    Otherwise a host takes one that keeps few copies, best one of a group that has chosen it.
    """
    sites = {site.place: site for site in others if site.place != own.place}
    present = [p for p in dict.fromkeys([*kept, *own.to]) if p in sites and p not in failing][:copies]
    own = Site(own.place, own.domain, tuple(present))
    sites[own.place] = own
    keeps = _keepers(sites.values())
    old, new = _replacements(sites, keeps, copies).get(own.place, ("", ""))
    if new and new not in failing:
        present[present.index(old)] = new
    elif not present:
        present = [p for p in _together(own, sites, keeps, copies) if p not in failing]

    # Those that have chosen this host, and those that they have chosen with it.
    group = {p for site in sites.values() if own.place in site.to for p in (site.place, *site.to)}

    def rank(place: str) -> tuple[Any, ...]:
        site, burden = sites[place], len(keeps[place] - {own.place})
        burden -= copies if place in group else 0
        return place in failing, not site.fresh, _same(own, site), burden, _draw(own.place, place)

    rest = sorted((p for p in sites if p != own.place and p not in present), key=rank)
    return [*present, *rest]


def _keepers(sites: Iterable[Site]) -> dict[str, set[str]]:
    """Return by place the hosts whose copies it keeps.

    A host that has not chosen yet is expected to choose one that has chosen it.
    """
    sites = list(sites)
    keeps: dict[str, set[str]] = {site.place: set() for site in sites}
    for site in sites:
        for place in site.to if site.fresh else ():
            if place in keeps:
                keeps[place].add(site.place)
    found = {place: set(hosts) for place, hosts in keeps.items()}
    for site in sites:
        if site.fresh and not site.to and keeps[site.place]:
            found[min(keeps[site.place], key=lambda place: _draw(site.place, place))].add(site.place)
    return found


def _replacements(
    sites: Mapping[str, Site], keeps: Mapping[str, set[str]], copies: int
) -> dict[str, tuple[str, str]]:
    """Return by place the host that is to keep its copy no longer, and the one that is to keep it from now on."""
    keeps = {place: set(hosts) for place, hosts in keeps.items()}
    found: dict[str, tuple[str, str]] = {}
    idle = [place for place, site in sites.items() if site.fresh and len(keeps[place]) < copies]
    for new in sorted(idle, key=lambda place: (len(keeps[place]), place)):
        while len(keeps[new]) < copies:
            moves = [
                (new_key, site.place, old)
                for site in sites.values()
                if site.fresh and site.place != new and new not in site.to and site.place not in found
                for old in site.to
                if (new_key := _gain(site, old, sites, new, keeps, copies)) is not None
            ]
            if not moves:
                break
            _, place, old = min(moves)
            found[place] = old, new
            keeps[new].add(place)
            keeps[old].discard(place)
    return found


def _gain(
    site: Site, old: str, sites: Mapping[str, Site], new: str, keeps: Mapping[str, set[str]], copies: int
) -> tuple[Any, ...] | None:
    """Return the order in which `new` replaces `old` for a host, best first; None if that improves nothing."""
    if old not in sites:
        return None
    near, far = _same(site, sites[old]), not _same(site, sites[new])
    crowded = len(keeps[old]) > copies and (far or near)
    chosen, mutual = site.place in sites[new].to, site.place in sites[old].to
    paired = copies == 1 and chosen and not mutual and (far or near)
    if not crowded and not paired and not (near and far):
        return None
    return not chosen, mutual, not crowded, _draw(site.place, new)


def _together(own: Site, sites: Mapping[str, Site], keeps: Mapping[str, set[str]], copies: int) -> list[str]:
    """Return the hosts for a host that no other one has chosen, if others are in the same situation; otherwise none."""
    new = sorted(p for p, site in sites.items() if site.fresh and not site.to and not keeps[p])
    if own.place not in new or len(new) <= copies:
        return []
    at = new.index(own.place)
    return [new[other] for other in place([sites[p].domain for p in new], copies)[at][:copies]]


def _same(first: Site, second: Site) -> bool:
    return bool(first.domain) and first.domain == second.domain


def _draw(first: str, second: str) -> bytes:
    """Return a value for two hosts, equal for both, so that choices at the same moment differ."""
    return hashlib.blake2b("\0".join(sorted((first, second))).encode(), digest_size=8).digest()


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
