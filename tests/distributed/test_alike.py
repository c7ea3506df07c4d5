"""Test that settings which all ranks have to share are compared, and that others may differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scarctl.config import SessionSettings
from scarctl.distributed.alike import check_alike, settings_of
from scarctl.errors import UsageError


def of(folder: Path, **other: Any) -> dict[str, str]:
    return settings_of(SessionSettings(**{"store": str(folder / "secret-place"), **other}))


def test_what_differs_is_named_with_its_rank(tmp_path: Path) -> None:
    first = of(tmp_path, interval=5)
    check_alike([first, of(tmp_path, interval=5)])
    with pytest.raises(UsageError, match="rank 2 has another interval than rank 0: 7, not 5"):
        check_alike([first, first, of(tmp_path, interval=7)])
    with pytest.raises(UsageError, match="rank 1 has another peers than rank 0: 1, not 0"):
        check_alike([first, of(tmp_path, interval=5, peers=1)])


def test_the_address_of_a_store_is_not_shown(tmp_path: Path) -> None:
    """It may have a password."""
    with pytest.raises(UsageError) as caught:
        check_alike([of(tmp_path), of(tmp_path, store="s3://user:password@host/x")])
    assert caught.value.message == "rank 1 has another store than rank 0"


def test_what_belongs_to_a_host_may_differ(tmp_path: Path) -> None:
    hosts = [{"arena_dir": str(tmp_path / name), "peer_domain": name} for name in ("a", "b")]
    check_alike([of(tmp_path, **host) for host in hosts])
