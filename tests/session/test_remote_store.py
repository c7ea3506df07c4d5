"""Test stores that are not folders: refused options, and a store in memory."""

from __future__ import annotations

import os

import numpy as np
import pytest

import scarctl
from scarctl.errors import UsageError
from tests.support.places import SECRET, Place


@pytest.mark.slow
def test_options_that_are_refused_are_not_repeated(s3_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCARCTL_DAEMON", "1")
    odd = {**s3_place.options, "s3_additional_kwargs": {"odd": object()}}
    unknown = {**s3_place.options, "sekret": SECRET}
    for given, said in ((odd, "cannot be sent"), (unknown, "s3:// has no storage option 'sekret'")):
        settings = scarctl.Settings(storage_options=given)
        with pytest.raises(UsageError, match=said) as caught:
            scarctl.attach({"users": np.zeros(4)}, store=s3_place.url, settings=settings)
        assert SECRET not in str(caught.value)


def test_a_store_in_memory_is_saved_by_the_process_itself(usual_saver: None) -> None:
    for trained in (False, True):
        state = {"users": np.zeros((50, 4))}
        with scarctl.attach(state, store=f"memory://{os.getpid()}/run", interval=2) as session:
            assert session.resume().step == (3 if trained else 0)
            for _ in range(session.head_step, 3):
                state["users"] += 0.5
                session.step()
        assert (state["users"] == 1.5).all()
