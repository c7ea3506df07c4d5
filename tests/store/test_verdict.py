"""Keep the verdict of a rehearsal: next to a store, or waiting for one. Damaged and hostile ones are ignored."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from scarctl.errors import Corruption
from scarctl.store import Store
from scarctl.store.format import REHEARSAL, dump_json
from scarctl.store.verdict import (
    MAX_VERDICT,
    Verdict,
    bring_verdict,
    keep_waiting,
    read_verdict,
    short,
    waiting_path,
    write_verdict,
)

VERDICT = Verdict("identical", 40, "2026-11-22T10:00:00+00:00", "python train.py")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Store.create(tmp_path / "ckpt")


def test_the_newest_verdict_is_read(store: Store) -> None:
    assert read_verdict(store) is None
    write_verdict(store, VERDICT)
    assert read_verdict(store) == VERDICT
    assert str(VERDICT) == "rehearsed on 2026-11-22: identical after 40 steps"
    other = Verdict("different", 8, VERDICT.at, short("x" * 5000))
    write_verdict(store, other)
    assert read_verdict(store) == other
    assert str(other).startswith("rehearsed on 2026-11-22: different after 8 steps")


def test_a_verdict_waits_for_its_store(store: Store) -> None:
    digest = store.address.digest
    bring_verdict(store)
    assert read_verdict(store) is None
    keep_waiting(digest, VERDICT)
    bring_verdict(store)
    assert read_verdict(store) == VERDICT
    assert not waiting_path(digest).exists()


def test_one_that_cannot_be_brought_is_named_and_stays(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    path = waiting_path(store.address.digest)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{}")
    with caplog.at_level(logging.WARNING, "scarctl"):
        bring_verdict(store)
    assert str(path) in caplog.text
    assert path.exists()
    assert read_verdict(store) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "perfect"},
        {"steps": 0},
        {"steps": "40"},
        {"at": "soon\x1b[2J"},
        {"command": "x" * 1001},
        {"command": 7},
        {"kind": "host"},
        {"format": 99},
    ],
)
def test_a_hostile_one_is_refused(changes: dict[str, object], store: Store) -> None:
    fields = json.loads(VERDICT.data)
    del fields["checksum"]
    data = dump_json({**fields, **changes})
    with pytest.raises(Corruption):
        Verdict.parse(data, "it")
    store.blobs.replace(REHEARSAL, data)
    assert read_verdict(store) is None


def test_damaged_and_endless_ones_are_ignored(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for data in (VERDICT.data[:-1], VERDICT.data.replace(b"40", b"41"), b" " * (MAX_VERDICT + 1)):
        store.blobs.replace(REHEARSAL, data)
        with caplog.at_level(logging.INFO, "scarctl"):
            assert read_verdict(store) is None
        assert "the verdict of a rehearsal is ignored" in caplog.text
        caplog.clear()
