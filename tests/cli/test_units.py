"""Test that sizes, shares and times are accepted in every usual spelling, everywhere, and printed in the same unit."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.cli.units import Size, Time
from scarctl.config import SessionSettings, parse_bytes
from scarctl.errors import UsageError
from scarctl.simulate.study import parse_share
from scarctl.store import Store
from tests.cli.conftest import Model, Run


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("4KB", 4000),
        ("4kb", 4000),
        ("4K", 4000),
        ("4KiB", 4096),
        (" 1.5 GB ", 1.5e9),
        ("1e3", 1000),
    ],
)
def test_sizes(text: str, value: float) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "B", "4XB", "4iB", "-1", "nan", "inf", "1e999", "4 K B", "٣", "4KB/s"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError):
        parse_bytes(text)


def test_plan_answers_in_the_units_that_were_given(run: Run) -> None:
    options = {"state-bytes": "120GiB", "step-time": "800ms", "bandwidth": "2000 mb/s", "mtbf": "36h"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    first = run("plan", *words).stdout.splitlines()[0]
    assert first == (
        "120 GiB in 1 shard, an iteration takes 800 ms, the store takes 2000 MB/s, a failure every 36 h"
    )
    assert run("plan", *words, "--json").document["job"]["state_bytes"] == 120 * 1024**3


def test_what_was_given_is_shown_as_it_was() -> None:
    sizes = {"1.5gb": "1.5 GB", "2kib": "2 KiB", "3K": "3 kB", "4096": ""}
    assert {text: Size().convert(text, None, None).text for text in sizes} == sizes
    times = {"90S": "90 s", "30m": "30 min", "0.5": ""}
    assert {text: Time().convert(text, None, None).text for text in times} == times


def test_sizes_and_shares_of_a_store(run: Run, model: Model) -> None:
    run("checkpoint", model.path, "--store", "ckpt", "--step", 0, "--partition-bytes", "1KiB")
    assert Store.open("ckpt").settings.partition_bytes == 1024
    model.train()
    half = run(
        "checkpoint", model.path, "--store", "ckpt", "--step", 1, "--fraction", "50%", "--json"
    ).document
    assert 0 < half["saved_bytes"] <= half["total_bytes"] / 2
    assert run("export", "out", "--store", "ckpt", "--max-shard-size", "2KiB", "--json").document["files"][1:]


def test_settings_of_a_session(tmp_path: Path) -> None:
    (tmp_path / "scarctl.toml").write_text('store = "x"\npartition_bytes = "4KiB"\nfraction = "12.5%"\n')
    environment = {"SCARCTL_MAX_BANDWIDTH": "1.5MB", "SCARCTL_INTERVAL": "auto"}
    settings = SessionSettings.resolve({}, environ=environment, folder=tmp_path)
    assert (settings.partition_bytes, settings.fraction, settings.max_bandwidth) == (4096, 0.125, 1.5e6)


def test_shares_of_a_study() -> None:
    assert [float(parse_share(text)) for text in ("12.5%", "1/8", "0.125", "100 %")] == [
        0.125,
        0.125,
        0.125,
        1,
    ]
