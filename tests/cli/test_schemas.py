"""Test that the published schemas match the documents, and are strict. `Done.document` checks all tests' documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from scarctl.cli.main import COMMANDS, GROUPS
from tests.cli.conftest import Model, Run, definitions, validator

PRINTED = {
    "checkpoint": "state.safetensors --store ckpt --step 3",
    "daemon": "status",
    "diff": "ckpt state.safetensors",
    "doctor": "--store place --rounds 1",
    "evacuate": "--deadline 5s --all",
    "export": "--store ckpt out",
    "inspect": "--store ckpt",
    "plan": "--bandwidth 2GB --mtbf 6h --state-bytes 1GB --step-time 1 --peers 1 --hosts 4",
    "prune": "--store ckpt --dry-run",
    "recover": "--store ckpt --lost 0 --output lost.safetensors",
    "report": "ckpt",
    "simulate": "tests.simulate.workloads:quadratic --trials 1 --jobs 1 --predictions",
    "snapshot create": "best state.safetensors --store ckpt --step 3",
    "snapshot delete": "first --store ckpt --dry-run",
    "snapshot list": "--store ckpt",
    "status": "ckpt",
    "verify": "--store ckpt",
    "version": "",
}
"""Commands that print a document of their first kind. Documents of live sessions are checked where there is one."""
OPTIONAL = ("error", "predictions")
"""`daemon status` has an error if no daemon runs; `simulate` has predictions if they are requested."""
CODES = {"daemon": 17, "diff": 4}


def test_every_command_has_a_schema() -> None:
    names = {*(name for name in COMMANDS if name not in GROUPS), "version"}
    names |= {f"{group} {name}" for group, found in GROUPS.items() for name in found}
    commands = {name for name in definitions() if name.islower() and name != "error"}
    assert commands == names - {"run"}, "what `run` prints is the command's"
    assert commands - set(PRINTED) == {"live checkpoint", "live recover", "rehearse"}
    Draft202012Validator.check_schema({"$ref": "#/$defs/error", "$defs": definitions()})


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a document, and all objects in it."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(inner)


@pytest.mark.usefixtures("arena_dir")
@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.long] * (name == "simulate")) for name in PRINTED]
)
def test_a_document_has_its_schema_and_no_other_field(run: Run, saved: Model, command: str) -> None:
    saved.train("emb")
    if command == "snapshot delete":
        run(*["snapshot", "create", "first", "state.safetensors", "--store", "ckpt", "--step", "3"])
    words = (*command.split(), *PRINTED[command].split(), "--json")
    document = run(*words, code=CODES.get(command, 0)).document
    assert validator(command).is_valid(document)
    for name in list(document):
        value = document.pop(name)
        assert validator(command).is_valid(document) == (name in OPTIONAL), name
        document[name] = value
    events = {id(event) for one in objects(document) for event in one.get("events", ())}
    open_ = [one.get(name) for one in objects(document) for name in ("seq", "tiers", "dtypes")]
    for one in objects(document):
        if id(one) not in events and not any(one is other for other in open_):
            one["more"] = object()
            assert not validator(command).is_valid(document), one
            del one["more"]


def test_an_error_has_its_schema(run: Run) -> None:
    document = run("verify", "--store", "no", "--json", code=10).document
    del document["error"]["hint"]
    assert not validator("error").is_valid(document)
