"""Find the place of this host's arenas, its name for display, and the address at which its daemon listens."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from scarctl.arena.folder import host_folder
from scarctl.arena.header import boot_id
from scarctl.config import SessionSettings
from scarctl.store.hosts import MOST_TEXT

log = logging.getLogger("scarctl")

_ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of documentation, which no host has: the way to them is the default route."""
NEAR = "all copies of this host's memory are in other containers of its own machine: they are lost with it"
"""Text of a caveat."""
NO_COPY = "this host's memory has no copy on another host, and keeps none"
"""Begin of a caveat's text."""


def place_of(settings: SessionSettings) -> str:
    """Return a name for the place of this process's arenas: equal for two processes exactly if they share arenas.

    Containers of one machine may have the same name and path, but other file systems there.
    """
    folder = os.path.realpath(host_folder(settings.arena_dir))
    there = folder
    while not os.path.exists(there):
        there = os.path.dirname(there)
    # Containers of one machine may share its name and boot id, but each has its own shared memory.
    return f"{socket.gethostname()}:{boot_id().hex()}:{os.stat(there).st_dev}:{folder}"


def digest_of_place(place: str) -> str:
    """Return a digest of a place of arenas: 16 hex digits, others on each host and after a boot."""
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def domain_of(settings: SessionSettings) -> str:
    """Return the failure domain of this host: the given one, otherwise its machine, which may have several containers.

    "" if the system does not identify its machine: the host is its own domain then.
    """
    return (settings.peer_domain or machine())[:MOST_TEXT]


def machine() -> str:
    """Return a name for this machine, which all of its containers share until it boots again; "" if unknown."""
    boot = boot_id()
    return f"machine {hashlib.sha256(boot).hexdigest()[:16]}" if any(boot) else ""


def is_near(domain: str, address: str) -> bool:
    """Return whether a host of this domain and address is a container of this machine. At a local address all are."""
    return bool(domain) and domain == machine() and not is_local(address)


def name_of(settings: SessionSettings) -> str:
    """Return a display name of this host. Several on one machine differ by their arenas' folders."""
    name = socket.gethostname()
    if settings.arena_dir is None:
        return name
    return f"{name}:{os.path.basename(os.path.abspath(settings.arena_dir))}"


def is_elsewhere(name: str) -> bool:
    """Return whether a host is another machine. name: its display name, as of `name_of`."""
    return name.partition(":")[0] != socket.gethostname()


def address_among(others: Iterable[str]) -> str:
    """Return the address of this host that reaches others. others: IP addresses of other hosts, perhaps none.

    Without another host: the address of this host's name, or that of the default route. It is local only if there is no
    other one, or if all others are on this machine.
    """
    others = list(others)
    remote = [address for address in others if not is_local(address)]
    for address in remote:
        found = _source(address)
        if found is not None and not is_local(found):
            return found
    if others and not remote:
        return others[0]  # all are on this machine
    for host in (socket.gethostname(), *_ANYWHERE):
        found = _source(host)
        if found is not None and not is_local(found):
            return found
    return "127.0.0.1"


def reaching(host: str) -> str:
    """Return the local address of packets to `host`. Sends no packet. Logs a warning if there is no way."""
    found = _source(host)
    if found is None:
        log.warning("%s cannot be reached from this host", host)
    return found or "127.0.0.1"


def is_local(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    return ip_address(address.partition("%")[0]).is_loopback


def _source(host: str) -> str | None:
    """Return the local address of packets to `host`; None if there is no way, or no such host. Sends no packet."""
    try:
        family, kind, protocol, _, to = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(to)
            return str(probe.getsockname()[0])
    except OSError:
        return None
