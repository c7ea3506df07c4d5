"""Test that docs/adapters.md is true: its adapter, registered as described, passes the suite as described."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from scarctl.adapter import Adapter
from tests.support import forkserver

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")


def test_every_member_of_an_adapter_is_explained() -> None:
    explained = set(re.findall(r"`(\w+)(?:\([^`]*\))?`", DOCUMENT))
    members = {name for name in vars(Adapter) if not name.startswith("_")}
    assert members - explained == set()


def test_the_adapter_is_as_short_as_it_says() -> None:
    (limit,) = re.findall(r"^## An adapter in (\d+) lines", DOCUMENT, re.MULTILINE)
    (adapter,) = re.findall(r"^```python scarctl_tiny.py\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert len([line for line in adapter.splitlines() if line.strip()]) <= int(limit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "outcome"),
    [
        pytest.param("test", r"\d\d passed, 9 skipped", marks=[pytest.mark.long, pytest.mark.timeout(300)]),
        ("closed_run", "1 passed"),
    ],
    ids=["all", "some"],
)
def test_the_adapter_passes(tmp_path: Path, chosen: str, outcome: str) -> None:
    for name, text in re.findall(r"^```python (\w+\.py)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    (registered,) = re.findall(r"^```toml\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    # The entry point as pip installs it.
    installed = tmp_path / "scarctl_tiny-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: scarctl_tiny\nVersion: 1.0\n")
    lines = registered.replace('project.entry-points."scarctl.adapters"', "scarctl.adapters")
    (installed / "entry_points.txt").write_text(lines.replace('"', ""))
    paths = [str(tmp_path), *filter(None, sys.path)]
    done = forkserver.run(
        ["-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-k", chosen, "test_tiny.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(outcome, done.stdout), done.stdout
