"""Check the shape of the tree: the size of files, circles of imports, and who writes the arena's fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.documents.sources import ROOT, nodes

PACKAGE = ROOT / "scarctl"
MOST_LINES = 450
MOST_AT_THE_ROOT = 12
"""Most modules at the root of scarctl/, not counting packages."""
FIELD = re.compile(r"\b(?:arena|self)\.(?:durable|saved|wish)\[[^]]*\] [-+|&]?= ")


def files() -> dict[str, Path]:
    """Return the product's files by module."""
    roots = (PACKAGE, ROOT / "adapters" / "scarctl_adapters")
    found = {path.relative_to(root.parent): path for root in roots for path in root.rglob("*.py")}
    return {
        ".".join(name.with_suffix("").parts).removesuffix(".__init__"): path for name, path in found.items()
    }


def imports(path: Path, known: set[str]) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, also in a function, but not a package that only lists names."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in inner)


def circles() -> Iterator[str]:
    """Yield a circle of imports. Every module needs the packages above it; only their own imports count."""
    found = files()
    graph = {
        name: {other for other in imports(path, set(found)) if other in found} for name, path in found.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"a circle of imports: {' -> '.join(error.args[1])}"


def long_files() -> Iterator[str]:
    """Yield the files that have too many lines."""
    others = [
        path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    for path in [*files().values(), *(path for path in others if "golden" not in path.parts)]:
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > MOST_LINES:
            yield f"{path.relative_to(ROOT)}: {lines} lines, at most {MOST_LINES}"


def findings() -> Iterator[str]:
    """Yield everything that makes the tree hard to read."""
    yield from circles()
    yield from long_files()
    at_the_root = [path for path in PACKAGE.glob("*.py") if not path.name.startswith("__")]
    if len(at_the_root) > MOST_AT_THE_ROOT:
        yield f"scarctl: {len(at_the_root)} modules at the root, at most {MOST_AT_THE_ROOT}"
    writing = {name for name, path in files().items() if FIELD.search(path.read_text(encoding="utf-8"))}
    if "scarctl.arena.arena" not in writing:
        yield "tests/documents/tree.py: the pattern of an arena's fields finds nothing"
    for name in sorted(name for name in writing if not name.startswith("scarctl.arena.")):
        yield f"{name}: only scarctl.arena writes the arena's fields"
