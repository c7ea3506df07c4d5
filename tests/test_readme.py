"""Test that the README and the guides are true: their commands and Python run, their tables match the code."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import scarctl
from scarctl import errors
from scarctl.cli.main import COMMANDS
from tests.support import forkserver

pytestmark = pytest.mark.usefixtures("usual_saver")

ROOT = Path(__file__).parent.parent
STEPS = ("docs/quickstart.md", "docs/costs.md", "docs/failures.md", "docs/report.md")
"""Documents whose commands form one terminal session, in this order. The first one is a session of its own, too."""
PROGRAMS = (
    "docs/api.md",
    "docs/loops.md",
    "docs/members.md",
    "docs/metrics.md",
    *(f"docs/howto/{name}.md" for name in ("containers", "embeddings", "notebooks", "stages")),
)
"""Documents whose Python blocks form one program each."""
LOOP = """
import torch
criterion = torch.nn.CrossEntropyLoss()
loader = [(torch.rand(4, 8), torch.randint(0, 2, (4,))) for _ in range(3)]
def build():
    model = torch.nn.Linear(8, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
"""


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    """Return the contents of the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(document), re.MULTILINE | re.DOTALL)


def commands(documents: tuple[str, ...]) -> list[str]:
    """Return the lines after a prompt."""
    console = [block for document in documents for block in blocks(document, "console")]
    return [line[2:] for block in console for line in block.splitlines() if line.startswith("$ ")]


def table(document: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table whose heading begins with this cell, without header and rule."""
    text = read(document)
    lines = text[text.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the README's files as the current folder, with `scarctl` and `python` on the path."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    beside = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{beside}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"


def run_words(command: str) -> None:
    """Run a command of plain words, in a process that has already imported torch."""
    name, *words = shlex.split(command)
    start = {"scarctl": ["-m", "scarctl"], "python": []}[name]
    done = forkserver.run([*start, *words], timeout=100, cwd=Path.cwd())
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def run_python(program: str, folder: Path) -> None:
    """Run a program with warnings as errors, in a process that has already imported torch."""
    source = f"import warnings; warnings.simplefilter('error')\n{program}"
    done = forkserver.run(["-c", source], timeout=100, cwd=folder)
    assert done.returncode == 0, f"{program}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_of_the_quickstart_run(folder: Path) -> None:
    found = commands(STEPS[:1])
    assert len(found) >= 8
    for command in found:
        run_words(command)
    assert (folder / "lost.safetensors").exists()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_all_commands_run(folder: Path) -> None:
    found = commands(STEPS)
    assert len(found) >= 8
    for command in found:
        run("bash", "-c", command)


@pytest.mark.slow
@pytest.mark.parametrize(
    "document", [*PROGRAMS[:2], *(pytest.param(one, marks=pytest.mark.long) for one in PROGRAMS[2:])]
)
def test_python_runs(folder: Path, document: str) -> None:
    """The blocks form one program."""
    run_python("\n".join(blocks(document, "python")), folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.long
def test_the_workbench_prints_what_the_page_shows(folder: Path) -> None:
    """The first block of Python makes the files, the last one loads the results of the commands."""
    first, last = blocks("docs/workbench.md", "python")
    run_python(first, folder)
    for block in blocks("docs/workbench.md", "console"):
        for entry in block.removeprefix("$ ").split("\n$ "):
            command, _, shown = entry.partition("\n")
            done = subprocess.run(
                ["bash", "-c", command], capture_output=True, text=True, timeout=100, check=False
            )
            assert (done.stdout.strip(), done.stderr) == (shown.strip(), ""), command
    run_python(first.replace("ckpt", "again") + last, folder)


@pytest.mark.slow
def test_the_lines_to_add_to_a_loop_are_all(folder: Path) -> None:
    """The first loop trains without scarctl, the second one resumes: at the second start nothing is left to train."""
    (change,) = blocks("README.md", "diff")
    lines = change.splitlines()
    before, after = ("\n".join(x[1:] for x in lines if x[0] in wanted) for wanted in (" -", " +"))
    run_python(LOOP + before, folder)
    run_python(f"{LOOP}{after}\nassert session.head_step == 30, session.head_step", folder)
    counting = after.replace("loss.backward()", "loss.backward(); trained += 1")
    run_python(f"{LOOP}trained = 0\n{counting}\nassert not trained", folder)


def test_the_commands_are_those_that_there_are() -> None:
    named = [re.match(r"`scarctl (\w+)", row[0]) for row in table("docs/commands.md", "command")]
    assert [match[1] for match in named if match] == list(COMMANDS)


def test_the_exit_codes_are_those_that_there_are() -> None:
    cells = [cell for row in table("docs/commands.md", "exit code") for cell in row[::2]]
    documented = {int(cell) for cell in cells if cell.isdecimal()}
    raised = {
        item.exit_code
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, errors.ScarError)
    }
    assert documented == raised | {0, 3, 4, 5}


def test_the_arguments_of_attach_are_those_that_there_are() -> None:
    documented = [row[0].strip("`") for row in table("docs/api.md", "argument")]
    assert documented == list(inspect.signature(scarctl.attach).parameters)


def test_the_methods_of_a_session_are_those_that_there_are() -> None:
    documented = dict(_methods())
    for name, signature in documented.items():
        parameters = list(inspect.signature(getattr(scarctl.Session, name)).parameters)[1:]
        assert re.findall(r"\w+(?==)|^\w+", signature) == parameters
    public = {name for name, item in vars(scarctl.Session).items() if callable(item) and name[0] != "_"}
    assert set(documented) == public


def _methods() -> list[tuple[str, str]]:
    matches = [re.fullmatch(r"`(\w+)\((.*)\)`", row[0]) for row in table("docs/api.md", "method")]
    return [(match[1], match[2]) for match in matches if match]
