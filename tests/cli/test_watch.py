"""Test that `scarctl inspect --watch` follows a run as long as it is alive."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.cli.inspect_view import line
from scarctl.cli.watch import watch
from scarctl.ops.survey import survey
from scarctl.store import Store
from tests.cli.conftest import Done, Model, Run

pytestmark = pytest.mark.leaves_arena
SCARCTL = [sys.executable, "-m", "scarctl"]


@pytest.fixture
def arena(run: Run, saved: Model, arena_dir: Path) -> Iterator[Arena]:
    """Yield the arena of a run of this process, at step 40; two partitions copied at step 31 are pending."""
    store = Store.open("ckpt")
    layout = store.current_layout()
    assert layout is not None
    arena = Arena.create(arena_folder(str(arena_dir), store.run_id), layout, run_id=store.run_id, epoch=1)
    arena.begin_lines(store.lines())
    arena.reach(40)
    arena.version[:2] = 1 << 40 | 31
    yield arena
    arena.close()


def test_it_ends_with_the_run(run: Run, arena: Arena) -> None:
    after = threading.Timer(0.5, lambda: arena.take_over(_dead()))
    after.start()
    done = run("inspect", "--store", "ckpt", "--watch", "--every", "0.1", "--json")
    after.join()
    documents = [Done(0, text, "").document for text in done.stdout.splitlines()]
    assert len(documents) >= 3
    assert {document["schema_version"] for document in documents} == {1}
    assert all(document["run"]["alive"] for document in documents[:-1])
    assert not documents[-1]["run"]["alive"]
    assert documents[0]["run"]["lag_steps"] == 40
    assert documents[0]["partitions"] == []
    assert documents[0]["shards"] != []
    assert "the run has ended" in done.stderr


def test_a_line_says_what_matters(arena: Arena, arena_dir: Path) -> None:
    store = Store.open("ckpt")
    text = line(survey(store, str(arena_dir)))
    assert text.startswith("step 40, saved 20")
    assert (
        "; this host's memory has copies of some parts, up to step 31; the store has step 0, of one " in text
    )
    arena.version[:] = 1 << 40 | 31
    arena.durable[:] = 1 << 40 | 20
    text = line(survey(store, str(arena_dir)))
    assert "this host's memory has step 31, of one step, 9 iterations old; the store has step 0, of " in text
    assert re.search(r"the store has step 0, of one step, 40 iterations and [\d.]+ (s|min) old$", text)
    Store.create("empty")
    assert line(survey(Store.open("empty"), None)) == "nothing is saved yet"


def test_on_a_terminal_the_page_is_refreshed_in_place_and_ctrl_c_ends_it(arena: Arena) -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [*SCARCTL, "inspect", "--store", "ckpt", "--watch", "--every", "0.1"],
        stdout=terminal,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "60"},
    )
    os.close(terminal)
    shown = b""
    deadline = time.monotonic() + 30
    while shown.count(b"stalest") < 3 and time.monotonic() < deadline:
        if select.select([controller], [], [], 0.1)[0]:
            shown += os.read(controller, 65536)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    os.close(controller)
    assert process.returncode == 130, errors
    assert shown.count(b"stalest") >= 3
    assert b"\x1b[1A" in shown, "it does not go back up"
    assert b"Traceback" not in errors


def test_the_beat_does_not_drift(arena: Arena, arena_dir: Path) -> None:
    store, looks = Store.open("ckpt"), []

    def slow_look():  # type: ignore[no-untyped-def]
        looks.append(time.monotonic())
        time.sleep(0.05)
        if len(looks) == 5:
            arena.take_over(_dead())
        return survey(store, str(arena_dir))

    watch(slow_look, 0.1, on_screen=False, limit=0)
    assert len(looks) == 5
    assert looks[-1] - looks[0] >= 0.39


def _dead() -> int:
    """Return the id of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid
