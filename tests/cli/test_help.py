"""Test help, its examples, mistyped names, completion, and terminals without Unicode."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scarctl.cli.main import COMMANDS, GROUPS
from scarctl.rehearse.rehearsal import Rehearsal, Rehearsed
from scarctl.util.text import counted
from tests.cli.conftest import Model, Run, examples
from tests.cli.test_daemon import Training

ALL = [*(name for name in COMMANDS if name not in GROUPS), *(f"{a} {b}" for a in GROUPS for b in GROUPS[a])]


@pytest.mark.parametrize("name", ["", *ALL, *GROUPS, "help", "version"])
def test_help_names_every_option(run: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run(*name.split(), "--help").stdout
    assert run(*name.split(), "-h").stdout == run("help", *name.split()).stdout == text
    assert max(map(len, text.splitlines())) <= (115 if not name else 80)
    assert re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)


RUN = {
    "checkpoint": (0, 1),
    "snapshot create": (1,),
    "snapshot list": (0, 1),
    "inspect": (0, 1),
    "status": (1,),
    "verify": (0, 1),
    "recover": (0, 1, 2),
    "export": (0, 2),
    "plan": (0, 1),
    "report": (0,),
    "prune": (0, 1),
    "snapshot delete": (0,),
    "doctor": (0,),
    "simulate": (1,),
    "run": (0,),
    "version": (0, 1),
    "help": (0, 1, 2),
}
"""Examples that run one after the other in one folder. The others need a bucket, or more files."""
WITH_A_TEST = ("live checkpoint", "live recover", "daemon", "diff", "evacuate", "rehearse")
"""Examples with a test of their own below, which need a running session or other files."""


def test_examples_run(run: Run, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*ALL, "help", "version"} - RUN.keys() == set(WITH_A_TEST)
    model.path.rename("model.safetensors")
    shutil.copy("model.safetensors", "survivors.safetensors")
    (tmp_path / "train.py").touch()
    (tmp_path / "workload.py").write_text("from tests.simulate.workloads import quadratic as build\n")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    tree = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tree), str(tree / "adapters"))))
    for name, value in {"SIMULATE_TRIALS": "2", "SIMULATE_JOBS": "1", "ROUNDS": "1"}.items():
        monkeypatch.setenv(f"SCARCTL_{name}", value)
    for name, which in RUN.items():
        shown = examples(run, name)
        for k in which:
            run(*shown[k])


def test_words_for_people() -> None:
    assert [counted(n, "partition") for n in (0, 1, 2)] == ["0 partitions", "1 partition", "2 partitions"]
    assert counted(2, "copy", "copies") == "2 copies"


def test_version_and_help_are_commands_too(run: Run) -> None:
    assert run("version").stdout.startswith("scarctl ")
    assert set(run("version", "--json").document) == {
        "schema_version",
        "command",
        "version",
        "python",
        "executable",
    }
    assert "Exit codes" in run("help").stdout


def complete(words: str, folder: Path) -> list[str]:
    environment = {
        **os.environ,
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_SCARCTL_COMPLETE": "bash_complete",
    }
    program = "from scarctl.cli.main import cli; cli.main(prog_name='scarctl')"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, text=True
    )
    return done.stdout.split()


def test_a_shell_completes_stores(saved: Model, tmp_path: Path) -> None:
    shutil.copytree("ckpt", "runs/first")
    (tmp_path / "cache").mkdir()
    assert complete("scarctl verify --store ", tmp_path) == ["plain,ckpt", "plain,runs/first"]
    assert complete("scarctl plan --from ca", tmp_path) == ["dir,ca"], "the shell completes folders"


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C"}])
def test_terminals_without_unicode(
    run: Run, model: Model, environment: dict[str, str], tmp_path: Path
) -> None:
    """Names that the terminal cannot show are escaped, and everything else is ASCII."""
    model.save(**{"größe→": model.tensors["emb"] + 1})
    run("checkpoint", model.path, "--store", "ckpt→", "--step", 0, "--shards", 2)
    words = ("recover", "--store", "ckpt→", "--lost", "größe→", "--output", "→.pt", "--dry-run")
    done = subprocess.run(
        [sys.executable, "-m", "scarctl", *words],
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0
    shown = done.stdout + done.stderr
    assert b"Traceback" not in shown
    assert b"\\u2192" in shown
    if "latin-1" not in environment.values():
        assert shown.isascii()
    assert "→".encode() not in shown


def test_the_manual_page_says_what_the_commands_say(run: Run) -> None:
    """`make man` updates it."""
    page = run("help", "--man").stdout
    assert page == (Path(__file__).parents[2] / "docs" / "scarctl.1").read_text()
    assert page.count(".SS scarctl ") == len(ALL) + 2
    run("help", "verify", "--man", code=2)


def test_examples_on_a_running_session(run: Run, folder: Path) -> None:
    """Examples of ranks are run in test_ranks.py."""
    training = Training(**{"layers.3.w": np.zeros((16, 8), np.float32)})
    try:
        (by_name, by_rank, by_member) = examples(run, "live recover")
        assert (by_rank[-1], by_member[-1]) == ("rank:1", "member:2")
        for words in (
            *examples(run, "live checkpoint"),
            by_name,
            *examples(run, "live")[:2],
            *examples(run, "evacuate"),
        ):
            # The run has no peers: the host of the example is unknown.
            run(*words, code=2 if "--to" in words else 0)
    finally:
        training.end()


def test_examples_of_the_daemon(run: Run, folder: Path) -> None:
    """A free port replaces the shown one, which another program may have."""
    start, publish, status, release, end = examples(run, "daemon")
    run(*start)
    assert run(*status).document["running"]
    assert "saves nothing to this store" in run(*release, code=2).stderr
    run(*end)
    assert "/metrics" in run(*publish[:-1], "0").stdout
    run(*end)


def test_examples_of_rehearse(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they run is replaced: whole rehearsals are in tests/rehearse."""
    asked = []

    def rehearsed(self: Rehearsal, steps: int) -> Rehearsed:
        asked.append((self._command, steps))
        return Rehearsed(
            "identical", steps, "2026-11-22T10:00:00+00:00", " ".join(self._command), 5, 1, (), (), ()
        )

    monkeypatch.setattr(Rehearsal, "run", rehearsed)
    for words in examples(run, "rehearse"):
        run(*words)
    assert asked == [
        (["python", "train.py"], 40),
        (["torchrun", "--nproc-per-node", "8", "train.py"], 10),
    ]


def test_examples_of_diff(run: Run, saved: Model) -> None:
    shutil.copy(saved.path, "before.safetensors")
    run("snapshot", "create", "best", saved.path, "--store", "ckpt", "--step", 1200)
    saved.train("emb")
    shutil.copy(saved.path, "after.safetensors")
    torch.save(saved.tensors, "model.pt")
    run("checkpoint", saved.path, "--store", "ckpt", "--step", 1201)
    save_file(saved.tensors, "float32.safetensors")
    save_file({name: value.bfloat16() for name, value in saved.tensors.items()}, "bfloat16.safetensors")
    files, snapshots, sealed, dtypes = examples(run, "diff")
    for words in (files, snapshots, sealed, dtypes):
        run(*words, code=4)
