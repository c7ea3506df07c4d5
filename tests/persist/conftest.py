"""Provide the daemon's fixtures: a rig, a daemon in a thread, and a connection to it."""

from tests.daemon.conftest import connection, daemon, rig

__all__ = ["connection", "daemon", "rig"]
