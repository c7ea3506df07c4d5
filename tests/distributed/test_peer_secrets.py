"""Test the secret of a job's hosts: it appears nowhere, a file of it must be private, and all hosts have the same."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from scarctl.arena.folder import host_folder
from tests.daemon.trainer import stop
from tests.distributed.launch import launch
from tests.support.certificates import Authority

TRAIN = "tests.distributed.watched:train"
CONTENT = "planted-0123456789abcdef-0123456789abcdef"


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("SCARCTL_DAEMON")
    yield tmp_path
    for home in ("east", "west"):
        stop(host_folder(str(tmp_path / home)))


@pytest.fixture
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secrets") / "secret"
    path.write_text(CONTENT + "\n")
    path.chmod(0o600)
    return path


def needles(hexadecimal: str) -> list[str]:
    """Return ways in which a secret may be written."""
    raw = bytes.fromhex(hexadecimal)
    return [
        hexadecimal,
        hexadecimal.upper(),
        repr(raw)[2:-1],
        base64.b64encode(raw).decode(),
        raw.decode("latin-1"),
    ]


@pytest.mark.parametrize("given", [True, False], ids=["from a file, with TLS", "drawn"])
@pytest.mark.long
def test_no_secret_shows(
    hosts: Path, secret: Path, tmp_path_factory: pytest.TempPathFactory, given: bool
) -> None:
    settings = {}
    if given:
        files = Authority(tmp_path_factory.mktemp("certificates")).host("any")
        settings = {"peer_secret_file": str(secret), "peer_tls": files}
    found = launch(TRAIN, 2, str(hosts), settings, timeout=100.0)
    wanted = {text for report in found for text in needles(report["secret"])}
    assert len({report["secret"] for report in found}) == 1
    wanted |= {CONTENT, CONTENT.encode().hex(), base64.b64encode(CONTENT.encode()).decode()}
    wanted.add("PRIVATE KEY")
    shown = [(where, text) for report in found for where, text in report["shown"]]
    shown += [(str(path), path.read_bytes().decode("latin-1")) for path in hosts.rglob("*") if path.is_file()]
    assert [where for where, text in shown if any(needle in text for needle in wanted)] == []
    # The test has searched all places where it could appear.
    places = {where.partition(" ")[0] for where, _ in shown}
    assert {"inspect", "doctor", "daemon", "cmdline", "environ", "an", "reprs", "a"} <= places
    assert sum("listens at" in text for where, text in shown if where.endswith("daemon.log")) == 2
    assert any(
        "peers-late" in text or "have acknowledged" in text for where, text in shown if where == "an error"
    )


def test_hosts_with_different_secrets_are_an_error_on_all(hosts: Path, secret: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        launch("tests.distributed.watched:train_with_own_secret", 2, str(hosts), str(secret))
    assert "peer_secret_file is not the same on all ranks: rank 1 has another one than rank 0" in str(
        caught.value
    )
    assert CONTENT not in str(caught.value)


def test_a_file_that_others_can_read_is_refused(hosts: Path, secret: Path) -> None:
    secret.chmod(0o640)
    with pytest.raises(AssertionError) as caught:
        launch(TRAIN, 2, str(hosts), {"peer_secret_file": str(secret)})
    assert "can be read by other users" in str(caught.value)
    assert CONTENT not in str(caught.value)
    assert not (hosts / "store").exists(), "nothing is written before"
