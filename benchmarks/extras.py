"""Print how many packages, and how many bytes on disk, each extra adds to a plain installation: from what is installed.

.venv/bin/python benchmarks/extras.py
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution

EXTRAS = ("accelerate", "lightning", "transformers", "examples", "paper", "png")


def needed(name: str, extras: frozenset[str], found: dict[str, int], without: str = "") -> dict[str, int]:
    """Add the sizes of a package and of all that it needs to `found`, in bytes by name."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return found  # of another system or Python
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key != "scarctl":
        if key in found and not extras:
            return found
        paths = [package.locate_file(file) for file in package.files or ()]
        found[key] = sum(path.stat().st_size for path in paths if path.is_file())  # type: ignore[attr-defined]
    for line in package.requires or ():
        match = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", line)
        assert match is not None, line
        of = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if match[1] != without and (of is None or of[1] in extras):
            needed(match[1], frozenset((match[2] or "").split(",")) - {""}, found, without)
    return found


def size(packages: dict[str, int], but: dict[str, int]) -> int:
    """Return the bytes of those packages that are not in `but`."""
    return sum(nbytes for name, nbytes in packages.items() if name not in but)


def main() -> None:
    light = needed("scarctl", frozenset(), {}, without="torch")
    plain = needed("scarctl", frozenset(), {})
    print("| | packages | MB |\n| --- | --- | --- |")
    print(f"| without torch | {len(light)} | {sum(light.values()) / 1e6:.0f} |")
    print(f"| torch and what it needs | {len(plain) - len(light)} | {size(plain, light) / 1e6:.0f} |")
    for extra in EXTRAS:
        more = needed("scarctl", frozenset({extra}), {})
        print(f"| extra `{extra}` | {len(more) - len(plain)} | {size(more, plain) / 1e6:.0f} |")


if __name__ == "__main__":
    main()
