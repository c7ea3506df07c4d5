"""Test in a real process outputs that cannot be written: a full disk, a closed stream, a reader that has ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Model, Run, fresh
from tests.cli.test_wrong_inputs import IMPORTS
from tests.support import forkserver

PROGRAM = "from scarctl.cli.main import main; main()"
SMALL = "import resource, sys; sys.dont_write_bytecode = True; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000));"
"""Limit the size of files. Python ignores the signal: writing fails."""


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


def test_a_full_disk_behind_stdout(folder: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        for words in ("inspect --store ckpt", "verify --store ckpt --json", "help verify"):
            code, text = said(words.split(), full, folder)
            assert (code, "Traceback" in text) == (17, False), f"{words}: {text}"
            assert "the output cannot be written: No space left on device" in text, words
        code, text = said(["verify", "--store", "nowhere", "--json"], full, folder)
        assert (code, text.count("there is no store here"), len(text.splitlines())) == (10, 1, 1)
    finally:
        os.close(full)


@pytest.mark.parametrize(
    "words",
    [
        "export --store ckpt out.safetensors",
        "recover --store ckpt --lost all --output out.safetensors",
    ],
)
def test_a_full_disk_behind_a_file(run: Run, saved: Model, tmp_path: Path, words: str) -> None:
    """Neither a partial file under the requested name nor a temporary file is left."""
    before = sorted(os.listdir(tmp_path))
    done = forkserver.run(["-c", SMALL + PROGRAM, *words.split()], timeout=60, cwd=tmp_path, imports=IMPORTS)
    assert done.returncode == 17, done.stderr
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("words", "closed", "code", "phrase"),
    [
        ("status ckpt", ">&-", 0, ""),
        ("inspect --store ckpt", ">&-", 0, ""),
        ("verify --store ckpt --json", "<&- 2>&-", 0, '"intact": true'),
        ("prune --store ckpt", "<&- >&-", 2, "--yes"),
    ],
)
def test_a_closed_stream(folder: Path, words: str, closed: str, code: int, phrase: str) -> None:
    """Python itself begins without it."""
    command = ["sh", "-c", f'exec "$0" -c "$1" {words} {closed}', sys.executable, PROGRAM]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert (done.returncode, "unexpected" in said, phrase in said) == (code, False, True), said
