"""Test which values and texts settings accept, and that refusals do not repeat a secret."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from scarctl.config import SessionSettings, checks
from scarctl.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"), [("0.125", 0.125), ("1/8", 0.125), ("12.5%", 0.125), (" 100 % ", 1.0), ("1e-3", 0.001)]
)
def test_shares_that_are_read(text: str, value: float) -> None:
    assert checks.parse_fraction(text) == value
    assert checks.parse_overhead(text) == value


@pytest.mark.parametrize(
    "text", ["", "0", "-1/8", "1.5", "101%", "1/0", "1/8/2", "nan", "inf", "0%", "%", "a"]
)
def test_texts_that_are_no_shares(text: str) -> None:
    for parse in (checks.parse_fraction, checks.parse_overhead):
        with pytest.raises(UsageError, match="not a number above 0 and up to 1"):
            parse(text)


@pytest.mark.parametrize("value", [0, 0.0, -0.5, 1.01, math.nan, True, "1/8", None])
def test_values_that_are_no_shares(value: object) -> None:
    for check in (checks.check_fraction, checks.check_overhead):
        with pytest.raises(UsageError):
            check(value)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(25, 25.0), (0, 0.0), ("26", 26.0), ("25s", 25.0), ("2m", 120.0), (" 1.5h ", 5400.0), ("1d", 86400.0)],
)
def test_durations_that_are_read(given: object, seconds: float) -> None:
    assert checks.seconds_of("grace", given) == seconds


@pytest.mark.parametrize(
    "given", [-1, math.nan, math.inf, True, None, "", "s", "1w", "-2m", "NaN", "infs", [1]]
)
def test_what_is_no_duration(given: object) -> None:
    with pytest.raises(UsageError, match="grace is "):
        checks.seconds_of("grace", given)


def test_a_host_shuts_down_within_a_day() -> None:
    assert checks.notice_of("grace", "1d") == checks.LONGEST_NOTICE
    for given in (86401, "25h", "99999d"):
        with pytest.raises(UsageError, match="more than a day"):
            checks.notice_of("grace", given)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("4KB", 4000),
        ("4KiB", 4096),
        ("4kib", 4096),
        ("1.5GB", 1.5e9),
        ("2 TiB", 2 << 40),
        ("1e3", 1e3),
    ],
)
def test_sizes_that_are_read(text: str, count: float) -> None:
    assert checks.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "B", "-1", "1XB", "1KK", "nan", "1e999", "\u0661", "1 000"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="not a number of bytes"):
        checks.parse_bytes(text)


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (checks.check_store, ["s3://key:planted@bucket/run"]),
        (checks.check_storage_options, {1: "planted"}),
        (checks.check_storage_options, "planted"),
        (lambda value: checks.check_peer_files(None, value), b"planted"),
        (lambda value: checks.check_peer_files(value, None), ["planted", "planted"]),
    ],
)
def test_a_refusal_repeats_no_value_that_may_be_secret(
    check: Callable[[object], None], value: object
) -> None:
    with pytest.raises(UsageError) as caught:
        check(value)
    assert "planted" not in f"{caught.value} {caught.value.hint}"


def test_peer_files_are_three_paths_and_one() -> None:
    checks.check_peer_files(None, None)
    checks.check_peer_files(("a", "b", "c"), "secret")
    for tls in ("abc", ("a", "b"), ("a", "b", ""), ("a", "b", 3), 5):
        with pytest.raises(UsageError, match="three paths"):
            checks.check_peer_files(tls, None)
    assert checks.parse_paths("a.pem, b.pem ,c.pem") == ("a.pem", "b.pem", "c.pem")


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1"])
def test_whole_numbers(value: object) -> None:
    with pytest.raises(UsageError, match="partitions is "):
        checks.at_least("partitions", value, 1)
    checks.at_least("partitions", None, 1)
    checks.at_least("partitions", 1, 1)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "1"])
def test_rates(value: object) -> None:
    with pytest.raises(UsageError, match="rate is "):
        checks.check_rate("rate", value)
    checks.check_rate("rate", None)
    checks.check_rate("rate", 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_loss", "0s"),
        ("max_loss", -1),
        ("max_lag", "0s"),
        ("overhead", -0.01),
        ("overhead", 0),
        ("fraction", -0.125),
        ("max_bandwidth", -5.0),
        ("interval", -3),
    ],
)
def test_a_budget_that_allows_nothing_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        SessionSettings.resolve({"store": "s", name: value}, environ={})


@pytest.mark.parametrize(
    ("name", "valid"),
    [("interval", '"auto"'), ("daemon", "true or false"), ("peers", "whole number"), ("timeout", "seconds")],
)
def test_a_variable_that_cannot_be_read_has_its_valid_values(name: str, valid: str) -> None:
    variable = f"SCARCTL_{name.upper()}"
    with pytest.raises(UsageError, match=f"{variable} is 'maybe', which cannot be read") as caught:
        SessionSettings.resolve({"store": "s"}, environ={variable: "maybe"})
    assert valid in caught.value.hint
