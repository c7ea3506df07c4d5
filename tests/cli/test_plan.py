"""Test `scarctl plan`: what it reads, what it prints, and that it says when SCAR does not pay."""

from __future__ import annotations

import functools

import pytest

from scarctl.state.layout import Layout
from scarctl.store import Store, open_writer
from scarctl.store.record import Record
from scarctl.store.segment import Source
from scarctl.theory.job_cost import HOUR, Job, advise
from tests.cli.conftest import Model, Run
from tests.support.ranks import current_layout

LARGE = (
    "--state-bytes",
    "100GB",
    "--step-time",
    "1",
    "--bandwidth",
    "1GB/s",
    "--mtbf",
    "3h",
    "--shards",
    "16",
)
SLOW = (
    "--state-bytes",
    "10GB",
    "--step-time",
    "1s",
    "--bandwidth",
    "1GB",
    "--memory-bandwidth",
    "500MB",
    "--mtbf",
    "1h",
)
SMALL = ("--state-bytes", "1MB", "--step-time", "100ms", "--bandwidth", "1e9", "--mtbf", "1d")


def zeros(layout: Layout) -> Source:
    """Return a state of zeros, as a writer reads it."""
    return lambda g, t, start, stop: bytes(layout.groups[g].tensors[t].row_bytes * (stop - start))


def test_the_document_is_what_the_model_says(run: Run) -> None:
    document = run("plan", *LARGE, "--json").document
    assert document["copies"] is None
    assert document["command"] == "plan"
    job = Job(state_bytes=100e9, step_seconds=1.0, bandwidth=1e9, mtbf_seconds=3 * HOUR, shards=16)
    advice = advise(job)
    assert list(document["ways"]) == ["nothing", "full", "background", "scar"]
    for way in advice.ways:
        found = document["ways"][way.name]
        assert found["fraction"] == way.fraction
        assert found["seconds_per_hour"]["total"] == pytest.approx(way.cost.total)
        assert found["interval_seconds"] == (None if way.fraction is None else way.interval)
    assert document["pays"] is True
    # 100 GB at 80 % of 1 GB/s, an eighth of it at a time.
    assert document["store"]["turn_seconds"] == pytest.approx(125.0)
    assert document["store"]["bytes_per_day"] == pytest.approx(86_400 * 0.8e9, rel=1e-3)
    assert (document["store"]["requests_per_day"], document["store"]["whole"]) == (5529 * 13, False)
    assert document["rival"] == "background"
    assert document["saves"] == pytest.approx(advice.rival.cost.total - advice.scar.cost.total)
    assert document["history"] is None
    assert document["ways"]["nothing"]["interval"] is None
    assert isinstance(document["ways"]["scar"]["interval"], int)


def test_it_says_when_it_pays_and_when_not(run: Run) -> None:
    said = run("plan", *LARGE).stdout
    assert "SCAR pays: fraction=" in said
    assert "measure --gain" in said
    assert "of the time. Without an interval, a session measures" in said
    assert "overhead=0.01 allows" in said
    said = run("plan", *SLOW).stdout
    assert "SCAR does not pay here" in said
    assert "so partial recovery is impossible" in said
    assert run("plan", *SLOW, "--json").document["pays"] is False


def test_it_says_what_the_store_gets_in_a_day(run: Run) -> None:
    small = run("plan", *SMALL).stdout
    assert (
        "the store gets the whole state every 30 s: up to 2.7 GiB and about 92,160 requests per day." in small
    )
    slow = run("plan", *LARGE, "--bandwidth", "100MB/s").stdout
    assert "all of the state in about 20.8 min" in slow
    assert "More than 10 min for all of it: its copies get old." in slow


def test_its_table_fits_a_terminal(run: Run) -> None:
    table = run("plan", *LARGE).stdout.split("\n\n")[1].splitlines()
    assert len(table) == 6
    assert max(map(len, table)) <= 80


def test_it_says_when_it_makes_little_difference(run: Run) -> None:
    """A model of 1 MB loses seconds per hour: the plan says that the choice makes little difference."""
    said = run("plan", *SMALL, "--shards", 8).stdout
    assert "It makes little difference here" in said
    assert "pays" not in said
    assert "fraction=1/8" in said, "the default, where nothing is clearly better"
    document = run("plan", *SMALL, "--shards", 8, "--json").document
    assert document["pays"] is None
    assert abs(document["saves"]) < 3.6


def test_a_unit_that_was_forgotten(run: Run) -> None:
    """`--mtbf 6` means six seconds."""
    given = ("--state-bytes", "1.3MB", "--step-time", "0.1", "--bandwidth", "1GB", "--mtbf", "6")
    said = run("plan", *given).stdout
    assert "No way ever finishes" in said
    assert "--mtbf 6h" in said
    assert "inf" not in said
    assert "e+" not in said
    for way in run("plan", *given, "--json").document["ways"].values():
        assert way["seconds_per_hour"]["total"] is None


class TestFromAStore:
    def test_it_knows_state_and_shards(self, run: Run, saved: Model) -> None:
        layout = current_layout(Store.open("ckpt"))
        given = ("--from", "ckpt", "--bandwidth", "1MB", "--mtbf", "1h")
        document = run("plan", *given, "--step-time", "0.5", "--json").document
        assert document["job"]["state_bytes"] == layout.nbytes
        assert document["job"]["shards"] == 4
        assert document["history"] == {
            "partitions": layout.partitions,
            "step_seconds": None,
            "interval": None,
            "fraction": None,
        }
        said = run("plan", *given, "--step-time", "0.5").stdout
        assert f"{layout.partitions} partitions; the log does not show" in said
        other = run(
            "plan", *given, "--step-time", "0.5", "--shards", 8, "--state-bytes", "3kB", "--json"
        ).document
        assert (other["job"]["shards"], other["job"]["state_bytes"]) == (8, 3000)
        refused = run("plan", *given, "--json", code=2).error
        assert "give --step-time: ckpt does not contain it" in refused["message"]

    def test_it_knows_the_pace(self, run: Run, saved: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        store = Store.open("ckpt")
        layout = current_layout(store)
        with open_writer(store, layout=layout) as writer:
            for minute, step in enumerate((10, 20, 30)):
                # The records were written within a moment; make them look a minute apart.
                created = f"2030-01-01T00:{minute:02}:00+00:00"
                monkeypatch.setattr("scarctl.store.writer.Record", functools.partial(Record, created=created))
                writer.commit(writer.state.ids[:2], zeros(layout), step=step)
        document = run("plan", "--from", "ckpt", "--bandwidth", "1MB", "--mtbf", "1h", "--json").document
        assert document["job"]["step_seconds"] == pytest.approx(6.0)
        assert document["history"]["interval"] == 10
        assert 0 < document["history"]["fraction"] < 0.5
        said = run("plan", "--from", "ckpt", "--bandwidth", "1MB", "--mtbf", "1h").stdout
        assert "of the state is saved every 10 iterations" in said


def test_odds_that_copies_on_other_hosts_survive(run: Run) -> None:
    found = run("plan", *LARGE, "--peers", 1, "--hosts", 16, "--json").document["copies"]
    assert (found["hosts"], found["peers"], found["bytes_per_host"]) == (16, 1, 2 * 100e9 / 16)
    assert [(one["lost"], round(one["odds"], 4)) for one in found["survives"]] == [
        (1, 1.0),
        (2, 0.9333),
        (3, 0.8),
    ]
    text = run("plan", *LARGE, "--peers", 1, "--hosts", 16).stdout
    assert "1: 100 %, 2: 93.33 %" in text
    few = run("plan", *LARGE, "--peers", 5, "--hosts", 2, "--json").document["copies"]
    assert (few["peers"], [one["odds"] for one in few["survives"]]) == (1, [1.0, 0.0])
    assert "--hosts together" in run("plan", *LARGE, "--peers", 1, "--json", code=2).error["message"]
