"""Test every command on an S3 store, through real HTTP; secrets never appear."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scarctl.store import Store
from tests.cli.conftest import Model, Run
from tests.support.places import KEY, SECRET, Place
from tests.support.proxy import Fault, proxy

pytestmark = pytest.mark.slow


@pytest.fixture
def url(s3_place: Place, tmp_path: Path) -> str:
    """Return an S3 store's address; scarctl.toml in the working folder has its options."""
    lines = [f'{name} = "{value}"' for name, value in s3_place.options.items()]
    (tmp_path / "scarctl.toml").write_text("\n".join(["[storage_options]", *lines, ""]))
    return s3_place.url


@pytest.fixture
def saved(run: Run, model: Model, url: str) -> Model:
    run("checkpoint", model.path, "--store", url, "--step", 0, "--shards", 4, "--partition-bytes", 256)
    return model


def test_errors_have_their_exit_codes(
    run: Run, model: Model, url: str, s3_endpoint: str, tmp_path: Path
) -> None:
    bucket = url.removeprefix("s3://").partition("/")[0]
    assert run("inspect", "--store", f"s3://{bucket}/none", "--json", code=10).error["kind"] == "no-store"
    assert run("inspect", "--store", "s3://no-such-bucket/x", "--json", code=10).error["kind"] == "no-bucket"
    assert run("inspect", "--store", "s3://", "--json", code=2).error["kind"] == "usage"
    toml = tmp_path / "scarctl.toml"
    with proxy(s3_endpoint) as wire:
        keys = 'key = "a"\nsecret = "b"\nscarctl_timeout = 2\n'
        toml.write_text(f'[storage_options]\nendpoint_url = "{wire.url}"\n{keys}')
        wire.rule = lambda request: Fault((403, "InvalidAccessKeyId"))
        assert run("inspect", "--store", url, "--json", code=12).error["kind"] == "access-denied"
        wire.rule = lambda request: Fault((503, "SlowDown"))
        assert run("inspect", "--store", url, "--json", code=17).error["kind"] == "unavailable"
        wire.rule = lambda request: None
        wire.drop_headers = ("if-none-match",)
        arguments = ["checkpoint", model.path, "--store", url, "--step", 0, "--json"]
        assert run(*arguments, code=14).error["kind"] == "missing-guarantee"
        run(*arguments, "--assume-single-writer")
    toml.write_text(f'[storage_options]\nendpoint_url = "{s3_endpoint}"\n')
    assert "NoCredentialsError" in run("inspect", "--store", url, "--json", code=12).error["message"]
    toml.write_text("storage_options = 3\n")
    run("inspect", "--store", url, code=2)


def test_the_region_of_the_environment_signs_the_requests(
    run: Run, saved: Model, url: str, s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scarctl.toml").unlink()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    with proxy(s3_endpoint) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", wire.url)
        run("inspect", "--store", url)
    assert all("/eu-central-1/s3/" in request.headers["authorization"] for request in wire.seen)
    assert all(KEY in request.headers["authorization"] for request in wire.seen)


def test_representations_show_nothing_secret(s3_place: Place, s3_endpoint: str) -> None:
    from scarctl.config import SessionSettings
    from scarctl.ops.checkpoint import CheckpointSettings
    from scarctl.ops.recover import RecoverSettings

    url = s3_place.url.replace("s3://", "s3://planted-user:planted-password@")
    store = Store.create(url, storage_options={"endpoint_url": s3_endpoint, "token": "planted-token"})
    options = store.address.options
    assert (options["key"], options["secret"]) == ("planted-user", "planted-password")
    for thing in (
        store,
        store.address,
        store.blobs,
        store.url,
        store.where,
        SessionSettings(store=url, storage_options=options),
        CheckpointSettings(store=url, step=1, storage_options=options),
        RecoverSettings(store=url, lost=("all",), storage_options=options, output=Path("x")),
    ):
        assert "planted" not in f"{thing!r} {thing}"


def test_doctor_finds_a_sound_place_and_cleans_up(run: Run, tmp_path: Path) -> None:
    url, before = "ckpt", os.listdir(tmp_path)
    document = run("doctor", "--store", url, "--rounds", 3, "--json").document
    assert document["sound"] is document["exclusive"] is True
    assert document["races"] == {"racers": 16, "rounds": 3, "one_winner": 3}
    assert {check["name"] for check in document["checks"] if check["ok"]} == {
        "exclusive-create",
        "exclusive-races",
        "read-after-write",
        "list-after-write",
        "absent-then-there",
        "nothing-unfinished",
        "range-reads",
    }
    for name in ("small_put_seconds", "small_get_seconds"):
        assert 0 < document[name]["median"] <= document[name]["p95"]
    assert document["write_bytes_per_second"] > 0 < document["read_bytes_per_second"]
    assert document["left_behind"] == []
    assert os.listdir(tmp_path) == before
    text = run("doctor", "--store", url, "--rounds", 1).stdout
    assert "\nsafe" in text
    assert "FAIL" not in text
