"""Test options: the environment variables that they read, their units, and that those without effect are refused."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from scarctl.cli.given import named_store, refuse, was_given
from scarctl.cli.main import COMMANDS, cli, default_map
from scarctl.cli.units import Size, Time
from scarctl.config import KNOWN_NAMES
from scarctl.config.environment import OF_COMMANDS, PREFIX, unread
from scarctl.errors import UsageError
from tests.cli.conftest import Run


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


def parsed(arguments: list[str], **defaults: object) -> click.Context:
    command = click.Command(
        "x", params=[click.Option(["-e", "--every"]), click.Option(["--store"], envvar="TEST_GIVEN_STORE")]
    )
    return command.make_context("x", list(arguments), default_map=defaults)


def test_only_the_command_line_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_GIVEN_STORE", "run")
    with parsed([], every="5") as context:
        assert context.params == {"every": "5", "store": "run"}
        assert not was_given("every")
        assert not was_given("store")
        refuse("every", "store", why="requires --watch")
    with parsed(["-e", "5"]):
        assert was_given("every")
        with pytest.raises(UsageError, match=r"^--every requires --watch") as caught:
            refuse("store", "every", why="requires --watch", hint="add --watch")
        assert caught.value.hint == "add --watch"


def test_a_store_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_GIVEN_STORE", "from the environment")
    with parsed([]) as context:
        assert named_store(None, context.params["store"]) == "from the environment"
        assert named_store("place", context.params["store"]) == "place", "the nearer one"
        with pytest.raises(UsageError, match="the store is empty"):
            named_store("", None)
        assert named_store(None, None) is None
    with parsed(["--store", "run"]), pytest.raises(UsageError, match="--store is given twice"):
        named_store("place", "run")


def test_plan_answers_in_the_units_that_were_given(run: Run) -> None:
    options = {"state-bytes": "120GiB", "step-time": "800ms", "bandwidth": "2000 mb/s", "mtbf": "36h"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    first = run("plan", *words).stdout.splitlines()[0]
    assert first == (
        "120 GiB in 1 shard, an iteration takes 800 ms, the store takes 2000 MB/s, a failure every 36 h"
    )
    assert run("plan", *words, "--json").document["job"]["state_bytes"] == 120 * 1024**3


def test_what_was_given_is_shown_as_it_was() -> None:
    sizes = {"1.5gb": "1.5 GB", "2kib": "2 KiB", "3K": "3 kB", "4096": ""}
    assert {text: Size().convert(text, None, None).text for text in sizes} == sizes
    times = {"90S": "90 s", "30m": "30 min", "0.5": ""}
    assert {text: Time().convert(text, None, None).text for text in times} == times
