"""Print what is wrong with documents and sources as texts: `python -m tests.documents`, a part of `make lint`."""

from __future__ import annotations

import gc
import sys

from tests.documents import mirror, names, prose, tree, troubleshooting

CHECKS = (prose, names, mirror, tree, troubleshooting)


def main() -> int:
    """Return 1 if anything is wrong."""
    gc.disable()  # trees of all sources stay until the end
    found = [reason for check in CHECKS for reason in check.findings()]
    print("\n".join(found) if found else "documents: all rules are kept")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
