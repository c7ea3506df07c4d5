"""Check that links, paths, modules, names, threads and make targets in documents exist, and the table of layers."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.documents.sources import ROOT, nodes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    """Return whether a path is in the tree, or made by a build. A module's path may lack `.py`."""
    if path.startswith("build/"):
        return True
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


@cache
def _defined(module: Path) -> set[str]:
    found = set()
    for node in nodes(module):
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


def broken_links(document: str) -> Iterator[str]:
    """Yield the links that lead nowhere."""
    path = ROOT / document
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        there = path.parent / target if target else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            yield f"{document}: the link {target}#{anchor} leads nowhere"


def merge_marks(document: str) -> Iterator[str]:
    """Yield the lines that a merge has left."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for line in re.findall(r"^(?:<{7}|>{7}) .*$", text, re.MULTILINE):
        yield f"{document}: {line}"


def pages_of_the_site() -> Iterator[str]:
    """Yield pages that are not in the order of `nav` once. The README is the first page."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    pages = re.findall(r"(\S+\.md)$", nav, re.MULTILINE)
    tree = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    wanted = tree | {"index.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    for page in sorted({*pages} ^ wanted | {page for page in pages if pages.count(page) > 1}):
        yield f"mkdocs.yml: {page} is not exactly once in nav and in the tree"


def names_of_nothing(document: str) -> Iterator[str]:
    """Yield paths, modules, names of the code and make targets in backticks that do not exist."""
    for path in in_backticks(document, PATH):
        if not (is_there(path) or path.startswith("build/")):  # what make writes
            yield f"{document}: `{path}` is not in the tree"
    for name in in_backticks(document, DOTTED):
        if name not in NO_MODULES and not resolves(name):
            yield f"{document}: `{name}` is no module, nor defined by one"
    if document not in ABOUT_CODE:
        return
    for name in [*in_backticks(document, NAME), *in_backticks(document, THREAD)]:
        if name.removesuffix("()").split(".")[-1] not in words():
            yield f"{document}: `{name}` is no name of the code"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for found in in_backticks(document, TARGET):
        if not re.search(rf"^{found.removeprefix('make ')}:", makefile, re.MULTILINE):
            yield f"{document}: `{found}` is no target of the Makefile"


def tests_of_guarantees() -> Iterator[str]:
    """Yield the tests that docs/guarantees.md names and that do not exist."""
    text = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    if len(named) <= 30:
        yield "docs/guarantees.md: too few tests are found"
    for path, name in named:
        if f"def {name}(" not in (ROOT / path).read_text("utf-8"):
            yield f"docs/guarantees.md: {path}::{name} does not exist"


def ways_of_the_data() -> Iterator[str]:
    """Yield the modules in the drawings of the architecture that do not exist."""
    drawn = re.findall(r"^    .*$", (ROOT / ARCHITECTURE).read_text(encoding="utf-8"), re.MULTILINE)
    paths = [path for line in drawn for path in re.findall(r"\w+(?:/\w+)+", line)]
    if len(paths) <= 20:
        yield f"{ARCHITECTURE}: too few modules are found in the drawings"
    yield from (f"{ARCHITECTURE}: {path} is not in the tree" for path in paths if not is_there(path))


def table_of_layers() -> Iterator[str]:
    """Yield the rows of the table of packages that are not the contract of layers, and the other way round."""
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (ROOT / ARCHITECTURE).read_text(), re.MULTILINE)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [[name.strip() for name in layer.split("|")] for layer in contracts[0]["layers"]]
    there = [(str(number), name) for number, layer in enumerate(layers, 1) for name in layer]
    for number, name in sorted({*rows} ^ {*there}):
        yield f"{ARCHITECTURE}: layer {number}, {name}: the table and the contract in pyproject.toml differ"
    numbers = [int(number) for number, _ in rows]
    if numbers != sorted(numbers):
        yield f"{ARCHITECTURE}: the layers are not in order"


def findings() -> Iterator[str]:
    """Yield what documents name and what does not exist."""
    for document in LINKING:
        yield from broken_links(document)
        yield from merge_marks(document)
    for document in ALL:
        yield from names_of_nothing(document)
    for check in (pages_of_the_site, tests_of_guarantees, ways_of_the_data, table_of_layers):
        yield from check()
