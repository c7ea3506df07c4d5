"""Test that the leak checks of conftest.py find leaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")

TESTS = """
import os, pathlib, subprocess, sys, threading, time

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
event = threading.Event()

def test_clean(arena_dir):
    threading.Thread(target=time.sleep, args=(0.1,)).start()
    subprocess.run([sys.executable, "-c", ""], check=True)
    file = arena_dir / "arena"
    file.touch()
    file.unlink()

def test_thread():
    threading.Thread(target=event.wait, name="straggler").start()

def test_after_the_thread():
    event.set()

def test_child():
    global child
    child = subprocess.Popen(SLEEP)

def test_after_the_child():
    assert child.wait(timeout=10) == -9

def test_detached():
    # The shell ends at once: what it started becomes nobody's child.
    subprocess.run(["sh", "-c", '"$@" >/dev/null 2>&1 &', "sh", *SLEEP], check=True)

def test_file(arena_dir):
    (arena_dir / "run").mkdir()
    (arena_dir / "run" / "arena").touch()
    assert os.environ["SCARCTL_ARENA_DIR"] == str(arena_dir)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc")
def test_leaks_fail_the_test_that_left_them(tmp_path: Path) -> None:
    source = CONFTEST.read_text()
    hasty = source.replace("GRACE_SECONDS = 5.0", "GRACE_SECONDS = 0.5")
    assert hasty != source
    tmp_path.joinpath("conftest.py").write_text(hasty)
    tmp_path.joinpath("pytest.ini").write_text("[pytest]\nmarkers = leaves_arena\n")
    tmp_path.joinpath("test_sample.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    errors = sorted(
        line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith("ERROR test_")
    )
    assert errors == [
        "ERROR test_sample.py::test_child",
        "ERROR test_sample.py::test_detached",
        "ERROR test_sample.py::test_file",
        "ERROR test_sample.py::test_thread",
    ], done.stdout
    assert "7 passed, 4 errors" in done.stdout
