"""Test the recipes of docs/evacuation.md, each against a stand-in of its platform's signal."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_evacuate import trains
from tests.support.process import Forked
from tests.support.stored import stored_steps

pytestmark = [pytest.mark.usefixtures("warm_torch"), pytest.mark.leaves_arena]
ROOT = Path(__file__).parents[2]
EVACUATE = [sys.executable, "-m", "scarctl", "evacuate", "--deadline", "60s", "--json"]


class Metadata(http.server.BaseHTTPRequestHandler):
    """The pages of three metadata services; a page that gives notice exists once it was requested before."""

    looks: list[str]

    def _answer(self, text: str | None) -> None:
        data = (text or "").encode()
        self.send_response(404 if text is None else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer("token")

    def do_GET(self) -> None:
        notice = bool(self.looks)
        self.looks.append(self.path)
        if self.path == "/latest/meta-data/spot/instance-action":
            assert self.headers["X-aws-ec2-metadata-token"] == "token"
            self._answer('{"action": "terminate", "time": "2030-01-01T00:00:00Z"}' if notice else None)
        elif self.path == "/computeMetadata/v1/instance/preempted":
            assert self.headers["Metadata-Flavor"] == "Google"
            self._answer("TRUE" if notice else "FALSE")
        elif self.path.startswith("/metadata/scheduledevents"):
            assert self.headers["Metadata"] == "true"
            self._answer(json.dumps({"Events": [{"EventType": "Preempt"}] if notice else []}))
        else:
            self._answer(None)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    handler = type("Handler", (Metadata,), {"looks": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "cloud", ["aws", *(pytest.param(one, marks=pytest.mark.long) for one in ("gcp", "azure"))]
)
@pytest.mark.usefixtures("daemon_folder")
def test_a_clouds_notice(tmp_path: Path, metadata: str, cloud: str) -> None:
    with Forked(lambda tell: trains(tmp_path / "store", tell)) as child:
        child.expect("ready")
        notice = [sys.executable, str(ROOT / "examples" / "evacuation" / "notice.py"), cloud]
        done = subprocess.run(
            [*notice, "--metadata", metadata, "--every", "0.05", "--", *EVACUATE],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["safe"]
        child.signal(signal.SIGKILL)


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
    recipe = recipe.replace("--deadline 50s", "--deadline 60s" + " || true" * bool(options)).replace(
        "wait $training ||", "echo ready; wait $training ||"
    )
    go = tmp_path / "go"
    with Forked(lambda tell: trains(tmp_path / "store", tell)) as child:
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
        "import sys, time\nfrom tests.support import stepper\n"
        "model, optimizer = stepper.build()\nsession = stepper.attach(model, optimizer, sys.argv[1])\n"
        "for _ in range(7):\n    optimizer.step()\n"
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
