"""Test training with an S3 store, through the daemon and without it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scarctl
from scarctl.config import grouped
from scarctl.errors import UsageError
from scarctl.store import Store, verify
from tests.support.places import SECRET, Place

pytestmark = pytest.mark.slow


def model() -> dict[str, np.ndarray]:
    return {"users": np.zeros((50, 4)), "items": np.ones((20, 4))}


def train(state: dict[str, np.ndarray], place: Place, stop: int, **settings: Any) -> scarctl.Session:
    session = scarctl.attach(state, store=place.url, interval=2, **grouped(**settings))
    for _ in range(session.resume().step, stop):
        state["users"] += 0.5
        state["items"][3] += 1
        session.step()
    return session


def test_a_run_goes_on_where_it_ended(s3_place: Place, both_savers: str) -> None:
    state = model()
    train(state, s3_place, 7, shards=2, storage_options=s3_place.options).close()
    again = model()
    session = train(again, s3_place, 7, storage_options=s3_place.options)
    assert session.head_step == 7
    assert all((again[name] == state[name]).all() for name in state)
    session.close()
    store = Store.open(s3_place.url, storage_options=s3_place.options)
    assert verify(store, read_data=True).problems == []


def test_options_that_are_refused_are_not_repeated(
    s3_place: Place, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCARCTL_DAEMON", "1")
    options = {**s3_place.options, "s3_additional_kwargs": {"odd": object()}}
    unknown = {**s3_place.options, "sekret": SECRET}
    for given, said in ((options, "cannot be sent"), (unknown, "s3:// has no storage option 'sekret'")):
        with pytest.raises(UsageError, match=said) as caught:
            scarctl.attach(model(), store=s3_place.url, settings=scarctl.Settings(storage_options=given))
        assert SECRET not in str(caught.value)


def test_a_store_in_memory_is_saved_by_the_process_itself(usual_saver: None) -> None:
    state = model()
    place = Place(f"memory://{os.getpid()}/run", None)  # type: ignore[arg-type]
    train(state, place, 3).close()
    again = model()
    train(again, place, 3).close()
    assert (again["users"] == state["users"]).all()
