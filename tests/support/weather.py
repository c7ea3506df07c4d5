"""Carry frames between the ports of a switch as a bad network does: not the large ones, or in one direction only.

    python -m tests.support.weather SETTINGS PORT PORT [PORT ...]

Runs in the network of the switch, whose ports have left it. SETTINGS is a JSON file, read again when it changes:
`most`, the largest frame in bytes, larger ones vanish; `deaf`, pairs [from, to] of ports by number between which
nothing arrives. Nobody is told about a lost frame.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

_ETHERNET, _ALL = 14, 0x0003
_SIOCETHTOOL = 0x8946
_CHECKSUMS, _SEGMENTS, _LATER = 0x17, 0x1F, 0x24
"""Commands of `ethtool` with which a device leaves checksums and large packets to the next one."""


def plain(device: str) -> None:
    """Have a device send complete frames of at most its MTU, as they would be on a cable."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in (_CHECKSUMS, _SEGMENTS, _LATER):
            value = (ctypes.c_uint32 * 2)(command, 0)
            fcntl.ioctl(
                control,
                _SIOCETHTOOL,
                struct.pack("16sP", device.encode(), ctypes.addressof(value)).ljust(40, b"\0"),
            )


class Settings:
    """The weather: see the module."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, (0, 0)
        self.most = 1 << 20
        self.deaf: set[tuple[int, int]] = set()

    def look(self) -> None:
        status = os.stat(self._path)
        if (seen := (status.st_ino, status.st_mtime_ns)) == self._seen:
            return
        self._seen = seen
        known: dict[str, Any] = json.loads(self._path.read_text())
        self.most = known.get("most", 1 << 20)
        self.deaf = {(one, other) for one, other in known.get("deaf", [])}


def carry(settings: Settings, ports: list[str]) -> None:
    """Carry frames for ever."""
    cables = []
    for port in ports:
        cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        cable.bind((port, 0))
        cable.setblocking(False)
        cables.append(cable)
    poll = select.poll()
    for cable in cables:
        poll.register(cable, select.POLLIN)
    looked = 0.0
    while True:
        if time.monotonic() > looked + 0.02:
            settings.look()
            looked = time.monotonic()
        poll.poll(20)
        for source, cable in enumerate(cables):
            while True:
                try:
                    frame, origin = cable.recvfrom(1 << 17)
                except OSError:
                    break
                if origin[2] == socket.PACKET_OUTGOING or len(frame) - _ETHERNET > settings.most:
                    continue
                for to in range(len(cables)):
                    if to != source and (source, to) not in settings.deaf:
                        with contextlib.suppress(OSError):  # a full queue, or a device that is down: lost
                            cables[to].send(frame)


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        plain(sys.argv[2])
    else:
        carry(Settings(Path(sys.argv[1])), sys.argv[2:])
