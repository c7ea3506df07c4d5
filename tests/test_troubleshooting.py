"""Test that the page on troubleshooting has every exit code, every class of error, and every kind that is raised."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from scarctl import errors
from scarctl.cli import output

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CLASSES = [
    item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, errors.ScarError)
]


def kinds() -> set[str]:
    """Return every kind that the sources give to an error."""
    found = {"signal", "unexpected", "no-torch"}
    for top in ("scarctl", "adapters"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in {c.__name__ for c in CLASSES}:
                    found |= {
                        k.value.value
                        for k in node.keywords
                        if k.arg == "kind" and isinstance(k.value, ast.Constant)
                    }
    return found


def rows(heading: str) -> list[str]:
    return PAGE.split(heading)[1].split("\n## ")[0].splitlines()


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_class_is_there_with_its_code_and_kind(error: type[errors.ScarError]) -> None:
    (row,) = [line for line in rows("## By exit code") if f"`{error.__name__}`, `{error.kind}`" in line]
    assert row.startswith(f"| {error.exit_code} |")


def test_every_exit_code_is_there() -> None:
    named = {int(code) for code in re.findall(r"^\| (\d+) ", PAGE, re.MULTILINE)}
    others = {output.EXIT_OK, output.EXIT_PARTLY, output.EXIT_RUN_FAILED}
    assert named == {error.exit_code for error in CLASSES} | others
    assert "| 128+N |" in PAGE


def test_every_kind_is_there_and_no_other() -> None:
    documented = {
        kind for line in rows("## By kind")[3:] for kind in re.findall(r"`([a-z-]+)`", line.split("|")[1])
    }
    assert kinds() - {error.kind for error in CLASSES} == documented


def quoted() -> list[str]:
    return [text for line in rows("## By message") for text in re.findall(r'^- \*"([^"]+)"\*', line)]


def test_the_messages_are_those_of_the_sources() -> None:
    assert len(quoted()) >= 6
    sources = " ".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        for path in (ROOT / "scarctl").rglob("*.py")
    )
    for message in quoted():
        parts = [part.strip() for part in message.replace("SCARCTL_", "").split("...") if part.strip()]
        assert all(part in sources for part in parts), message
