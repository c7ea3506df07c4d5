"""Test which environment variable an option reads, and that none is read as another option."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from scarctl.cli.main import COMMANDS, cli, default_map
from scarctl.config import KNOWN_NAMES
from scarctl.config.environment import OF_COMMANDS, PREFIX, unread


def variables() -> dict[str, set[str]]:
    """Return the commands that read each variable."""
    found: dict[str, set[str]] = {}
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        for leaf in command.commands.values() if isinstance(command, click.Group) else [command]:
            for option in leaf.params:
                if isinstance(option.envvar, str):
                    found.setdefault(option.envvar, set()).add(name)
    return found


def test_every_variable_is_known_and_no_other() -> None:
    found = {name.removeprefix(PREFIX).lower() for name in variables()}
    assert found - KNOWN_NAMES == OF_COMMANDS
    assert [name for name in variables() if unread(name)] == []


def test_each_command_has_a_timeout_of_its_own() -> None:
    found = variables()
    assert "SCARCTL_TIMEOUT" not in found, "that is how long closing a session waits"
    for name in ("run", "live", "daemon", "snapshot"):
        assert found[f"SCARCTL_{name.upper()}_TIMEOUT"] == {name}


def test_the_files_timeout_is_the_sessions_unless_it_is_in_a_commands_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scarctl.toml").write_text("timeout = 1\nstore = 'ckpt'\n[run]\ntimeout = 7\n")
    found = default_map(Path())
    assert found["run"] == {"store": "ckpt", "timeout": 7}
    assert found["daemon"] == {"store": "ckpt"}
