"""Test that options without effect are refused, but only if the command line has them."""

from __future__ import annotations

import click
import pytest

from scarctl.cli.given import named_store, refuse, was_given
from scarctl.errors import UsageError


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
