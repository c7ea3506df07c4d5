"""Write where the time of tests went: `pytest -p tests.support.durations`, as `make unit` does."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

MOST = 100
"""Slowest phases of tests that are listed."""
FILE = Path("build", "durations.txt")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the sums by folder, and the slowest phases."""
    reports = [
        report
        for found in terminalreporter.stats.values()
        for report in found
        if hasattr(report, "duration") and hasattr(report, "when")
    ]
    folders: dict[str, float] = defaultdict(float)
    for report in reports:
        folders["/".join(report.nodeid.partition("::")[0].split("/")[:2])] += report.duration
    reports.sort(key=lambda report: report.duration, reverse=True)
    lines = [f"{sum(folders.values()):.0f} s in all tests, by folder:"]
    lines += [
        f"{seconds:8.1f} s  {folder}" for folder, seconds in sorted(folders.items(), key=lambda x: -x[1])
    ]
    lines += ["", f"The {MOST} slowest phases:"]
    lines += [f"{report.duration:8.2f} s  {report.when:<8}  {report.nodeid}" for report in reports[:MOST]]
    path = terminalreporter.config.rootpath / FILE
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
