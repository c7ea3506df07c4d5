"""Test members with copies on other hosts: they evacuate, are recovered without a process, and are run by a command."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

from scarctl.cli.main import cli
from scarctl.store import Store
from tests.support.copied_member import Hosts
from tests.support.member import ROWS

pytestmark = [pytest.mark.slow, pytest.mark.leaves_arena, pytest.mark.timeout(300)]


def scarctl_command(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


@pytest.mark.parametrize("by", ["signal", "command"])
@pytest.mark.long
def test_a_server_that_waits_for_requests_loses_nothing_with_its_host(alone: Hosts, by: str) -> None:
    """The store gets nothing; the other host has its newest step, which came after the newest checkpoint."""
    alone.options |= {"blocks": True, "interval": 1000, "grace": "20s" if by == "signal" else None}
    two = alone.both()
    two.order(0, "stop store")
    two.until_head(0, "east", 4)
    head = two.order(0, "stopped")["head"]
    if by == "signal":
        two.programs[0].terminate()
        assert two.programs.pop(0).wait() == -signal.SIGTERM
        shutil.rmtree(two.home("east") / f"scarctl-{os.getuid()}" / Store.open(two.store).of_shard(0).run_id)
    else:
        command = ("evacuate", "--deadline", "20s", "--all", "--arena-dir", str(two.home("east")), "--json")
        done = scarctl_command(*command)
        assert done.exit_code == 0, done.output
        (store,) = json.loads(done.stdout)["stores"]
        (process,) = store["processes"]
        assert (process["safe"], process["flushed"], process["step"]) == (True, True, head)
        two.lose("east", 0)
    found = two.start(0, "north")
    assert (found["step"], found["consistent"], found["tiers"].keys()) == (head, True, {"peer"}), found
    assert not [line for line in two.warned(0) if "not flushed" in line]


def test_a_lost_member_is_recovered_into_a_file_from_the_copy(two: Hosts, tmp_path: Path) -> None:
    two.order(0, "stop store")
    head = two.copy(0, stopped=True)
    two.lose("east", 0)
    output = tmp_path / "lost.safetensors"
    done = scarctl_command(
        *("recover", "--store", str(two.store), "--lost", "member:0", "--output", str(output)),
        *("--arena-dir", str(two.home("west")), "--json"),
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["tiers"] == {"peer": ROWS + 1}
    assert (load_file(output)["rows@0"] == head).all()
