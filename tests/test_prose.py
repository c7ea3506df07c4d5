"""Test that the prose keeps the rules that a program can check: docstrings, comments, messages and documents."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MOST_WORDS = 25
BANNED = {
    r"besides?": "alongside, next to, compared with",
    r"go(?:es|ing)? on|went on|gone on": "continue, start, run",
    r"tells?|telling|told": "estimate, report, log, raise, distinguish",
    r"(?:some|no|any|every)body|who(?:ever|soever)": "name the subject",
    r"(?:is|are) (?-i:none)": "say what is missing",
    r"of (?:now|then)": "say of which step or moment",
    r"lets? go of|has let go": "release",
    r"all the same": "anyway, still",
    r"what it is|what its": "name it",
    r"by (?:it|them)sel(?:f|ves)": "name what acts",
    r"any more(?! \w+ than)": "no longer",
    r"(?<!not )for good(?! \w)": "permanently",
    r"in between": "meanwhile, between what and what",
    r"belongs? into": "belong in",
    r"for want of": "without",
    r"for ever": "forever",
    r"left-overs?": "leftovers",
    r"(?:has|have|had) got": "has, has received",
    r"about to go|hosts? goes?|host that goes": "shut down, be lost",
    r"(?:is|are) there if": "present if",
    r"(?<!there )(?:is|are|was|were) no (?!longer|more|less|better|faster|worse|gain|help)\w+": "is not a",
}
ANY_BANNED = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
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


def banned(text: str) -> Iterator[str]:
    """Yield a reason for each banned expression in a text, also across lines."""
    text = " ".join(text.split())
    if not ANY_BANNED.search(text):
        return
    for pattern, instead in BANNED.items():
        if found := re.search(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            yield f"{found[0]!r}: {instead}"


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those of fields included."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, inspect.cleandoc(node.value.value)


def instructions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and docstring of every function that does something when it is called, unlike a property."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name == "__init__" or node.name.startswith("test_"):
            continue
        names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
        if (text := ast.get_docstring(node)) and not names & PROPERTIES:
            yield node.lineno, text


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every literal of several words: messages, hints and help."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def beginnings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and reason of every docstring of a module or a function that begins in a wrong way."""
    tree = ast.parse(source)
    title = ast.get_docstring(tree) or ""
    if source.strip() and (not title or NO_DEED.match(title)):
        yield 1, f"the module's first line does not say what the module does: {title.splitlines()[:1]}"
    for line, text in instructions(tree):
        if NO_VERB.match(text):
            yield line, f"does not begin with a verb: {text.splitlines()[0]}"


def expressions(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and reason of every banned expression in a module."""
    for line, text in sorted({*messages(ast.parse(source)), *comments(source)}):
        for reason in banned(text):
            yield line, reason


def long_sentences(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and reason of every sentence in a docstring that has too many words."""
    for line, text in docstrings(ast.parse(source)):
        for sentence in sentences(text):
            if words(sentence) > MOST_WORDS:
                yield line, f"{words(sentence)} words, at most {MOST_WORDS}: {sentence}"


@pytest.mark.parametrize("path", [*PRODUCT, *modules("benchmarks", "examples", "tests")])
def test_prose_keeps_the_rules(path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    found = [*beginnings(source)]
    found += [] if path.startswith("tests/") else expressions(source)
    found += long_sentences(source) if path in PRODUCT else ()
    assert not found, "\n".join(f"{path}:{line}: {reason}" for line, reason in found)


def running_text(document: str) -> str:
    """Return a document without blocks of code, tables, headings, emphasis and the targets of links."""
    text = re.sub(r"^```.*?^ *```$", "", document, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:    |\||#|<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\*{1,2}([^*\n]+?[.:?])\*{1,2}", r"\1", text)
    return re.sub(r"\n\s*(?:[-*]|\d+\.) ", "\n\n", text)


@pytest.mark.parametrize("path", DOCUMENTS)
def test_documents_keep_the_rules(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    without_code = re.sub(r"^```.*?^ *```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [
        f"{path}: {reason}: {line.strip()}" for line in without_code.splitlines() for reason in banned(line)
    ]
    if path not in LONG:
        long = (sentence for sentence in sentences(running_text(text)) if words(sentence) > MOST_WORDS)
        found += [f"{path}: {words(sentence)} words, at most {MOST_WORDS}: {sentence}" for sentence in long]
    assert not found, "\n".join(found)
