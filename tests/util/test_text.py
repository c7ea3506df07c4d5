"""Test that control characters in paths and foreign texts reach neither a terminal nor a log."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from scarctl.errors import Contention, ScarError
from scarctl.store import Store
from scarctl.store.lock import StoreLock
from scarctl.util.text import aligned, human_bytes, printable, printable_lines

HOSTILE = "a\x1b[2J\x9b31m\x07\r\n\u202eb\udc80"


def test_what_is_not_printable_is_escaped() -> None:
    assert printable("größe 尺寸 [0:1]") == "größe 尺寸 [0:1]"
    assert printable(HOSTILE) == r"a\x1b[2J\x9b31m\x07\r\n\u202eb\udc80"
    assert printable_lines("a\nb\x1b\n") == "a\nb\\x1b\n"


def test_sizes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]


def test_every_error_is_a_printable_line() -> None:
    error = ScarError(HOSTILE, hint=HOSTILE)
    assert str(error).isprintable()
    assert f"{error!r}".isprintable()


def test_who_has_the_lock_is_not_believed_to_be_text(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"1\x1b[2J \x9b31m\xff")
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Contention) as caught:
            StoreLock(path)
    assert caught.value.message.isprintable()


def test_a_stores_path_is_shown_on_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "run\n\x1b[2J"
    store = Store.create(folder)
    assert store.url.isprintable()
    assert store.root == folder
    assert Store.open(folder).id == store.id


def test_columns_are_aligned() -> None:
    assert aligned([("a", "bb", "c"), ("aaa", "b", ""), ("aa", "longer than its column")], " ") == [
        " a    bb  c",
        " aaa  b",
        " aa   longer than its column",
    ]
