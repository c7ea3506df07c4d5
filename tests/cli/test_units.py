"""Test that sizes, shares and times are accepted in every usual spelling, everywhere, and printed in the same unit."""

from __future__ import annotations

from scarctl.cli.units import Size, Time
from tests.cli.conftest import Run


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
