"""Parse each source once for all checks."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, the module first."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
