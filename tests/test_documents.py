"""Test that links, paths, modules, names, thread names and make targets in documents exist, and the table of layers."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PLACES = (ROOT, ROOT / "scarctl", ROOT / "adapters")
"""Folders in which a path of a document may begin."""
ARCHITECTURE = "docs/ARCHITECTURE.md"
ABOUT_CODE = (ARCHITECTURE, "CONTRIBUTING.md")
"""Documents in which everything in backticks that looks like a name is a name of the code."""
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("[a-z]*.md"))
ALL = (*ABOUT_CODE, "README.md", *PAGES)
LINKING = (*ALL, "docs/FORMAT.md", "CHANGELOG.md")

PATH = re.compile(r"[\w.-]+(/[\w.-]+)+/?|[\w.-]+(/|\.md|\.py|\.txt)")
DOTTED = re.compile(r"(scarctl|scarctl_adapters|tests|examples)(\.\w+)+")
NAME = re.compile(r"\w+(\.\w+)*(\(\))?")
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
THREAD = re.compile(r"scarctl-\w+")
TARGET = re.compile(r"make (\w+)")
NO_MODULES = ("scarctl.toml", "scarctl.json", "scarctl.adapters")
"""Names that are a file of settings, a file of a store, or a group of entry points."""


def in_backticks(document: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the texts in backticks that match, outside of code blocks."""
    text = (ROOT / document).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return sorted({found for found in re.findall(r"`([^`\n]+)`", prose) if pattern.fullmatch(found)})


def is_there(path: str) -> bool:
    """Return whether a path is in the tree. A module's path may lack `.py`."""
    return any((place / path).exists() or (place / f"{path}.py").exists() for place in PLACES)


@cache
def words() -> frozenset[str]:
    """Return the words of all sources, and of the files that describe how to build them."""
    files = [ROOT / "pyproject.toml", ROOT / "Makefile"]
    files += [path for folder in ("scarctl", "adapters", "tests") for path in (ROOT / folder).rglob("*.py")]
    sources = (path.read_text(encoding="utf-8") for path in files if path.name != Path(__file__).name)
    return frozenset(word for source in sources for word in re.findall(r"[\w-]+|\w+", source))


def resolves(dotted: str) -> bool:
    """Return whether a dotted name is a module, or defined or imported by a module."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        for place in PLACES:
            path = place.joinpath(*parts[:length])
            module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if module.exists():
                return not parts[length:] or parts[length] in _defined(module)
    return False


def _defined(module: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # of `__all__`, which may be imported late
    return found


def anchors(path: Path) -> set[str]:
    """Return the anchors that a link may name after `#`: the headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", LINKING)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        there = path.parent / target if target else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


@pytest.mark.parametrize("document", LINKING)
def test_no_merge_has_left_its_marks(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert not re.findall(r"^(?:<{7}|>{7}) .*$", text, re.MULTILINE)


def test_the_site_has_every_page() -> None:
    """Pages are in the order of `nav`, each once. The README is the first page."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    pages = re.findall(r"(\S+\.md)$", nav, re.MULTILINE)
    tree = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages) == sorted(tree | {"index.md", "CONTRIBUTING.md", "CHANGELOG.md"})


@pytest.mark.parametrize("document", ALL)
def test_paths_are_in_the_tree(document: str) -> None:
    assert [path for path in in_backticks(document, PATH) if not is_there(path)] == []


@pytest.mark.parametrize("document", ALL)
def test_modules_are_in_the_tree(document: str) -> None:
    dotted = [name for name in in_backticks(document, DOTTED) if name not in NO_MODULES]
    assert [name for name in dotted if not resolves(name)] == []


@pytest.mark.parametrize("document", ABOUT_CODE)
def test_names_are_those_of_the_code(document: str) -> None:
    names = [*in_backticks(document, NAME), *in_backticks(document, THREAD)]
    assert [name for name in names if name.removesuffix("()").split(".")[-1] not in words()] == []


def test_tests_that_guarantees_name_are_there() -> None:
    text = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    missing = [
        f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text("utf-8")
    ]
    assert len(named) > 30
    assert not missing


@pytest.mark.parametrize("document", ABOUT_CODE)
def test_targets_are_those_of_the_makefile(document: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [TARGET.fullmatch(found)[1] for found in in_backticks(document, TARGET)]  # type: ignore[index]
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_the_ways_of_the_data_lead_through_modules() -> None:
    drawn = re.findall(r"^    .*$", (ROOT / ARCHITECTURE).read_text(encoding="utf-8"), re.MULTILINE)
    paths = [path for line in drawn for path in re.findall(r"\w+(?:/\w+)+", line)]
    assert len(paths) > 20
    assert [path for path in paths if not is_there(path)] == []


def test_the_table_of_packages_is_the_contract_of_layers() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (ROOT / ARCHITECTURE).read_text(), re.MULTILINE)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [[name.strip() for name in layer.split("|")] for layer in contracts[0]["layers"]]
    there = [(str(number), name) for number, layer in enumerate(layers, 1) for name in layer]
    assert sorted(rows) == sorted(there)
    assert [int(number) for number, _ in rows] == sorted(int(number) for number, _ in rows)
