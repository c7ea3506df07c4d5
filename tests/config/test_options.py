"""Test that each option has one name: in Python, the documentation, the command line, the environment, the file."""

from __future__ import annotations

import dataclasses
import json
import pydoc
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from scarctl import config
from scarctl.cli.main import COMMANDS, cli
from scarctl.config import KNOWN_NAMES, Partitioning, Selection, SessionSettings, Settings, describe
from scarctl.config.environment import OF_EACH_COMMAND, unread
from scarctl.config.settings import brief
from scarctl.errors import UsageError
from scarctl.state.encodings import ENCODINGS

GROUPS = (Partitioning, Selection, Settings)
OF_ATTACH = {"store", "fraction", "interval"}
"""Arguments of `attach` that are not options: tests/test_api.py."""

VALUES: dict[str, tuple[Any, str]] = {
    "store": ("runs/a", "runs/a"),
    "fraction": (0.25, "1/4"),
    "interval": (7, "7"),
    "overhead": (0.05, "5%"),
    "max_loss": (90.0, "90s"),
    "max_lag": (120.0, "2m"),
    "shards": (3, "3"),
    "seed": (5, "5"),
    "partition_bytes": (4096, "4KiB"),
    "by_layer": (True, "yes"),
    "policy": ("round", "round"),
    "norm": ("rms", "rms"),
    "tracker": ("exact", "exact"),
    "encoding": ("int8", "int8"),
    "max_staleness": (9, "9"),
    "max_bandwidth": (2e6, "2MB"),
    "flush_on_signal": (False, "off"),
    "grace": (25.0, "25s"),
    "on_error": ("raise", "raise"),
    "daemon": (True, "true"),
    "arena_dir": ("/arena", "/arena"),
    "pin_memory": (False, "false"),
    "validate": (True, "on"),
    "assume_single_writer": (True, "1"),
    "timeout": (4.0, "4"),
    "peers": (1, "1"),
    "peer_address": ("10.0.0.7", "10.0.0.7"),
    "peer_domain": ("rack 7", "rack 7"),
    "peer_bandwidth": (5e7, "50MB"),
    "peer_ack": ("all", "all"),
    "peer_tls": (("host.pem", "host.key", "ca.pem"), "host.pem,host.key, ca.pem"),
    "peer_secret_file": ("/etc/secret", "/etc/secret"),
}
"""A value of each option, and its spelling in the environment."""
NO_TEXT: dict[str, Any] = {"rows": {"embed.*": 1}, "storage_options": {"key": "k"}}
"""Options that cannot be written as text."""
SIZES = {"fraction", "partition_bytes", "max_bandwidth", "peer_bandwidth"}
"""Options that the file may spell as the environment does: "1/4", "4KiB"."""
LITERALS = {
    "policy": config.POLICIES,
    "norm": config.NORMS,
    "tracker": config.TRACKERS,
    "encoding": ENCODINGS,
}


def resolved(name: str, folder: Path, environ: dict[str, str] | None = None) -> Any:
    """Return an option's value from the environment, then from `scarctl.toml` in `folder`."""
    given = {} if name == "store" else {"store": "ckpt"}
    if name == "max_bandwidth":
        given["interval"] = "auto"  # each of them needs the other
    return getattr(SessionSettings.resolve(given, environ=environ or {}, folder=folder), name)


def test_every_option_has_a_value_here() -> None:
    assert VALUES.keys() | NO_TEXT.keys() == KNOWN_NAMES


@pytest.mark.parametrize("name", sorted(KNOWN_NAMES))
def test_python_has_it_once(name: str) -> None:
    homes = [group for group in GROUPS if name in {field.name for field in dataclasses.fields(group)}]
    assert len(homes) == (name not in OF_ATTACH)
    assert all(
        field.kw_only and field.default is None for home in homes for field in dataclasses.fields(home)
    )


@pytest.mark.parametrize("name", sorted(KNOWN_NAMES))
def test_help_describes_it_once(name: str) -> None:
    text = describe(name)
    assert text.endswith(".")
    assert name == "store" or "Default: " in text
    pages = [pydoc.plain(pydoc.render_doc(group)) for group in GROUPS]
    assert sum(f"  {name}: " in page for page in pages) == (name not in OF_ATTACH)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Partitioning(shard=8), "Partitioning has no option 'shard' (did you mean shards?)"),
        (lambda: Selection(fractoin=0.5), "no option 'fractoin' (did you mean scarctl.attach(fraction=...)?)"),
        (lambda: Settings(trackr="exact"), "did you mean selection=scarctl.Selection(tracker=...)?"),
        (lambda: Settings(interval=3), "did you mean scarctl.attach(interval=...)?"),
        (lambda: Partitioning(xyzzy=1), "(options: shards, seed, partition_bytes, by_layer, rows)"),
        (lambda: config.Extra({}, perrank=True), "Extra has no option 'perrank' (did you mean per_rank?)"),
        (lambda: config.Ranks(replicate=()), "did you mean replicated?"),
        (lambda: config.Member(1, 2, replace=1), "did you mean replaces?"),
    ],
)  # fmt: skip
def test_a_misspelt_option_names_the_one_that_was_meant(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert said in str(caught.value)


@pytest.mark.parametrize("name", LITERALS)
def test_a_type_checker_knows_its_values(name: str) -> None:
    hint = typing.get_type_hints(Selection)[name]
    known = {
        value
        for member in typing.get_args(hint)
        if typing.get_origin(member) is typing.Literal
        for value in typing.get_args(member)
    }
    assert known == set(LITERALS[name])


@pytest.mark.parametrize("name", sorted(VALUES))
def test_the_environment_and_the_file_have_its_name(name: str, tmp_path: Path) -> None:
    value, text = VALUES[name]
    variable = f"SCARCTL_{name.upper()}"
    assert unread(variable) is None
    assert resolved(name, tmp_path, {variable: text}) == value
    for written in {json.dumps(value), *([json.dumps(text)] if name in SIZES else [])}:
        (tmp_path / "scarctl.toml").write_text(f"{name} = {written}\n")
        assert resolved(name, tmp_path) == value


@pytest.mark.parametrize("name", sorted(NO_TEXT))
def test_what_has_no_form_as_text_is_in_the_file(name: str, tmp_path: Path) -> None:
    reason = unread(f"SCARCTL_{name.upper()}")
    assert reason is not None
    assert "scarctl.toml" in reason
    items = [f"{json.dumps(key)} = {json.dumps(item)}\n" for key, item in NO_TEXT[name].items()]
    (tmp_path / "scarctl.toml").write_text("".join([f"[{name}]\n", *items]))
    assert resolved(name, tmp_path) == NO_TEXT[name]


def options() -> list[tuple[str, click.Option]]:
    """Return every option of every command, except those of studies, which have settings of their own."""
    found, context = [], click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        leaves = command.commands.values() if isinstance(command, click.Group) else [command]
        found += [
            (name, option) for leaf in leaves for option in leaf.params if isinstance(option, click.Option)
        ]
    return [(name, option) for name, option in found if name != "simulate"]


def test_the_command_line_has_its_name() -> None:
    shared = [(name, option) for name, option in options() if option.name in KNOWN_NAMES - OF_EACH_COMMAND]
    assert {option.name for _, option in shared} >= {"store", "arena_dir", "shards", "peers"}
    for command, option in shared:
        assert option.name is not None
        assert f"--{option.name.replace('_', '-')}" in option.opts, command
        assert option.envvar == f"SCARCTL_{option.name.upper()}", (command, option.name)


@pytest.mark.parametrize("name", ["arena_dir", "shards", "partition_bytes", "assume_single_writer"])
def test_the_command_line_describes_it_with_the_same_words(name: str) -> None:
    texts = {option.help for _, option in options() if option.name == name}
    assert brief(name) in texts
