"""Define settings: their names, units and defaults, and where a value may come from.

A value is taken from the first source that has it: the call or the command line, the environment
(`SCARCTL_FRACTION`), the file `scarctl.toml` in the current folder, the default. Its name is the same everywhere. Only
this package and the command line read the environment.
"""

from __future__ import annotations

from scarctl.config.checks import check_fixed, check_fraction, check_policy, parse_bytes, parse_fraction
from scarctl.config.file import FILE_NAME, STORAGE_OPTIONS, read_file, storage_options
from scarctl.config.options import (
    DEFAULT_FRACTION,
    DEFAULT_POLICY,
    NORMS,
    POLICIES,
    TRACKERS,
    Extra,
    Hooks,
    Member,
    Mode,
    Norm,
    OnError,
    Partitioning,
    Policy,
    Ranks,
    Selection,
    Settings,
    Tracker,
)
from scarctl.config.settings import KNOWN_NAMES, VERBS, SessionSettings, brief, describe, flatten, grouped

__all__ = [
    "DEFAULT_FRACTION",
    "DEFAULT_POLICY",
    "FILE_NAME",
    "KNOWN_NAMES",
    "NORMS",
    "POLICIES",
    "STORAGE_OPTIONS",
    "TRACKERS",
    "VERBS",
    "Extra",
    "Hooks",
    "Member",
    "Mode",
    "Norm",
    "OnError",
    "Partitioning",
    "Policy",
    "Ranks",
    "Selection",
    "SessionSettings",
    "Settings",
    "Tracker",
    "brief",
    "check_fixed",
    "check_fraction",
    "check_policy",
    "describe",
    "flatten",
    "grouped",
    "parse_bytes",
    "parse_fraction",
    "read_file",
    "storage_options",
]
