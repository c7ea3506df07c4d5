"""Test the public interface, the sources of options and of a session's saver, and what `attach` refuses."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scarctl
from scarctl.arena.folder import host_folder
from scarctl.config import describe, environment, grouped
from scarctl.errors import LayoutMismatch, Unavailable, UsageError
from tests.daemon.trainer import status, stop
from tests.support import stepper

ARGUMENTS = [
    "model", "optimizer", "store", "fraction", "interval", "partitioning", "selection",
    "schedulers", "scaler", "extras", "ranks", "member", "hooks", "settings",
]  # fmt: skip


def test_attach_has_few_arguments() -> None:
    assert len(ARGUMENTS) <= 14
    assert list(inspect.signature(scarctl.attach).parameters) == ARGUMENTS
    text = " ".join((scarctl.attach.__doc__ or "").split())
    assert all(f" {name}: " in text for name in ARGUMENTS)
    for name in ("store", "fraction", "interval"):
        assert describe(name) in text, "the command line describes it with other words"


def test_the_public_names_are_there_without_torch() -> None:
    program = (
        "import sys, scarctl\n"
        "assert dir(scarctl) == sorted(scarctl.__all__), dir(scarctl)\n"
        "scarctl.Partitioning(shards=2), scarctl.Extra({}), scarctl.Ranks(), scarctl.NoStore('x')\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])\n"
        "print(all(getattr(scarctl, name).__name__ == name for name in scarctl.__all__))\n"
        "print(hasattr(scarctl, 'unheard_of'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\nTrue\nFalse\n"
    errors = {
        name
        for name, found in vars(sys.modules["scarctl.errors"]).items()
        if isinstance(found, type) and issubclass(found, Exception)
    }
    assert errors <= set(scarctl.__all__)


def test_options_of_a_group_come_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scarctl.toml").write_text("max_staleness = 7\ntimeout = 3\nshards = 5\n")
    monkeypatch.setenv("SCARCTL_TIMEOUT", "4")
    monkeypatch.setenv("SCARCTL_TRACKER", "exact")
    monkeypatch.setenv("SCARCTL_PARTITION_BYTES", "4096")
    with scarctl.attach(
        nn.Linear(2, 2),
        store="store",
        hooks="off",
        partitioning=scarctl.Partitioning(partition_bytes=8192),
        selection=scarctl.Selection(policy="round"),
        settings=scarctl.Settings(arena_dir=None),
    ) as session:
        found = session.settings
    assert (found.partition_bytes, found.policy, found.timeout) == (8192, "round", 4.0)
    assert (found.tracker, found.max_staleness, found.shards, found.norm) == ("exact", 7, 5, "l2")


def test_options_are_grouped_by_name() -> None:
    assert grouped(interval=3, shards=2, policy="full", rows={"*": 1}) == {
        "interval": 3,
        "partitioning": scarctl.Partitioning(shards=2, rows={"*": 1}),
        "selection": scarctl.Selection(policy="full"),
    }


@pytest.fixture
def folder(arena_dir: Path, usual_saver: None) -> Iterator[Path]:
    """Yield the daemon's folder."""
    folder = host_folder(str(arena_dir))
    yield folder
    stop(folder)


def test_saving_is_the_daemons_unless_it_is_told_otherwise(tmp_path: Path, folder: Path) -> None:
    with stepper.attach(*stepper.build(), str(tmp_path / "daemon")):
        found = status(folder)
        assert found is not None
        assert [run["store"] for run in found["runs"]] == [str(tmp_path / "daemon")]
    stop(folder)
    with stepper.attach(*stepper.build(), str(tmp_path / "thread"), daemon=False):
        assert status(folder) is None


@pytest.fixture
def no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no other program start, as in a sandbox."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")


@pytest.mark.usefixtures("no_daemon")
def test_where_there_can_be_no_daemon_a_thread_saves(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "scarctl"):
        model, optimizer = stepper.build()
        session = stepper.attach(model, optimizer, str(tmp_path / "store"))
    assert "could not be started" in caplog.text
    assert "in a thread of this process" in caplog.text
    optimizer.step()
    session.checkpoint(full=True, wait=True)
    session.close()
    with stepper.attach(*stepper.build(), str(tmp_path / "store")) as again:
        assert again.resume().step == 1


@pytest.mark.usefixtures("no_daemon")
def test_a_daemon_that_is_asked_for_has_to_start(tmp_path: Path, folder: Path) -> None:
    model, optimizer = stepper.build()
    with pytest.raises(Unavailable, match="could not be started") as caught:
        stepper.attach(model, optimizer, str(tmp_path / "store"), daemon=True)
    assert caught.value.kind == "daemon-not-started"
    stepper.attach(model, optimizer, str(tmp_path / "store")).close()  # nothing is held


def test_memory_that_is_too_small_is_found_out_at_once(tmp_path: Path, arena_dir: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(1).expand(1 << 46), requires_grad=False)])
    needed = "562,949,953,421,312"  # two slots
    with pytest.raises(Unavailable, match=rf"at least {needed} bytes in .* are free .*arena_dir") as caught:
        scarctl.attach(model, store=tmp_path / "store", hooks="off")
    assert caught.value.kind == "arena-full"
    scarctl.attach(nn.Linear(2, 2), store=tmp_path / "store", hooks="off").close()


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("scheduler", "did you mean schedulers?"),
        ("stroe", "did you mean store?"),
        ("shards", r"did you mean partitioning=scarctl\.Partitioning\(shards=\.\.\.\)\?"),
        ("polcy", r"did you mean selection=scarctl\.Selection\(policy=\.\.\.\)\?"),
        ("arena_dir", r"did you mean settings=scarctl\.Settings\(arena_dir=\.\.\.\)\?"),
        ("xyzzy", "options: model, optimizer, store, "),
    ],
)
def test_an_option_that_does_not_exist_names_the_one_that_was_meant(option: str, meant: str) -> None:
    options: dict[str, Any] = {option: None}
    with pytest.raises(UsageError, match=f"no option '{option}' \\({meant}"):
        scarctl.attach(torch.nn.Linear(2, 2), **options)


def test_an_arena_dir_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        Unavailable, match=r"No such file or directory \(create it \(mkdir -p .*/none\), mount"
    ):
        scarctl.attach(
            model, optimizer, store=tmp_path / "store", settings=scarctl.Settings(arena_dir=tmp_path / "none")
        )
    scarctl.attach(model, optimizer, store=tmp_path / "store").close()


def test_an_iteration_of_several_steps_that_the_loop_ends(tmp_path: Path) -> None:
    """With `hooks="begin"` steps begin automatically, and `step()` ends the iteration; without it none is counted."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.Adam(layer.parameters()) for layer in model]
    session = scarctl.attach(model, optimizers, store=tmp_path / "store", hooks="begin")
    for batch in range(6):
        session.step()
        model(torch.randn(2, 4)).square().mean().backward()
        assert not session.stepping
        optimizers[0].step()
        assert session.stepping
        optimizers[1].step()
        optimizers[0].step()
        assert session.head_step == batch
        session.step()
        assert not session.stepping
        session.step()
        assert session.head_step == batch + 1
    session.close()


def test_the_live_state_takes_the_place_of_an_earlier_run(tmp_path: Path) -> None:
    def run(steps: int) -> tuple[nn.Linear, torch.optim.Optimizer, scarctl.Session]:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        session = scarctl.attach(model, optimizer, store=tmp_path / "store")
        session.resume() if steps == 5 else session.supersede(2)
        return model, optimizer, session

    def train(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()

    model, optimizer, session = run(5)
    train(model, optimizer, 5)
    with pytest.raises(UsageError, match="comes before the first step"):
        session.supersede()
    session.close()
    model, optimizer, session = run(1)
    assert session.head_step == 2
    train(model, optimizer, 1)
    session.close()
    other, _, session = run(5)
    assert session.head_step == 3
    assert torch.equal(other.weight, model.weight)
    session.close()
    wide = nn.Linear(4, 5)
    session = scarctl.attach(wide, torch.optim.Adam(wide.parameters()), store=tmp_path / "store")
    with pytest.raises(LayoutMismatch):
        session.supersede()
    session.close()


def test_a_variable_that_nothing_reads_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment._warn.cache_clear()
    for name in ("INTERVALL", "ROWS", "RUN_TIMEOUT", "RESTART_COUNT", "simulate_seed", "UNHEARD_OF"):
        monkeypatch.setenv(f"SCARCTL_{name}", "3")
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "scarctl"):
            scarctl.attach(nn.Linear(2, 2), store=tmp_path / "store", hooks="off").close()
    said = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert said == [
        "SCARCTL_INTERVALL has no effect: scarctl reads no such variable; did you mean SCARCTL_INTERVAL?",
        "SCARCTL_ROWS has no effect: give it in scarctl.toml, or to attach",
        "SCARCTL_UNHEARD_OF has no effect: scarctl reads no such variable",
        "SCARCTL_simulate_seed has no effect: scarctl reads no such variable; did you mean SCARCTL_SIMULATE_SEED?",
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"peers": -1},
        {"peers": True},
        {"peers": 1, "daemon": False},
        {"peer_address": "node7"},
        {"peer_address": "0.0.0.0"},
        {"peer_address": "::"},
        {"peer_address": "224.0.0.1"},
        {"peer_address": 7},
        {"peer_domain": 7},
        {"peer_bandwidth": 0},
        {"peer_ack": "some"},
        {"peer_tls": "host.pem"},
        {"peer_tls": ("host.pem", "host.key")},
        {"peer_secret_file": 7},
        {"peer_bandwidth": float("nan")},
    ],
)
def test_peers_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        scarctl.attach(nn.Linear(2, 2), store=str(tmp_path / "ckpt"), settings=scarctl.Settings(**options))
    assert not (tmp_path / "ckpt").exists()


def test_a_process_that_trains_alone_has_no_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCARCTL_DAEMON")
    with pytest.raises(UsageError, match="trains alone"):
        scarctl.attach(nn.Linear(2, 2), store=str(tmp_path / "ckpt"), settings=scarctl.Settings(peers=1))
    with pytest.raises(UsageError, match="members need the file of a secret"):
        scarctl.attach(
            nn.Linear(2, 2), store=str(tmp_path / "ckpt"), member=(0, 2), settings=scarctl.Settings(peers=1)
        )
    monkeypatch.setenv("SCARCTL_PEERS", "1")
    with pytest.raises(UsageError, match="trains alone"):
        scarctl.attach(nn.Linear(2, 2), store=str(tmp_path / "ckpt"))
    assert not (tmp_path / "ckpt").exists()
