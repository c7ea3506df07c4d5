"""Test actors and runs of Ray that are killed, each in a network of its own with only a loopback interface."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: `make frameworks`")
ROOT = Path(__file__).parents[2]
_APART = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.leaves_arena,
    pytest.mark.skipif(
        subprocess.run([*_APART, "true"], capture_output=True).returncode != 0,
        reason="this system makes no networks for this user (unshare -rn)",
    ),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with a short path: the paths of Ray's sockets are long."""
    made = Path(tempfile.mkdtemp(prefix="r-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def run(folder: Path, *words: str, cwd: Path = ROOT) -> str:
    env = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": str(folder),  # where Ray looks for a cluster, too
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")]),
        "SCARCTL_DAEMON": "1",
    }
    done = subprocess.run(
        [*_APART, sys.executable, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def found(output: str) -> Any:
    return json.loads(output.partition("FOUND ")[2])


def test_an_actor_that_is_killed_executes_each_call_once(folder: Path) -> None:
    """This includes calls that were being executed, which Ray sends again, and calls that waited."""
    told = found(run(folder, "-m", "tests.adapters.on_ray.actors", str(folder)))
    calls = len(told["answers"])
    assert sorted(told["answers"]) == [float(n) for n in range(1, calls + 1)]
    first, *others = told["looks"]
    assert first["values"] == [0.0]
    assert len({look["pid"] for look in told["looks"]}) == len(told["looks"])
    each = calls // len(others)
    for number, look in enumerate(others, 1):
        assert look["values"] == [float(number * each)]
        assert look["consistent"]
    tokens = [look["token"] for look in told["looks"]]
    assert tokens == sorted(set(tokens))
    assert "this actor has no name" in told["unnamed"]
    assert "'a/b' cannot be the name of a store" in told["badly"]
    assert {path.name for path in (folder / "actors").iterdir()} == {"table"}


def test_a_run_of_ray_train_whose_rank_is_killed_and_whose_node_is_taken(folder: Path) -> None:
    told = found(run(folder, "-m", "tests.adapters.on_ray.trains", str(folder)))
    for lines in told.values():
        begun, resumed, evacuated, ended = lines
        assert (begun["resumed"], begun["consistent"]) == (0, True)
        # It is killed at 8. A checkpoint is made every second step, and its extras are handed over before the
        # next one.
        assert resumed["resumed"] >= 5
        assert resumed["sum"] != begun["sum"], "the run has not begun anew"
        assert evacuated["lost"] == 0
        assert ended["end"] == evacuated["evacuated"] > resumed["resumed"]
    assert told["0"][1] == told["1"][1], "both ranks continue from one state"


def test_the_program_of_the_document(folder: Path) -> None:
    document = (ROOT / "docs" / "ray.md").read_text()
    actor, program = re.findall(r"^```python\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)[:2]
    assert len([line for line in actor.splitlines() if line.strip()]) <= 14
    (folder / "table.py").write_text(actor.replace("/shared/actors", str(folder / "actors")))
    (folder / "use.py").write_text(program)
    assert run(folder, "use.py", cwd=folder).splitlines()[-1] == "[1.0, 2.0, 3.0, 4.0]"
