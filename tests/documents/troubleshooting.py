"""Check that the page on troubleshooting has every exit code, every class of error, and every kind that is raised."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from scarctl import errors
from scarctl.cli import output
from tests.documents.sources import ROOT, nodes

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CLASSES = [
    item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, errors.ScarError)
]


def kinds() -> set[str]:
    """Return every kind that the sources give to an error."""
    found, names = {"signal", "unexpected", "no-torch"}, {error.__name__ for error in CLASSES}
    for top in ("scarctl", "adapters"):
        for path in (ROOT / top).rglob("*.py"):
            for node in nodes(path):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                    found |= {
                        k.value.value
                        for k in node.keywords
                        if k.arg == "kind" and isinstance(k.value, ast.Constant)
                    }
    return found


def rows(heading: str) -> list[str]:
    """Return the lines below a heading."""
    return PAGE.split(heading)[1].split("\n## ")[0].splitlines()


def findings() -> Iterator[str]:
    """Yield what the page lacks, and what it has in excess."""
    page = "docs/troubleshooting.md"
    for error in CLASSES:
        found = [line for line in rows("## By exit code") if f"`{error.__name__}`, `{error.kind}`" in line]
        if len(found) != 1 or not found[0].startswith(f"| {error.exit_code} |"):
            yield f"{page}: {error.__name__}, {error.kind} is not in one row, that of exit code {error.exit_code}"
    named = {int(code) for code in re.findall(r"^\| (\d+) ", PAGE, re.MULTILINE)}
    others = {output.EXIT_OK, output.EXIT_PARTLY, output.EXIT_RUN_FAILED}
    for code in sorted(named ^ ({error.exit_code for error in CLASSES} | others)):
        yield f"{page}: exit code {code} is in the table or in the code, not in both"
    if "| 128+N |" not in PAGE:
        yield f"{page}: the exit codes of signals are missing"
    documented = {
        kind for line in rows("## By kind")[3:] for kind in re.findall(r"`([a-z-]+)`", line.split("|")[1])
    }
    for kind in sorted((kinds() - {error.kind for error in CLASSES}) ^ documented):
        yield f"{page}: the kind {kind} is on the page or in the sources, not in both"
    yield from messages_of_nothing(page)


def messages_of_nothing(page: str) -> Iterator[str]:
    """Yield the quoted messages that the sources do not have."""
    quoted = [text for line in rows("## By message") for text in re.findall(r'^- \*"([^"]+)"\*', line)]
    if len(quoted) < 6:
        yield f"{page}: too few messages are found"
    sources = " ".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        for path in (ROOT / "scarctl").rglob("*.py")
    )
    for message in quoted:
        parts = [part.strip() for part in message.replace("SCARCTL_", "").split("...") if part.strip()]
        if not all(part in sources for part in parts):
            yield f"{page}: no source has the message {message!r}"
