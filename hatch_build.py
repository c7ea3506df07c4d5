"""Give the packages a README whose links work where there is no tree of sources: on the page of a package index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Sets the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read README.md, and rewrite its links for `[project.urls] Source`, if there is one."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, source)}


def for_index(text: str, source: str | None) -> str:
    """Return the README with links to files made absolute; without an address of the sources, as plain text."""

    def link(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        if source is None:
            return "" if image else label
        return f"{image}[{label}]({source.rstrip('/')}/{'raw' if image else 'blob'}/main/{target})"

    return LINK.sub(link, text)
