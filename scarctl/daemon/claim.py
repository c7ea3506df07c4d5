"""Choose the saver of a session: the host's daemon, or a thread of the session's process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from scarctl.arena.folder import arena_folder
from scarctl.config import SessionSettings
from scarctl.daemon.request import Request
from scarctl.daemon.saver import DaemonSaver
from scarctl.persist.saver import LocalSaver, Saver
from scarctl.store import Store
from scarctl.store.backends.address import IN_THIS_PROCESS, portable_options
from scarctl.util.text import counted

log = logging.getLogger("scarctl")

_WITHOUT = ("daemon-not-started", "daemon-full")
"""Kinds of errors after which a session saves without a daemon, unless it requires one."""


def claim_saver(store: Store, settings: SessionSettings, on_request: Callable[[Request], None]) -> Saver:
    """Claim the store for a session, and return its saver.

    on_request: called in another thread when a command sends a request.

    Raises Contention, AccessDenied, Unavailable. If the settings require a daemon, raises the error of its start.
    """
    if settings.daemon is not False and store.address.scheme != IN_THIS_PROCESS:
        folder = arena_folder(settings.arena_dir, store.run_id).parent
        options = portable_options(store.address, settings.storage_options, os.environ)
        saver: Saver = DaemonSaver(store.address.url, store.run_id, folder, on_request, options, store.part)
        try:
            saver.claim()
            log.info("%s, saved by the daemon in %s", _attached(store, settings), folder)
            return saver
        except BaseException as error:
            saver.close()
            if settings.daemon or getattr(error, "kind", None) not in _WITHOUT:
                raise
            log.warning("%s. Saving runs in a thread of this process, and ends with it", error)
    saver = LocalSaver(store)
    saver.claim()
    log.info("%s, saved by a thread of this process", _attached(store, settings))
    return saver


def _attached(store: Store, settings: SessionSettings) -> str:
    return (
        f"attached to {store.url}: interval {settings.interval}, fraction {settings.fraction:.4g}, "
        f"{counted(store.settings.shards, 'shard')}"
    )
