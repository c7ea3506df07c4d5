"""The published schemas take what the commands print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.cli.conftest import Model, Run

SCHEMAS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "schemas.json").read_text(encoding="utf-8")
)["$defs"]
COMMANDS = {
    "checkpoint": "state.safetensors --store ckpt --step 3",
    "diff": "ckpt state.safetensors",
    "doctor": "--store place --rounds 1",
    "export": "--store ckpt out",
    "inspect": "--store ckpt",
    "plan": "--bandwidth 2GB --mtbf 6h --state-bytes 1GB --step-time 1",
    "prune": "--store ckpt --dry-run",
    "recover": "--store ckpt --lost 0 --output lost.safetensors",
    "report": "--store ckpt --output report.html",
    "snapshot list": "--store ckpt",
    "status": "ckpt",
    "verify": "--store ckpt",
    "version": "",
}


def test_the_schemas_are_schemas() -> None:
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_document_has_its_schema(run: Run, saved: Model, command: str) -> None:
    document = run(*command.split(), *COMMANDS[command].split(), "--json").document
    schema = SCHEMAS[command]
    Draft202012Validator(schema).validate(document)
    del document["command"]
    assert not Draft202012Validator(schema).is_valid(document)


def test_an_error_has_its_schema(run: Run) -> None:
    Draft202012Validator(SCHEMAS["error"]).validate(
        run("verify", "--store", "no", "--json", code=10).document
    )
