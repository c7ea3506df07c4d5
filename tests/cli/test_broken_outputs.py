"""Test in a real process outputs that cannot be written: a full disk, and a reader such as `head` that has ended."""

from __future__ import annotations

import os
import shutil
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
