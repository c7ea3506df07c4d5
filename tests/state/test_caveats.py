"""Test that caveats reach the log, the next session and `scarctl inspect`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from scarctl.cli.main import cli
from scarctl.state.caveats import Caveat, Caveats, read_caveats
from tests.support.training import Loop


def test_inspect_shows_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "s", daemon=False)
    loop.train(3)
    loop.session.caveats.say("swapped", "the data were swapped")
    loop.session.close()
    command = ["inspect", "--store", str(tmp_path / "s")]
    text = CliRunner().invoke(cli, command, standalone_mode=False).stdout
    assert "caution: the data were swapped" in text
    told = CliRunner().invoke(cli, [*command, "--json"], standalone_mode=False)
    assert json.loads(told.stdout)["caveats"] == [{"kind": "swapped", "message": "the data were swapped"}]


def test_it_is_logged_once_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caveats = Caveats()
    with caplog.at_level(logging.WARNING, "scarctl"):
        for message in ("one", "one", "two", "one"):
            caveats.say("kind", message)
    assert [record.message for record in caplog.records] == ["one", "two", "one"]
    assert [caveat.message for caveat in caveats] == ["one"]


@pytest.mark.parametrize("found", [None, 5, "x", [5], [{"kind": 1, "message": "m"}], [{}], {"kind": "k"}])
def test_hostile_extras_have_none(found: object) -> None:
    assert read_caveats(found) == ()


def test_a_long_message_is_cut() -> None:
    found = read_caveats([{"kind": "k", "message": "m" * 9999}])
    assert found == (Caveat("k", "m" * 1000),)


def test_a_buffer_that_is_registered_after_the_first_step_is_said_not_to_be_saved(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "s", daemon=False)
    with loop.session as session:
        loop.train(1)
        assert not list(session.caveats)
        loop.model.register_buffer("seen", torch.zeros(4))
        loop.train(2)
        session.checkpoint(full=True)
        assert [caveat.kind for caveat in session.caveats] == ["new-state"]
    with Loop(tmp_path / "s", daemon=False).session as session:
        assert session.resume().consistent
