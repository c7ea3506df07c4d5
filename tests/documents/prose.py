"""Check the rules of prose that a program can check: how docstrings begin, and how long sentences are."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from tests.documents.sources import ROOT, nodes

MOST_WORDS = 25
NO_VERB = re.compile(
    r"""[`(\d]|(?:
    a|all|an|and|any|are|as|at|by|each|every|for|from|has|how|if|in|is|it|its|most|no|none|not|of|on|one|only|or|same|so|
    some|such|that|the|their|them|then|there|these|they|this|those|to|until|what|whatever|when|where|whether|which|who|
    whole|whose|why|with|without|
    bytes|distances?|extras|fields|first|history|ids|index|indices|last|names|norm|numbers?|path|rows|seconds|shape|
    squared|steps|text|time|values
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Beginnings that no instruction has; the docstring of a function is an instruction."""
NO_DEED = re.compile(
    r"[A-Z][a-z]+s? (?:of|by)\b|(?:The|An?|One|Whole|Settings|Commands|Options|Groups|Types)\b"
)
"""Beginnings of a module's docstring that name a thing, not what the module does with it."""
PROPERTIES = frozenset({"property", "cached_property", "kept"})
SHORTENED = re.compile(r"\b(?:al|e\.g|i\.e|vs|cf|Nr|resp)\.|\.\.\.")
CITATION = re.compile(r"\([^()]*\b(?:1[89]|20)\d\d\b[^()]*\)")
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix() for pattern in ("*.md", "docs/**/*.md") for path in ROOT.glob(pattern)
)
LONG = frozenset({"CHANGELOG.md", "docs/FORMAT.md", "docs/benchmarks.md", "docs/paper.md", "docs/theory.md"})
"""Documents whose sentences may be long: a specification, measurements, mathematics."""
CODE = re.compile(r"`[^`]*`|\"[^\"\n]*\"")


def modules(*folders: str) -> list[str]:
    """Return the Python files of these folders, relative to the root."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


PRODUCT = modules("scarctl", "adapters")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the running text of a docstring. Tables, trees and examples, which are indented by four, are left out."""
    for block in re.split(r"\n\s*\n", re.sub(r"\n {0,3}(?=[-*] )", "\n\n", text)):
        lines = block.split("\n")
        yield " ".join(
            line.strip() for line in lines if not line.startswith("    ") or re.match(r"\w+.*: ", lines[0])
        )


def sentences(text: str) -> Iterator[str]:
    """Yield sentences. A semicolon, and a colon before an explanation or a list, end one too."""
    plain = CODE.sub("code", SHORTENED.sub("", CITATION.sub("", text)))
    for paragraph in paragraphs(plain):
        yield from re.split(r"(?<=[.?!;:])\s+", paragraph)


def words(sentence: str) -> int:
    """Count the words of a sentence."""
    return len(re.findall(r"[^\W_][\w'.,/-]*", sentence))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those of fields included."""
    for node in nodes(path):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, inspect.cleandoc(node.value.value)


def instructions(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and docstring of every function that does something when it is called, unlike a property."""
    for node in nodes(path):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name == "__init__" or node.name.startswith("test_"):
            continue
        names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
        if (text := ast.get_docstring(node)) and not names & PROPERTIES:
            yield node.lineno, text


def beginnings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and reason of every docstring of a module or a function that begins in a wrong way."""
    module, *others = nodes(path)
    assert isinstance(module, ast.Module)
    title = ast.get_docstring(module) or ""
    if others and (not title or NO_DEED.match(title)):
        yield 1, f"the module's first line does not say what the module does: {title.splitlines()[:1]}"
    for line, text in instructions(path):
        if NO_VERB.match(text):
            yield line, f"does not begin with a verb: {text.splitlines()[0]}"


def long_sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and reason of every sentence in a docstring that has too many words."""
    for line, text in docstrings(path):
        for sentence in sentences(text):
            if words(sentence) > MOST_WORDS:
                yield line, f"{words(sentence)} words, at most {MOST_WORDS}: {sentence}"


def running_text(document: str) -> str:
    """Return a document without blocks of code, tables, headings, emphasis and the targets of links."""
    text = re.sub(r"^```.*?^ *```$", "", document, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:    |\||#|<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\*{1,2}([^*\n]+?[.:?])\*{1,2}", r"\1", text)
    return re.sub(r"\n\s*(?:[-*]|\d+\.) ", "\n\n", text)


def findings() -> Iterator[str]:
    """Yield every broken rule with its place."""
    for path in [*PRODUCT, *modules("benchmarks", "examples", "tests")]:
        found = [*beginnings(ROOT / path), *(long_sentences(ROOT / path) if path in PRODUCT else ())]
        yield from (f"{path}:{line}: {reason}" for line, reason in found)
    for path in sorted({*DOCUMENTS} - LONG):
        text = running_text((ROOT / path).read_text(encoding="utf-8"))
        for sentence in sentences(text):
            if words(sentence) > MOST_WORDS:
                yield f"{path}: {words(sentence)} words, at most {MOST_WORDS}: {sentence}"
