"""Make one site of docs and the documents in the root: `mkdocs` calls these functions while it builds."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
"""Documents in the root, and their names in the site."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)

TITLED = re.compile(r"^```(\w+) (\w+\.\w+)$", re.MULTILINE)
"""A block of code that is a file."""


def on_files(files: Files, config: Any) -> Files:
    """Add the documents in the root."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=relinked(text, "")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links that lead out of docs, and languages of blocks that only the tests read."""
    text = TITLED.sub(r'```\1 title="\2"', markdown.replace("```python no-run\n", "```python\n"))
    return (
        text
        if page.file.src_uri in PAGES.values()
        else relinked(text, posixpath.join("docs", page.file.src_uri))
    )


def relinked(text: str, source: str) -> str:
    """Return a document with links for the site. source: its path in the tree; "" for one in the root."""

    def link(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        path, mark, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if there not in PAGES and not there.startswith("docs/"):
            # Sources and tests are no part of the site.
            return label if label.startswith("`") else f"{label} (`{there}` in the sources)"
        inside = PAGES.get(there, there.removeprefix("docs/"))
        folder = posixpath.dirname(source.removeprefix("docs/")) or "."
        return f"{image}[{label}]({posixpath.relpath(inside, folder)}{mark}{anchor})"

    blocks = CODE.findall(text)
    prose = [LINK.sub(link, part) for part in CODE.split(text)]
    return "".join(part for pair in zip(prose, [*blocks, ""], strict=True) for part in pair)
