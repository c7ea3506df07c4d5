"""Test `scarctl daemon start --metrics FILE --metrics-listen PORT` with a real daemon and a real run."""

from __future__ import annotations

import os
import socket
import urllib.request
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.daemon.test_metrics import open_samples, samples
from tests.daemon.trainer import Trainer, status
from tests.support.waiting import wait_until


def test_figures_of_a_run_in_a_file_and_over_http(
    run: Run, folder: Path, arena_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "scarctl.prom"
    started = run("daemon", "start", "--metrics", "scarctl.prom", "--metrics-listen", "0", "--json").document
    place = started["metrics"]
    assert (place["file"], place["ready"], place["fault"]) == (str(file), True, None)
    assert place["listen"].startswith("127.0.0.1:")
    assert samples(file.read_bytes())["scarctl_runs"] == [({}, 0.0)]
    assert run("daemon", "status", "--json").document["metrics"] == place
    store = tmp_path / 'a"b\\c\nd'
    trainer = Trainer(store, arena_dir)
    trainer.save_durably(3)

    def served() -> bool:
        with urllib.request.urlopen(f"http://{place['listen']}/metrics", timeout=30) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            found = samples(reply.read())
        if "scarctl_durable_step" not in found:
            return False  # figures from before the run
        ((labels, step),) = found["scarctl_durable_step"]
        assert labels["store"] == f'{tmp_path}/a"b\\c\\nd'
        return step == 3

    wait_until(served)
    request = urllib.request.Request(
        f"http://{place['listen']}/metrics", headers={"Accept": "application/openmetrics-text"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        assert reply.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert open_samples(reply.read())["scarctl_durable_step"][0][1] == 3
    assert run("daemon", "start", "--metrics", file).stdout.count(str(file)) == 1, "as it was started"
    trainer.close()
    run("daemon", "stop", "--all")
    assert not file.exists(), "figures that no daemon updates"


def test_a_fault_of_metrics_does_not_keep_the_daemon_from_saving(
    run: Run, folder: Path, arena_dir: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        failed = run(
            *("daemon", "start", "--metrics", tmp_path / "missing" / "x.prom", "--metrics-listen", port),
            "--json",
            code=17,
        ).error
    assert failed["kind"] == "no-metrics"
    trainer = Trainer(tmp_path / "store", arena_dir)
    trainer.save_durably(1)
    assert "metrics are not published" in run("daemon", "status").stdout
    trainer.close()


def test_a_session_gives_its_daemon_the_variables(
    run: Run, folder: Path, arena_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "scarctl.prom"
    monkeypatch.setenv("SCARCTL_METRICS", str(file))
    trainer = Trainer(tmp_path / "store", arena_dir)
    wait_until(file.exists)
    now = status(folder)
    assert now is not None
    assert (now["metrics"]["file"], now["metrics"]["listen"]) == (str(file), None)
    trainer.close()
    assert os.listdir(tmp_path)
