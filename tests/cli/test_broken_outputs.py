"""Test in a real process outputs that cannot be written: a full disk, and a reader such as `head` that has ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Model, Run, fresh
from tests.cli.test_schemas import PRINTED
from tests.cli.test_wrong_inputs import IMPORTS
from tests.support import forkserver

PROGRAM = "from scarctl.cli.main import main; main()"
SMALL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000));"
"""Limit the size of files. Python ignores the signal: writing fails."""
SHOWN = {
    name: words
    for name, words in PRINTED.items()
    if name not in ("simulate", "doctor", "snapshot create", "snapshot delete", "evacuate", "daemon")
}
"""Commands whose process takes only a moment."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, template: Path) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    fresh(folder / "state.safetensors")
    shutil.copytree(template, folder / "ckpt")
    return folder


def said(words: list[str], stdout: int, folder: Path) -> tuple[int, str]:
    """Return exit code and stderr of a command that writes to this file."""
    with open(folder / "err", "wb") as err:
        program = forkserver.Program(
            ["-c", PROGRAM, *words], stdout=stdout, stderr=err, cwd=folder, imports=IMPORTS
        )
        code = program.wait()
    return code, (folder / "err").read_text()


@pytest.mark.parametrize("form", ["--json", pytest.param("", marks=pytest.mark.long)])
def test_a_full_disk_behind_stdout(folder: Path, form: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        for name, words in {**SHOWN, "help": "", "help verify": ""}.items():
            if form and name.startswith("help"):
                continue
            shutil.rmtree(folder / "out", ignore_errors=True)
            code, text = said([*name.split(), *words.split(), *form.split()], full, folder)
            assert (code, "Traceback" in text) == (17, False), f"{name}: {text}"
            assert "the output cannot be written: No space left on device" in text, name
        code, text = said(["verify", "--store", "nowhere", "--json"], full, folder)
        assert (code, text.count("there is no store here"), len(text.splitlines())) == (10, 1, 1)
    finally:
        os.close(full)


@pytest.mark.long
def test_a_reader_that_has_gone(folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        for words in ("verify --store ckpt", "status ckpt --json", "help --schemas", "version"):
            command = [sys.executable, "-m", "scarctl", *words.split()]
            done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=folder, check=False)
            assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b""), words
    finally:
        os.close(write)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("export --store ckpt out", marks=pytest.mark.long),
        "export --store ckpt out.safetensors",
        "recover --store ckpt --lost all --output out.safetensors",
        pytest.param("report ckpt -o out.html", marks=pytest.mark.long),
        pytest.param("checkpoint state.safetensors --store out --step 0", marks=pytest.mark.long),
    ],
)
def test_a_full_disk_behind_a_file(run: Run, saved: Model, tmp_path: Path, words: str) -> None:
    """Neither a partial file under the requested name nor a temporary file is left."""
    before = sorted(os.listdir(tmp_path))
    done = forkserver.run(["-c", SMALL + PROGRAM, *words.split()], timeout=60, cwd=tmp_path, imports=IMPORTS)
    assert done.returncode == 17, done.stderr
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
    left = sorted(set(os.listdir(tmp_path)) - set(before))
    assert left == (["out"] if words.startswith("checkpoint") else []), "a store that was begun is still one"
