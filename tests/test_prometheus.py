"""Test a real Prometheus, if one is installed: it reads the daemon's figures, and its alerts fire when they should."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scarctl.arena.folder import host_folder
from scarctl.daemon import client
from tests.daemon.trainer import Trainer, status, stop
from tests.support.waiting import wait_until

DOCS = Path(__file__).parent.parent / "docs" / "monitoring"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
SERIES = {
    "ScarctlSavingStopped": {"scarctl_stopped": "0 0 0 1+0x60"},
    "ScarctlErrors": {"scarctl_errors_total": "0+2x60"},
    "ScarctlStoreBehind": {
        "scarctl_pending_bytes": "5+0x60",
        "scarctl_head_step": "2000+10x60",
        "scarctl_oldest_durable_step": "900+0x60",
    },
    "ScarctlDeadRunPending": {"scarctl_attached": "0+0x60", "scarctl_pending_bytes": "5+0x60"},
    "ScarctlNothingSaved": {
        "scarctl_saved_timestamp_seconds": "0+0x60",
        "scarctl_attached": "1+0x60",
        "scarctl_pending_bytes": "5+0x60",
    },
    "ScarctlFiguresOld": {'node_textfile_mtime_seconds{file="/x/scarctl.prom"}': "0+0x60"},
}
"""By alert, values per minute at which it fires. Those of a healthy run are in `HEALTHY`."""
HEALTHY = {
    "scarctl_stopped": "0+0x60",
    "scarctl_errors_total": "1+0x60",
    "scarctl_pending_bytes": "5+0x60",
    "scarctl_head_step": "2000+10x60",
    "scarctl_oldest_durable_step": "1500+10x60",
    "scarctl_attached": "1+0x60",
    "scarctl_saved_timestamp_seconds": "0+60x60",
    'node_textfile_mtime_seconds{file="/x/scarctl.prom"}': "0+60x60",
}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_the_rules_fire_when_they_should_and_else_do_not(tmp_path: Path) -> None:
    """With a healthy run no alert fires, even after 50 minutes."""
    shutil.copy(DOCS / "alerts.yml", tmp_path)
    (group,) = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    assert set(rules) == set(SERIES)
    tests: list[dict[str, Any]] = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                    "eval_time": "50m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if series is not HEALTHY else [],
                }
            ],
        }
        for alert, series in [*SERIES.items(), *((alert, HEALTHY) for alert in SERIES)]
    ]
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "tests": tests}))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "test.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def figures(tmp_path: Path, arena_dir: Path) -> Iterator[str]:
    """Yield the address of a daemon's figures, of a run with three steps in its store."""
    folder = host_folder(str(arena_dir))
    client.start(folder, {"SCARCTL_METRICS_LISTEN": "0"})
    trainer = Trainer(tmp_path / "store", arena_dir)
    trainer.save_durably(3)
    wait_until(lambda: (now := status(folder)) is not None and now["metrics"]["ready"])
    now = status(folder)
    assert now is not None
    yield str(now["metrics"]["listen"])
    trainer.close()
    stop(folder)


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
def test_prometheus_takes_the_figures(figures: str, tmp_path: Path) -> None:
    """It requests OpenMetrics, knows the kinds, loads the rules, and answers each expression of the dashboard."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DOCS / "alerts.yml")],
        "scrape_configs": [{"job_name": "scarctl", "static_configs": [{"targets": [figures]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [
        str(PROMETHEUS),
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
    ]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                return json.loads(reply.read())["data"]
        except OSError:
            assert process.poll() is None
            return {}

    try:
        wait_until(lambda: bool(ask("query", query="scarctl_durable_step").get("result")))
        (sample,) = ask("query", query="scarctl_durable_step")["result"]
        assert sample["value"][1] == "3"
        assert sample["metric"]["store"] == str(tmp_path / "store")
        kinds = {name: found[0]["type"] for name, found in ask("metadata").items()}
        assert kinds["scarctl_head_step"] == "gauge"
        assert kinds.get("scarctl_saved_bytes_total", kinds.get("scarctl_saved_bytes")) == "counter"
        (group,) = ask("rules")["groups"]
        wait_until(lambda: {rule["health"] for rule in ask("rules")["groups"][0]["rules"]} == {"ok"})
        assert len(group["rules"]) == len(SERIES)
        board = json.loads((DOCS / "grafana.json").read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$store", ".*").replace("$__rate_interval", "1m")
                assert "result" in ask("query", query=expression), expression
    finally:
        process.terminate()
        process.wait(30)
