"""Test a package index's view, and an installation without torch. `make package` checks sdist and wheel with twine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scarctl.state.layout import TensorSpec, build_layout
from scarctl.store import Store, open_writer

ROOT = Path(__file__).parents[1]
LIGHT = (
    "click",
    "fsspec",
    "numpy",
    "rich",
    "s3fs",
    "safetensors",
    "xxhash",
    "tomli; python_version < '3.11'",
)
"""All dependencies except torch."""


def build(kind: str, folder: Path) -> Path:
    command = [
        sys.executable,
        "-I",
        "-m",
        "build",
        f"--{kind}",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def metadata(wheel: Path) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_description_is_the_readme_without_links_into_the_tree(wheel: Path) -> None:
    found = metadata(wheel)
    assert found["Description-Content-Type"] == "text/markdown"
    text = found.get_payload()
    assert "# scarctl" in text
    assert "```diff" in text
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    assert [target for target in targets if "://" not in target] == []
    assert "When a run dies" in text, "labels stay"


def test_classifiers_name_the_pythons_and_the_dependencies_those_that_are_light(wheel: Path) -> None:
    found = metadata(wheel)
    assert "Programming Language :: Python :: 3.10" in found.get_all("Classifier")
    assert found["Requires-Python"] == ">=3.10"
    needed = {
        re.match(r"[\w.-]+", line)[0] for line in found.get_all("Requires-Dist") if "extra ==" not in line
    }  # type: ignore[index]
    assert needed == {re.match(r"[\w.-]+", name)[0] for name in LIGHT} | {"torch"}  # type: ignore[index]


def test_the_extra_for_the_site_is_pinned() -> None:
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints-docs.txt").read_text(), re.MULTILINE))
    assert {
        "mkdocs-material",
        "mkdocstrings",
        "mkdocstrings-python",
        "mkdocs",
        "twine",
        "build",
        "hatchling",
    } <= pinned


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "sdist").mkdir()
    with tarfile.open(build("sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "sources", filter="data")
    (sources,) = (tmp_path / "sources").iterdir()
    (tmp_path / "wheel").mkdir()
    command = [
        sys.executable,
        "-I",
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "wheel"),
        ".",
    ]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (again,) = (tmp_path / "wheel").iterdir()
    with zipfile.ZipFile(again) as new, zipfile.ZipFile(wheel) as old:
        assert {i.filename: i.CRC for i in new.infolist()} == {i.filename: i.CRC for i in old.infolist()}


def small_store(folder: Path) -> None:
    layout = build_layout([("a", "parameter", (TensorSpec("", "F32", (4, 2)),))])
    store = Store.create(folder)
    with open_writer(store, layout=layout) as writer:
        writer.commit(writer.state.ids, lambda g, t, a, b: bytes(8 * (b - a)), step=1)
    store.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_commands_work_where_torch_is_not_installed(wheel: Path, tmp_path: Path) -> None:
    """In a real environment without torch commands on stores work, and the others say what is missing."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, timeout=200)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True, timeout=200)
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *LIGHT], check=True, timeout=500)
    small_store(tmp_path / "store")
    save_file({"a": np.ones((4, 2), np.float32)}, tmp_path / "state.safetensors")

    def run(*command: str, code: int = 0) -> dict[str, Any]:
        done = subprocess.run(
            [str(home / "bin" / "scarctl"), *command, "--json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )
        assert done.returncode == code, done.stdout + done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    python = str(home / "bin" / "python")
    assert subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 1
    subprocess.run([python, "-W", "error", "-c", "import scarctl; scarctl.Settings"], check=True)
    assert run("inspect", "--store", "store")["step"] == 1
    assert run("verify", "--store", "store")["problems"] == []
    run("plan", "--bandwidth", "1e9", "--mtbf", "86400", "--state-bytes", "1e9", "--step-time", "1")
    run("plan", "--from", "store", "--bandwidth", "1e9", "--mtbf", "86400", "--step-time", "1")
    run("doctor", "--store", "store", "--rounds", "1")
    run("snapshot", "list", "--store", "store")
    assert run("status", "store")["well"]
    assert run("report", "store")["now"]["step"] == 1
    assert (tmp_path / "scarctl-report.html").stat().st_size > 1000
    assert run("inspect", "state.safetensors")["count"] == 1
    assert run("verify", "state.safetensors")["intact"]
    assert run("diff", "store", "state.safetensors", code=4)["different"] == 1
    assert run("evacuate", "--deadline", "5s", "--all")["safe"]
    run("prune", "--store", "store", "--dry-run")
    run("recover", "--store", "store", "--lost", "all", "--output", "lost.safetensors")
    assert not load_file(tmp_path / "lost.safetensors")["a"].any()
    run("export", "--store", "store", "out")
    run("daemon", "start")
    run("daemon", "stop", "--all")
    for needs in (
        ("checkpoint", "state.safetensors", "--store", "store", "--step", "2"),
        ("export", "--store", "store", "out.pt", "--format", "pt"),
    ):
        assert run(*needs, code=1)["error"]["kind"] == "no-torch"
