"""Test that collection is paused inside, and restored afterwards, also after an error or if a caller had paused it."""

from __future__ import annotations

import gc

import pytest

from scarctl.util.collection import without_collection


def fail_inside() -> None:
    with without_collection():
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError("inside")


def test_it_is_paused_and_continued() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert gc.isenabled()


def test_a_program_without_collection_keeps_it_so() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
