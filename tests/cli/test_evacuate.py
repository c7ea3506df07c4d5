"""Test `scarctl evacuate`: a daemon, sessions that train or do not answer, and the exit codes."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from scarctl.cli.evacuate import _lines
from scarctl.cli.main import cli
from scarctl.ops.evacuate import Host, Process, Store
from scarctl.persist.evacuated import NOWHERE, Evacuated
from scarctl.recovery.label import NO_COMMIT
from scarctl.session.departure import sentence
from scarctl.state.caveats import Caveat
from scarctl.state.common import DIFFERED
from scarctl.state.label import Label
from tests.cli.conftest import Done
from tests.support import stepper
from tests.support.process import Forked

pytestmark = pytest.mark.usefixtures("warm_torch")


def evacuate(*arguments: str) -> tuple[int, Any]:
    done = CliRunner().invoke(cli, ["evacuate", *arguments, "--json"])
    return done.exit_code, Done(done.exit_code, done.stdout, done.stderr).document


@pytest.mark.leaves_arena
@pytest.mark.usefixtures("daemon_folder")
def test_all_sessions_of_a_host(tmp_path: Path) -> None:
    stores = [tmp_path / "a", tmp_path / "b"]
    with (
        Forked(lambda t: stepper.trains(stores[0], t)) as one,
        Forked(lambda t: stepper.trains(stores[1], t)) as two,
    ):
        one.expect("ready")
        two.expect("ready")
        code, found = evacuate("--deadline", "60s", "--all")
        assert code == 0, found
        assert found["safe"]
        assert sorted(store["store"] for store in found["stores"]) == [str(store) for store in stores]
        assert [store["consistent"] for store in found["stores"]] == [True, True]
        assert {process["step"] for store in found["stores"] for process in store["processes"]} == {7}
        code, found = evacuate("--deadline", "60s", "--store", str(stores[1]))
        assert code == 0, found
        assert [store["store"] for store in found["stores"]] == [str(stores[1])]


@pytest.mark.leaves_arena
@pytest.mark.usefixtures("daemon_folder")
def test_a_host_whose_runs_were_not_chosen(tmp_path: Path) -> None:
    """They are named, and nothing is done to them."""
    store = tmp_path / "store"
    with Forked(lambda tell: stepper.trains(store, tell, 8)) as child:
        child.expect("ready")
        code, found = evacuate("--deadline", "60s")
        assert code == 2
        assert f"1 run here: {store}: process {child.pid}, training" in found["error"]["message"]
        assert "`--store URL`" in found["error"]["hint"]
        for choice in (["--all"], ["--store", str(store)]):
            code, found = evacuate("--deadline", "60s", "--dry-run", *choice)
            assert (code, found["dry_run"]) == (0, True)
            assert [(run["pid"], run["store"]) for run in found["runs"]] == [(child.pid, str(store))]
        assert evacuate("--deadline", "60s", "--store", str(tmp_path / "other"))[0] == 10


@pytest.mark.leaves_arena
@pytest.mark.usefixtures("daemon_folder")
def test_a_session_that_does_not_answer(tmp_path: Path) -> None:
    """Its copies in memory are saved, and what is missing there is reported."""
    store = tmp_path / "store"
    with Forked(lambda tell: stepper.trains(store, tell, 8)) as child:
        child.expect("ready")
        child.signal(signal.SIGSTOP)
        code, found = evacuate("--deadline", "5s", "--all")
        assert code == 3
        (process,) = found["stores"][0]["processes"]
        assert process["flushed"] is False
        assert process["lost_partitions"] == 0
        assert not found["safe"]
        child.signal(signal.SIGCONT)


def test_members_and_the_place_that_is_safe_are_named() -> None:
    def said(found: Evacuated) -> list[str]:
        return _lines(Host((Store("/s", (Process("/s", 2, 12, found, member=True),)),)))

    sealed = SEALED
    assert said(sealed) == [
        "/s: step 7: 100 B of 100 B are safe in the store (consistent); 100 B written now"
    ]
    on_a_peer = Evacuated(
        7, 10, 100, 0, 0, 0, 0, 0.0, False, peer_partitions=10, peer_bytes=100, peers=("b",), label=MIXED
    )
    assert said(on_a_peer)[0] == "/s: step 7: 100 B of 100 B are safe; 0 B written now"
    # The seal is on the peer only, although the store has the partitions.
    there = replace(on_a_peer, peer_partitions=0, peer_bytes=0, peer_sealed=True, label=SEALED.label)
    assert said(there) == ["/s: step 7: 100 B of 100 B are safe (consistent); 0 B written now"]
    late = replace(sealed, sealed=False, flushed=False)
    assert said(late)[-1].startswith("  member 2: its newest step was not brought into memory")


def test_what_is_not_known_is_not_counted() -> None:
    silent = Process("/s", 2, 12, None, error="no daemon is running on this host")
    assert _lines(Host((Store("/s", (silent,)),))) == [
        "/s: what is safe is not known",
        "  rank 2: no daemon is running on this host",
    ]
    (nothing,) = _lines(Host((), folder="/dev/shm/scarctl-7"))
    assert nothing.startswith("nothing to evacuate in /dev/shm/scarctl-7:")


SEALED = Evacuated(
    7, 10, 100, 100, 1, 0, 0, 0.0, True, commit_name="ab" * 16, label=Label(7, 7, declared=True)
)
OTHER = replace(SEALED, commit_name="cd" * 16)
CAVEAT = Caveat("ranks-differ", "ranks had other weights")
NOTED = replace(SEALED, caveats=(CAVEAT,), label=Label(7, 7, caveats=(CAVEAT.message,)))
MIXED = Label(7, 7, (NOWHERE,))


@pytest.mark.parametrize(
    ("found", "member", "whole", "reasons"),
    [
        ([SEALED, SEALED], False, True, []),
        ([SEALED, NOTED], False, True, ["ranks had other weights"]),
        (
            [replace(SEALED, common={f"0+2-{'0' * 16}": digest}) for digest in ("a", "b")],
            False,
            True,
            [DIFFERED.message],
        ),
        ([SEALED, None], False, False, ["not all of its processes have answered"]),
        ([SEALED, replace(SEALED, sealed=False, label=MIXED)], False, False, [NOWHERE]),
        ([SEALED, replace(OTHER, step=8)], False, False, [NO_COMMIT]),
        ([SEALED, OTHER], False, False, [NO_COMMIT]),
        ([SEALED, OTHER], True, False, ["members have no common step"]),
        ([OTHER], True, True, []),
    ],
)
def test_a_store_is_labelled_as_by_all_that_read_it(
    found: list[Evacuated | None], member: bool, whole: bool, reasons: list[str]
) -> None:
    store = Store("/s", tuple(Process("/s", n, 12, one, member=member) for n, one in enumerate(found)))
    document = store.to_json()
    assert (document["consistent"], document["reasons"]) == (not reasons, reasons)
    assert (document["oldest_step"], document["newest_step"], document["position"]) == (7, 7, "declared")
    text = _lines(Host((store,)))[0]
    assert ("(consistent)" in text) is not bool(reasons)
    assert (f"(mixed: {'; '.join(reasons)})" in text) is (whole and bool(reasons))


def test_the_log_says_why_what_is_safe_is_not_exact() -> None:
    assert sentence(SEALED) == "step 7 is safe in the store (consistent)"
    assert sentence(NOTED) == "step 7 is safe in the store (mixed: ranks had other weights)"
    assert sentence(replace(SEALED, sealed=False, label=MIXED)) == "step 7 is safe in the store"


def test_nothing_to_evacuate(tmp_path: Path) -> None:
    assert evacuate("--deadline", "5", "--all") == (
        0,
        {
            "schema_version": 1,
            "command": "evacuate",
            "deadline": 5.0,
            "safe": True,
            "stores": [],
            "in_memory": [],
        },
    )
    model, optimizer = stepper.build()
    with stepper.attach(model, optimizer, str(tmp_path / "store"), daemon=False) as session:
        optimizer.step()
        session.checkpoint(full=True, wait=True)
        code, found = evacuate("--deadline", "5s", "--store", str(tmp_path / "store"))
    assert (code, found["error"]["kind"]) == (2, "no-session")
