"""Rehearse programs as processes: the verdict, the reason, what is left behind, and all of `tests.rehearse.loops`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scarctl.errors import ScarError, UsageError
from scarctl.rehearse.rehearsal import Rehearsal
from scarctl.rehearse.run import ARENA
from scarctl.store.verdict import waiting_path
from tests.cli.conftest import validator
from tests.rehearse.conftest import rehearse
from tests.rehearse.loops import PER_EPOCH, PROGRAMS
from tests.support.waiting import wait_until

PROGRAM = Path(__file__).with_name("program.py")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_places")]


def command(name: str, tmp_path: Path) -> list[str]:
    return [sys.executable, str(PROGRAM), name, str(tmp_path / "ckpt")]


def left(tmp_path: Path, arena_dir: Path) -> list[Path]:
    """Return what a rehearsal has left: stores, memory and temporary files."""
    names = [path for path in tmp_path.iterdir() if path.name.startswith(("ckpt", "after", ARENA))]
    return [*names, *(tmp_path / "temporary").iterdir(), *arena_dir.iterdir()]


def test_a_loop_that_continues_is_identical_and_leaves_nothing(
    tmp_path: Path, arena_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from scarctl.cli.main import cli

    with pytest.raises(SystemExit) as end:
        cli.main(["rehearse", "--steps", "8", "--json", "--", *command("good", tmp_path)])
    assert end.value.code == 0
    found = json.loads(capfd.readouterr().out)
    validator("rehearse").validate(found)
    assert (found["verdict"], found["steps"], found["stop"], found["tensors"]) == ("identical", 8, 5, 8)
    undisturbed, term, kill = found["runs"]
    assert (undisturbed["resumed"], term["resumed"] >= 5) == (None, True)
    assert kill["resumed"] == 4  # the newest whole checkpoint before the step after which it was killed
    assert left(tmp_path, arena_dir) == []
    # No store exists yet, so the verdict waits for it.
    (waiting,) = waiting_path("x").parent.iterdir()
    assert json.loads(waiting.read_bytes())["verdict"] == "identical"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("unsaved", "result", "began with the same state, batch"),
        ("again", "not-resumed", "began again with step 1"),
        ("fell_back", "rates", "the learning rate fell back"),
        ("carried", "inputs", "the first batch after the restart is another one"),
        ("attributes", "result", "of the module Scales, which training changes: scale"),
    ],
)
def test_the_likeliest_reason(name: str, kind: str, words: str, tmp_path: Path, arena_dir: Path) -> None:
    if name == "attributes":
        pytest.importorskip("lightning")
    found, _ = rehearse(command(name, tmp_path))
    assert found.verdict == "different"
    for one in found.runs[1:]:
        assert one.cause is not None
        assert (one.cause.kind, words in one.cause.reason) == (kind, True), one.cause
    assert left(tmp_path, arena_dir) == []


@pytest.mark.long
def test_a_program_that_is_not_deterministic(tmp_path: Path) -> None:
    found, _ = rehearse(command("unseeded", tmp_path))
    assert found.verdict == "not-deterministic"
    undisturbed = found.runs[0]
    assert undisturbed.cause is not None
    assert (undisturbed.cause.kind, undisturbed.cause.step) == ("result", 1)
    assert "by up to" in undisturbed.differences[0].what
    assert [one.cause for one in found.runs[1:]] == [None, None]  # rates and batches continue


@pytest.mark.long
def test_a_session_for_each_model(tmp_path: Path, arena_dir: Path) -> None:
    found, _ = rehearse(command("layers", tmp_path), steps=10)
    assert {Path(one.store).name for one in found.attached} == {"ckpt-0", "ckpt-1"}
    assert found.verdict == "identical", found
    assert found.tensors == 4
    assert left(tmp_path, arena_dir) == []


@pytest.mark.long
def test_ranks_of_torchrun(tmp_path: Path, arena_dir: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found, said = rehearse([*torchrun, *command("ranks", tmp_path)[1:]])
    assert found.verdict == "identical", (found, said)
    assert [run.resumed for run in found.runs] == [None, found.stop, found.stop - 1], said
    assert found.tensors == 2 * 8
    assert left(tmp_path, arena_dir) == []


@pytest.mark.long
def test_a_program_with_fewer_steps(tmp_path: Path, arena_dir: Path) -> None:
    found, said = rehearse(command("short", tmp_path), steps=40)
    assert (found.verdict, found.steps) == ("identical", 6)
    assert "the program has only 6 steps: these are rehearsed" in said
    assert left(tmp_path, arena_dir) == []


@pytest.mark.long
def test_a_program_that_ignores_sigterm(tmp_path: Path) -> None:
    with pytest.raises(ScarError, match="went on after SIGTERM until step 8: it handles the signal itself"):
        rehearse(command("stubborn", tmp_path))


def test_a_program_that_never_attaches(tmp_path: Path) -> None:
    said: list[str] = []
    program = [sys.executable, "-c", "print('trained without it')"]
    with pytest.raises(ScarError, match="exit code 0, and never called") as caught:
        Rehearsal(program, 240.0, said.append).run(8)
    assert caught.value.kind == "not-rehearsed"
    assert said[-1] == "  | trained without it"


def test_a_program_that_takes_too_long_or_does_not_exist(tmp_path: Path, arena_dir: Path) -> None:
    with pytest.raises(ScarError, match=r"not reached step 8 in 1 s, and has not called scarctl.attach"):
        rehearse(["sleep", "60"], timeout=0.6)
    with pytest.raises(UsageError, match="No such file"):
        rehearse([str(tmp_path / "missing")])
    assert left(tmp_path, arena_dir) == []


def test_ctrl_c_ends_the_program(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    words = [
        sys.executable,
        "-m",
        "scarctl",
        "rehearse",
        "--",
        "sh",
        "-c",
        f"echo $$ > {mark}; exec sleep 300",
    ]
    environment: dict[str, Any] = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
    wait_until(lambda: mark.exists() and mark.read_text().strip() != "")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    assert not Path("/proc", mark.read_text().strip()).exists()
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("stop", [PER_EPOCH, PER_EPOCH + 2], ids=["last step of an epoch", "within an epoch"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_as_it_would_have(tmp_path: Path, name: str, stop: int) -> None:
    words = [sys.executable, "-m", "tests.rehearse.loops", name, str(tmp_path / "store")]
    found, said = rehearse(words, 2 * stop)
    assert found.verdict == "identical", (found, said)
    assert all(run.resumed for run in found.runs[1:])
