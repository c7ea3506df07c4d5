"""Run commands in this process, and make states to run them on."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from safetensors.torch import save_file

from scarctl.arena.folder import host_folder
from scarctl.cli.main import cli
from scarctl.errors import ScarError
from scarctl.store import Store, verify
from tests.daemon.trainer import stop
from tests.support import daemons
from tests.support.ranks import RankStore

ERROR_KEYS = {"schema_version", "command", "error"}
ROLLBACK = ("recover", "--store", "ckpt", "--lost", "all", "--mode", "rollback")


@pytest.fixture(autouse=True)
def forked_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    daemons.fork(monkeypatch)


@pytest.fixture
def folder(arena_dir: Path) -> Iterator[Path]:
    """Yield the host's folder with a test's daemon. End that daemon, which would otherwise end only after a while."""
    folder = host_folder(str(arena_dir))
    yield folder
    with suppress(ScarError):
        stop(folder)


@cache
def definitions() -> dict[str, Any]:
    """Return the published schemas of all documents."""
    text = (Path(__file__).parents[2] / "docs" / "schemas.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)["$defs"]
    return found


@cache
def validator(name: str) -> Draft202012Validator:
    """Return the validator of one command's documents, or of "error"."""
    return Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": definitions()})


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """Return the one JSON document on stdout, after checking it against the command's schema."""
        document: dict[str, Any] = json.loads(self.stdout)
        validator(document["command"] if document.keys() - ERROR_KEYS else "error").validate(document)
        return document

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.document) == ERROR_KEYS
        error: dict[str, Any] = self.document["error"]
        assert set(error) == {"kind", "message", "hint", "exit_code"}
        assert error["exit_code"] == self.code
        assert error["message"]
        return error


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs `scarctl` with arguments, and checks that the exit code is `code`, by default 0."""
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: object, code: int = 0) -> Done:
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output
        return Done(result.exit_code, result.stdout, result.stderr)

    return invoke


def examples(run: Run, name: str) -> list[list[str]]:
    """Return the examples of a command's help, split into words."""
    lines = run(*name.split(), "--help").stdout.partition("Examples:\n")[2].splitlines()
    return [shlex.split(line)[1:] for line in lines if line.strip().startswith("scarctl ")]


@dataclass
class Model:
    """A state in the working folder: `emb`, eight layers, a scalar."""

    path: Path
    tensors: dict[str, torch.Tensor]

    def save(self, **changes: torch.Tensor) -> Path:
        self.tensors = {**self.tensors, **changes}
        if self.path.suffix == ".pt":
            torch.save(self.tensors, self.path)
        else:
            save_file(self.tensors, self.path)
        return self.path

    def train(self, *names: str, by: float = 1.0) -> Path:
        """Change the named tensors, or all."""
        return self.save(**{name: self.tensors[name] + by for name in names or self.tensors})


def fresh(path: Path) -> Model:
    """Return a model with the same values every time, in a file."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.w": torch.randn(16, 8, generator=generator) for i in range(8)}
    tensors["emb"] = torch.randn(40, 8, generator=generator)
    tensors["scalar"] = torch.tensor(2.5)
    model = Model(path, tensors)
    model.save()
    return model


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return fresh(tmp_path / "state.safetensors")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with the model at step 0, made once: syncing to disk takes most of the time."""
    folder = tmp_path_factory.mktemp("template")
    arguments = [
        "checkpoint",
        fresh(folder / "state.safetensors").path,
        "--store",
        folder / "ckpt",
        "--step",
        0,
    ]
    arguments += ["--shards", 4, "--partition-bytes", 256]
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return folder / "ckpt"


@pytest.fixture
def saved(run: Run, model: Model, template: Path, tmp_path: Path) -> Model:
    """Return the model with a store "ckpt" of four shards, partitions of 256 bytes, saved at step 0."""
    shutil.copytree(template, tmp_path / "ckpt")
    return model


def assert_sound(store: str | Path = "ckpt") -> Store:
    """Check that the store is readable and complete."""
    opened = Store.open(store)
    assert verify(opened, read_data=True).problems == []
    return opened


@pytest.fixture
def ranks(tmp_path: Path) -> RankStore:
    """Return a store of four ranks, sealed at steps 3 and 5; three of them have saved parts at step 7."""
    made = RankStore(tmp_path / "ckpt", 4)
    made.save(3)
    made.save(5)
    made.save(7, [0, 1, 3], every=2)
    return made.close()
