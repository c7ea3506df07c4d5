"""Test that caveats reach the log, the next session and `scarctl inspect`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import scarctl
from scarctl.cli.main import cli
from scarctl.state.caveats import Caveat, Caveats, read_caveats


def _run(store: Path, steps: int) -> scarctl.Session:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    session = scarctl.attach(model, optimizer, store=store, settings=scarctl.Settings(daemon=False))
    session.resume()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
    return session


def test_inspect_shows_it(tmp_path: Path) -> None:
    session = _run(tmp_path / "s", 3)
    session.caveats.say("swapped", "the data were swapped")
    session.close()
    text = CliRunner().invoke(cli, ["inspect", "--store", str(tmp_path / "s")], standalone_mode=False).stdout
    assert "caution: the data were swapped" in text
    told = CliRunner().invoke(
        cli, ["inspect", "--store", str(tmp_path / "s"), "--json"], standalone_mode=False
    )
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
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with scarctl.attach(
        model, optimizer, store=tmp_path / "s", settings=scarctl.Settings(daemon=False)
    ) as session:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
            if not step:
                assert not list(session.caveats)
                model.register_buffer("seen", torch.zeros(4))
        session.checkpoint(full=True)
        assert [caveat.kind for caveat in session.caveats] == ["new-state"]
    session = _run(tmp_path / "s", 0)
    assert session.resumed is not None
    assert session.resumed.consistent
    session.close()
