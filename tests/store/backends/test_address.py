"""Test addresses of stores: what they name, what they show, and what another process needs to open them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scarctl.errors import UsageError
from scarctl.store.backends.address import DEFAULT_TIMEOUT, PORTABLE, Address, portable_options


def test_a_folder_is_local_with_and_without_options(tmp_path: Path) -> None:
    for text in (str(tmp_path), f"file://{tmp_path}"):
        address = Address.parse(text, {"key": "x"})
        assert address.root == tmp_path
        assert address.url == str(tmp_path)
        assert not address.options


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Address.parse("~/ckpt").root == tmp_path / "ckpt"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("S3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://bucket", "s3://bucket"),
        ("s3://user:pass@bucket/a", "s3://bucket/a"),
        ("s3://user:p%2Fa@bucket/a", "s3://bucket/a"),
        ("sftp://user:pass@host:22/a", "sftp://host:22/a"),
        ("memory://a/b", "memory://a/b"),
    ],
)
def test_what_is_shown_has_no_user_and_no_password(text: str, shown: str) -> None:
    address = Address.parse(text)
    assert address.shown == shown
    assert address.root is None
    assert address.url == text
    assert "pass" not in repr(address)


@pytest.mark.parametrize(
    "text",
    [
        "s3://",
        "s3://bucket/a//b",
        "s3://bucket/../a",
        "s3://bucket/a/./b",
        "s3://bucket/a?secret=1",
        "s3://bucket/a#secret",
        "s3://bucket:99/secret",
        "s3://bucket:secret/a",
        "s3://key:with/secret@bucket/a",
        "s3://key:secret@/bucket/a",
        "s3:/key:secret@bucket/a",
        "s3:key:secret@bucket/a",
        "s3//key:secret@bucket/a",
        "simplecache::s3://bucket/secret",
        "://secret",
        "s3://bucket/\0secret",
        "file://secret/a",
        "file:///a?secret",
    ],
)
def test_what_is_no_address_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Address.parse(text)
    assert "secret" not in str(caught.value).replace("write / in a secret as", "")


def test_keys_in_the_address_count_unless_options_have_others() -> None:
    address = Address.parse("s3://me:p%2Fw@bucket/a", {"secret": "other", "anon": False})
    assert address.options == {"key": "me", "secret": "other", "anon": False}
    assert Address.parse("sftp://me:pw@host/a").options == {}  # fsspec takes them from the address


@pytest.mark.parametrize("value", [0, -1, "5", True, float("nan"), 1e12])
def test_the_timeout_is_a_number_of_seconds(value: Any) -> None:
    assert Address.parse("s3://b", {}).timeout == DEFAULT_TIMEOUT
    address = Address.parse("s3://b", {"scarctl_timeout": 2})
    assert (address.timeout, dict(address.options)) == (2.0, {})
    with pytest.raises(UsageError):
        Address.parse("s3://b", {"scarctl_timeout": value})


ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "key",
    "AWS_SESSION_TOKEN": "token",
    "AWS_PROFILE": "me",
    "AWS_DEFAULT_REGION": "mars",
    "AWS_ENDPOINT_URL": "http://all",
    "AWS_ENDPOINT_URL_S3": "http://s3",
    "OTHER": "x",
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            {
                "key": "id",
                "secret": "key",
                "token": "token",
                "profile": "me",
                "endpoint_url": "http://s3",
                "client_kwargs": {"region_name": "mars"},
            },
        ),
        (
            {"profile": "you", "scarctl_timeout": 3},
            {
                "profile": "you",
                "scarctl_timeout": 3,
                "endpoint_url": "http://s3",
                "client_kwargs": {"region_name": "mars"},
            },
        ),
        (
            {"anon": True, "endpoint_url": "http://own", "client_kwargs": {"region_name": "venus"}},
            {"anon": True, "endpoint_url": "http://own", "client_kwargs": {"region_name": "venus"}},
        ),
        (
            {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": "http://own"}},
            {
                "key": "k",
                "secret": "s",
                "client_kwargs": {"endpoint_url": "http://own", "region_name": "mars"},
            },
        ),
    ],
)
def test_what_another_process_needs(options: dict[str, Any], expected: dict[str, Any]) -> None:
    address = Address.parse("s3://bucket/a", options)
    assert portable_options(address, options, ENVIRONMENT) == expected
    assert set(ENVIRONMENT) - {"OTHER"} <= set(PORTABLE)


def test_only_s3_takes_them_from_the_environment() -> None:
    assert portable_options(Address.parse("gs://bucket/a"), {"a": 1}, ENVIRONMENT) == {"a": 1}
    assert portable_options(Address.parse("s3://k:s@bucket/a"), None, {"AWS_ACCESS_KEY_ID": "id"}) == {}
