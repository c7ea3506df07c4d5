"""Read and write the layouts of a store: files named by the digest of their content."""

from __future__ import annotations

from scarctl.errors import Corruption, UsageError
from scarctl.state.layout import Layout
from scarctl.store.backends.base import Blobs
from scarctl.store.foreign import keep_copy
from scarctl.store.format import (
    FORMAT,
    MAX_LAYOUT,
    MAX_LAYOUT_VALUES,
    Fields,
    corrupt,
    digest_of_layout,
    dump_json,
    layout_path,
    load_json,
)
from scarctl.util.json_size import too_much


def layout_digests(blobs: Blobs) -> list[str]:
    """Return the digests of the layouts in a store."""
    return [digest for name, _ in blobs.files("layout") if (digest := digest_of_layout(name)) is not None]


def read_layout(blobs: Blobs, digest: str) -> Layout:
    """Return the layout of this digest. Raises Corruption if it is missing or damaged."""
    path = layout_path(digest)
    what = blobs.where(path)
    try:
        obj = load_json(blobs.read(path, MAX_LAYOUT), what, values=MAX_LAYOUT_VALUES)
    except FileNotFoundError:
        raise corrupt(what, "this layout is missing") from None
    f = Fields(obj, what)
    try:
        layout = Layout.from_json(f.raw("layout"))
    except Corruption as error:
        raise corrupt(what, error.message) from error
    if not f.text("kind") == "layout" or not f.text("digest") == digest == layout.digest:
        raise corrupt(what, "its content is another layout than its name")
    return layout


def write_layout(blobs: Blobs, layout: Layout) -> None:
    """Store a layout and a copy of the settings, unless the store has them.

    Raises UsageError if it is too large; Corruption if the existing file is damaged.
    """
    data = dump_json(
        {"format": FORMAT, "kind": "layout", "digest": layout.digest, "layout": layout.to_json()}
    )
    if len(data) > MAX_LAYOUT:
        raise UsageError(f"the layout has {len(data)} bytes of names and shapes, more than {MAX_LAYOUT}")
    if reason := too_much(data, values=MAX_LAYOUT_VALUES):
        raise UsageError(f"the layout cannot be stored: {reason}")
    blobs.prepare("layout")
    keep_copy(blobs)
    try:
        blobs.create_exclusive(layout_path(layout.digest), [data])
    except FileExistsError:
        read_layout(blobs, layout.digest)
