"""Make JSON Schemas (2020-12) of the commands' documents: `scarctl help --schemas`.

They are strict: a field that is not described here is an error, and so is one that is missing.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from fractions import Fraction
from textwrap import dedent
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from scarctl.cli import document_studies as studies
from scarctl.cli import document_workbench as workbench
from scarctl.cli import documents
from scarctl.cli.document_parts import Event, RankCopies
from scarctl.cli.output import SCHEMA_VERSION
from scarctl.ops.checkpoint import Checkpoint
from scarctl.ops.evacuate import NOT_SHOWN
from scarctl.ops.export import Exported
from scarctl.ops.surveyed import RankLine, ShardLine
from scarctl.ops.verify_file import VerifiedCheckpoint
from scarctl.peers.probe import PeerDiagnosis
from scarctl.persist.evacuated import Evacuated
from scarctl.rehearse.rehearsal import Rehearsed
from scarctl.store.doctor import Diagnosis
from scarctl.util.document import Document, document_fields

DOCUMENTS: dict[str, tuple[type, ...]] = {
    "checkpoint": (Checkpoint,),
    "daemon": (documents.DaemonStarted, documents.DaemonShown, documents.DaemonStopped),
    "diff": (workbench.Diff,),
    "doctor": (Diagnosis, PeerDiagnosis),
    "evacuate": (documents.Evacuate, documents.EvacuatePlanned),
    "export": (Exported,),
    "inspect": (documents.InspectedStore, workbench.InspectedCheckpoint),
    "live checkpoint": (documents.LiveCheckpoint,),
    "live recover": (documents.LiveRecover,),
    "plan": (studies.Plan,),
    "prune": (documents.Prune, documents.PruneOfRanks),
    "recover": (documents.Recover, documents.RecoverOfRanks),
    "rehearse": (Rehearsed,),
    "report": (studies.Report,),
    "simulate": (studies.Simulate,),
    "snapshot create": (documents.SnapshotCreatedLive, Checkpoint),
    "snapshot delete": (documents.Prune, documents.PruneOfRanks),
    "snapshot list": (documents.SnapshotList,),
    "status": (documents.Status,),
    "verify": (documents.VerifiedStore, VerifiedCheckpoint),
    "version": (documents.Version,),
}
"""The kinds of documents that each command prints, by its options."""
_OPEN: dict[type, Any] = {Event: str | float | bool | None}
"""Types with more fields than they name, and the type of those fields."""
_WITH: dict[type, tuple[type, ...]] = {
    documents.EvacuatedProcess: (Evacuated,),
    RankCopies: (RankLine, ShardLine),
}
"""Types with all fields of some results, except those of `_WITHOUT`."""
_WITHOUT = NOT_SHOWN
_SIMPLE: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    Fraction: "number",
    str: "string",
    type(None): "null",
}
_UNIONS = (Union, types.UnionType)


def schemas() -> dict[str, Any]:
    """Return one schema with a definition for each command, for "error", and for the types that they share.

    It takes what any command prints.
    """
    found: dict[type, Any] = {}
    commands = {
        name: {"anyOf": [_document(kind, {"const": name}, found) for kind in kinds]}
        for name, kinds in DOCUMENTS.items()
    }
    commands["error"] = _document(documents.Error, {"type": ["string", "null"]}, found)
    shared = {kind.__name__: schema for kind, schema in found.items()}
    assert len(shared) == len(found), "two types have one name"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Documents of scarctl's commands, with --json",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in commands],
        "$defs": {**commands, **{name: shared[name] for name in sorted(shared)}},
    }


def _document(kind: type, command: dict[str, Any], found: dict[type, Any]) -> dict[str, Any]:
    made = _object(kind, found)
    head = {"schema_version": {"const": SCHEMA_VERSION}, "command": command}
    made["properties"] = {**head, **made["properties"]}
    made["required"] = [*head, *made["required"]]
    return made


def _is_object(hint: Any) -> bool:
    """Return whether a type is one of JSON objects: a TypedDict, or a result whose fields are those of the object."""
    return is_typeddict(hint) or getattr(hint, "to_json", None) is Document.to_json


def _object(kind: type, found: dict[type, Any]) -> dict[str, Any]:
    """Return the schema of a type of objects; those that it refers to are added to `found`."""
    properties = {
        name: _schema(hint, found) | ({"description": about} if about else {})
        for name, hint, about in _fields(kind)
    }
    required: frozenset[str] = getattr(kind, "__required_keys__", frozenset(properties))
    for result in _WITH.get(kind, ()):
        more = _object(result, found)["properties"]
        properties = {name: of for name, of in more.items() if name not in _WITHOUT} | properties
        required = frozenset(properties) if kind.__total__ else required  # type: ignore[attr-defined]
    return {
        "description": " ".join((kind.__doc__ or "").split()),
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name in required],
        "additionalProperties": _schema(_OPEN[kind], found) if kind in _OPEN else False,
    }


def _schema(hint: Any, found: dict[type, Any]) -> dict[str, Any]:
    """Return the schema of a type. Raises TypeError for one that JSON does not have."""
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if _is_object(hint):
        if hint not in found:
            found[hint] = {}  # a type may contain itself
            found[hint] = _object(hint, found)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (list, tuple):
        return {"type": "array", "items": _schema(arguments[0], found)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1], found)}
    if origin in _UNIONS:
        if all(one in _SIMPLE for one in arguments):
            return {"type": [_SIMPLE[one] for one in arguments]}
        return {"anyOf": [_schema(one, found) for one in arguments]}
    raise TypeError(f"{hint!r} has no schema")


def _fields(kind: type) -> Iterator[tuple[str, Any, str]]:
    """Yield the fields of a type of objects: the name, the type, and the text about it or ""."""
    about, hints = dict(_described(kind)), get_type_hints(kind)
    if not issubclass(kind, Document):
        # A TypedDict that inherits lists its base's fields first.
        yield from ((name, hint, about.get(name, "")) for name, hint in hints.items())
        return
    for field in document_fields(kind):
        if field.metadata.get("inline"):
            yield from _fields(hints[field.name])
        else:
            yield field.name, hints[field.name], about.get(field.name, "")
    for name in kind.COMPUTED:
        compute = getattr(kind, name).fget
        yield name, get_type_hints(compute)["return"], " ".join((compute.__doc__ or "").split())


def _described(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the fields of a type of objects and its bases, with the text below each."""
    module = ast.parse(dedent(inspect.getsource(kind)))
    (body,) = (node for node in module.body if isinstance(node, ast.ClassDef))
    names = vars(sys.modules[kind.__module__])
    for base in body.bases:
        if isinstance(base, ast.Name) and _is_object(names[base.id]):
            yield from _described(names[base.id])
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            yield field.target.id, " ".join(str(text.value.value).split())
