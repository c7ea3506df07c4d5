"""Report environment variables that have no effect, such as misspelled ones."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterable, Mapping

from scarctl.config.settings import KNOWN_NAMES, VERBS
from scarctl.util.text import printable

log = logging.getLogger("scarctl")

PREFIX = "SCARCTL_"
REHEARSAL = "SCARCTL_REHEARSAL"
"""Variable that makes a program a run of a rehearsal: see `scarctl.rehearse.run`."""
OF_EACH_COMMAND = frozenset({"timeout"})
"""Settings of a session that are also the names of commands' options, with other meanings. So an option's variable
contains the command's name (SCARCTL_RUN_TIMEOUT), and only the command's own table in the file counts."""
OF_COMMANDS = frozenset((
    "bandwidth", "convergence", "deadline", "debug", "dry_run", "duration", "every", "format", "from",
    "gain", "hosts", "json", "keep_every", "keep_last", "limit", "max_rework", "max_shard_size",
    "memory_bandwidth", "metrics", "metrics_listen", "mode", "mtbf", "peer", "read_data", "read_data_subset",
    "restart", "restarts", "rounds", "state_bytes", "step", "step_time", "steps", "to", "watch",
    "daemon_timeout", "live_timeout", "rehearse_timeout", "run_timeout", "snapshot_timeout", "simulate_data",
    "simulate_fail_after", "simulate_failure_rate", "simulate_fraction", "simulate_interval",
    "simulate_iterations", "simulate_jobs", "simulate_lost", "simulate_mode", "simulate_norm",
    "simulate_plot", "simulate_policy", "simulate_predictions", "simulate_results", "simulate_seed",
    "simulate_smooth", "simulate_stratify", "simulate_target", "simulate_trials",
))  # fmt: skip
"""Options of commands that are not settings of a session, as their variables spell them."""
_NOT_TEXT = {
    "rows": "give it in scarctl.toml, or to attach",
    "storage_options": "give it in scarctl.toml, or in scarctl.Settings",
}
_OURS = frozenset({"rehearsal", "restart_count"})
"""Variables that scarctl sets for other programs."""


def warn_of_unread(environ: Mapping[str, str]) -> None:
    """Log a warning, once per process, for each variable of scarctl's that has no effect."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and environ[name]:
            reason = unread(name)
            if reason is not None:
                _warn(name, reason)


def unread(name: str) -> str | None:
    """Return why the variable `name` has no effect, None if something reads it."""
    key = name.removeprefix(PREFIX).lower()
    if key in VERBS:
        return f"give --{key.replace('_', '-')} on the command line"
    if key in _NOT_TEXT:
        return _NOT_TEXT[key]
    known = (KNOWN_NAMES | OF_COMMANDS | _OURS) - _NOT_TEXT.keys()
    if key in known and name == name.upper():
        return None
    return f"scarctl reads no such variable{_like(key, known)}"


def _like(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), 1)
    return f"; did you mean {PREFIX}{near[0].upper()}?" if near else ""


@functools.cache
def _warn(name: str, reason: str) -> None:
    log.warning("%s has no effect: %s", printable(name), reason)
