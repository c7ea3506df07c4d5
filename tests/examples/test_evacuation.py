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


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
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


@pytest.mark.usefixtures("daemon_folder")
def test_slurms_signal_to_the_batch_script(tmp_path: Path) -> None:
    """The trap of the recipe runs in a real shell, which gets a real USR1 and waits for its training."""
    with Forked(lambda tell: trains(tmp_path / "store", tell)) as child:
        child.expect("ready")
        leave = " ".join(EVACUATE)
        job = "sleep 600 >&2 & training=$!\necho ready\nwait; wait"
        script = f"trap '{leave}; kill $training' USR1\n{job}"
        shell = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True)
        assert shell.stdout is not None
        assert shell.stdout.readline() == "ready\n"
        os.kill(shell.pid, signal.SIGUSR1)
        assert json.loads(shell.stdout.readline())["safe"]
        shell.stdout.close()
        shell.wait(60)
        child.signal(signal.SIGKILL)


@pytest.mark.usefixtures("daemon_folder")
def test_kubernetes_sigterm_to_the_first_process_and_then_sigkill(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom tests.support import stepper\n"
        "model, optimizer = stepper.build()\nsession = stepper.attach(model, optimizer, sys.argv[1])\n"
        "for _ in range(7):\n    optimizer.step()\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "scarctl", "run", "--timeout", "5", "--", sys.executable, "-c", program]
    first = subprocess.Popen(
        [*command, str(tmp_path / "store")],
        cwd=ROOT,
        env={**os.environ, "SCARCTL_GRACE": "50s", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    first.send_signal(signal.SIGTERM)
    assert first.wait(100) == 128 + signal.SIGTERM
    first.stdout.close()
    assert set(stored_steps(tmp_path / "store")) == {7}
