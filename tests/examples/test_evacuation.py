"""Test the recipes of docs/evacuation.md, each against a stand-in of its platform's signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import stepper
from tests.support.process import Forked
from tests.support.stored import stored_steps

pytestmark = [pytest.mark.usefixtures("warm_torch"), pytest.mark.leaves_arena]
ROOT = Path(__file__).parents[2]


STAND_INS = """
srun() { "$@"; }
python() { until [ -e "$GO" ]; do sleep 0.05; done; return 7; }
scarctl() { "$PYTHON" -m scarctl "$@" --json; }
"""


@pytest.mark.parametrize("options", [pytest.param("", marks=pytest.mark.long), "set -eu"])
@pytest.mark.usefixtures("daemon_folder")
def test_slurms_signal_to_the_batch_script(tmp_path: Path, options: str) -> None:
    """The recipe of the page runs in a real shell, which gets a real USR1. Then its training fails."""
    text = (ROOT / "docs" / "evacuation.md").read_text()
    recipe = text[text.index("#SBATCH --signal") :].partition("```")[0]
    assert "srun python train.py" in recipe
    store = tmp_path / "store"
    recipe = recipe.replace("50s --store ckpt", f"60s --store {store}" + " || true" * bool(options)).replace(
        "wait $training ||", "echo ready; wait $training ||"
    )
    go = tmp_path / "go"
    with Forked(lambda tell: stepper.trains(store, tell)) as child:
        child.expect("ready")
        shell = subprocess.Popen(
            ["bash", "-c", f"{options}\n{STAND_INS}{recipe}"],
            env={**os.environ, "GO": str(go), "PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert shell.stdout is not None
        assert shell.stdout.readline() == "ready\n"
        os.kill(shell.pid, signal.SIGUSR1)
        assert json.loads(shell.stdout.readline())["safe"]
        go.touch()
        assert shell.wait(60) == 7, "the job's exit code is that of its training"
        shell.stdout.close()
        child.signal(signal.SIGKILL)


@pytest.mark.parametrize(
    "container", [pytest.param(False, marks=pytest.mark.long), True], ids=["a process", "process 1"]
)
@pytest.mark.usefixtures("daemon_folder")
def test_kubernetes_sigterm_to_the_first_process_and_then_sigkill(tmp_path: Path, container: bool) -> None:
    """As process 1 of a container it gets only signals that it handles, and all others die with it, by SIGKILL."""
    program = (
        "import sys, time\nimport numpy as np\nimport scarctl\n"
        "state = {'rows': np.zeros((16, 4))}\nsession = scarctl.attach(state, store=sys.argv[1])\nsession.resume()\n"
        "for _ in range(7):\n    with session.iteration():\n        state['rows'] += 1\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "scarctl", "run", "--timeout", "5", "--", sys.executable, "-c", program]
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"] if container else []
    if container and subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make containers")
    outer = subprocess.Popen(
        [*inside, *command, str(tmp_path / "store")],
        cwd=ROOT,
        env={**os.environ, "SCARCTL_GRACE": "50s", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'adapters'}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert outer.stdout is not None
    try:
        assert outer.stdout.readline() == "ready\n"
        first = outer.pid
        if container:
            (first,) = map(int, Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split())
        os.kill(first, signal.SIGTERM)
        assert outer.wait(100) == 128 + signal.SIGTERM
        outer.stdout.close()
    finally:
        outer.kill()
        outer.wait()
    assert set(stored_steps(tmp_path / "store")) == {7}
