"""Test when copies were saved, in clock time, and ages that are lower bounds."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import pytest
import torch

import scarctl
from scarctl.store import Store, open_writer
from scarctl.store.saved import describe, last_saved
from scarctl.store.term import now
from tests.cli.conftest import Model, Run
from tests.support.logs import records
from tests.support.ranks import current_layout


def _ago(seconds: float) -> str:
    moment = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=seconds)
    return moment.isoformat(timespec="seconds")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (61, "1 minute ago"),
        (7_300, "2 hours ago"),
    ],
)
def test_a_time_for_people(seconds: float, text: str) -> None:
    said = describe(_ago(seconds))
    assert said.startswith("saved 20")
    assert " UTC, " in said
    assert said.endswith(text)


@pytest.mark.parametrize("created", [None, "2026-11-22T21:20:11", "9999-99-99"])
def test_what_is_no_time(created: str | None) -> None:
    assert describe(created) == "time of the last save unknown"


def test_opening_a_store_is_no_save(run: Run, saved: Model) -> None:
    store = Store.open("ckpt")
    before = last_saved(store)
    assert before is not None
    layout = current_layout(store)
    while now() <= before:  # records have times to the second
        time.sleep(0.02)
    open_writer(store, layout=layout).close()
    (*_, newest) = store.log(0).records()
    assert not newest.commits
    assert last_saved(store) == before


def test_a_damaged_record_says_nothing(run: Run, saved: Model) -> None:
    for shard in Store.open("ckpt").shards():
        newest = records("ckpt", shard)[-1]
        newest.write_bytes(b"{}")
    assert last_saved(Store.open("ckpt")) is None


def test_a_store_that_was_copied_away_says_that_the_run_may_be_further(run: Run, saved: Model) -> None:
    done = run("inspect", "--store", "ckpt", "--json").document
    assert done["age_is_lower_bound"] is True
    assert done["saved_at"] <= now()
    assert 0 <= done["saved_seconds_ago"] < 600
    text = run("inspect", "--store", "ckpt").stdout
    assert "step 0 or later" in text
    assert f"saved {done['saved_at'][:10]}" in text
    assert "at least 0" in text


def test_what_resume_and_recover_say(tmp_path: Path, run: Run, saved: Model) -> None:
    done = run(
        "recover", "--store", "ckpt", "--lost", "all", "--output", tmp_path / "out.safetensors", "--json"
    ).document
    assert done["saved_at"] == last_saved(Store.open("ckpt"))
    said = run("recover", "--store", "ckpt", "--lost", "0", "--output", tmp_path / "two.safetensors").stdout
    assert "the store was saved 20" in said
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for expected in (False, True):
        with scarctl.attach(
            model, optimizer, store=tmp_path / "run", settings=scarctl.Settings(daemon=False)
        ) as session:
            assert (session.resume().saved_at is not None) is expected
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
