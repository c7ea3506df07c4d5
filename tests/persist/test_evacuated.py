"""Test that an evacuation calls a state consistent only if one commit of it outlives the host, equal on all ranks."""

from __future__ import annotations

import errno
import threading
import time
import uuid
from typing import Any

import pytest

from scarctl.errors import Unavailable
from scarctl.persist.evacuated import NOWHERE, Evacuated, why_mixed_ranks
from scarctl.persist.evacuation import Evacuation, not_evacuated
from scarctl.persist.persister import Persister
from scarctl.persist.thread import PersisterThread
from scarctl.state.caveats import Caveat
from scarctl.state.common import DIFFERED, name_of
from scarctl.state.extras import Notes
from scarctl.store import ShardState
from tests.daemon.rig import Rig, copy_into

CAVEAT = Caveat("ranks-differ", "ranks had other weights")
NOTED = Notes(caveats=(CAVEAT,))
UNKNOWN = "what was saved with this state cannot be read, so that it may not be consistent: "


def seal(rig: Rig, step: int = 2, notes: Notes = NOTED) -> int:
    """Bring a whole state into memory, and ask for it; return the request's number."""
    extras, whole = {"step": step, **notes.to_tree()}, uuid.uuid4().hex
    assert copy_into(rig.arena, rig.everything, rig.version(step), step, whole=whole, extras=extras)
    rig.arena.reach(step)
    return rig.arena.ask(whole=True)


def forget(rig: Rig) -> None:
    """Remove the extras from memory: only the store has them."""
    for path in rig.arena.folder.glob("extras-*"):
        path.unlink()


def evacuate(rig: Rig, seconds: float = 60.0, persister: Persister | None = None) -> Evacuated:
    deadline = time.monotonic() + seconds
    evacuation = Evacuation(rig.arena, persister or rig.persister, deadline)
    evacuation.run()
    return evacuation.report()


def label(found: Evacuated) -> tuple[bool, bool, tuple[str, ...]]:
    document = found.to_json()
    assert document["consistent"] == found.consistent
    assert document["reasons"] == list(found.reasons)
    assert not found.label.of_one or document["newest_step"] == found.step
    assert Evacuated.from_json(document) == found
    return found.consistent, found.label.of_one, found.reasons


@pytest.mark.parametrize("place", ["waits", "saved", "saved by another process"])
@pytest.mark.parametrize(
    ("notes", "reasons"),
    [
        (Notes(), ()),
        (NOTED, (CAVEAT.message,)),
        (Notes(caveats=(Caveat("kind", "a note"),)), ()),
    ],
)
def test_the_caveats_of_the_seal_are_read(
    rig: Rig, place: str, notes: Notes, reasons: tuple[str, ...]
) -> None:
    """Those of the seal before say nothing about it."""
    rig.persist(seal(rig, 1, Notes(caveats=(Caveat("older", "of an older state"),))))
    number = seal(rig, 2, notes)
    if place != "waits":
        rig.persist(number)
    other = Persister(rig.arena, rig.writer) if place.endswith("process") else None
    found = evacuate(rig, persister=other)
    assert (found.safe, found.sealed, found.step) == (True, True, 2)
    assert label(found) == (not reasons, True, reasons)


def test_a_store_that_cannot_be_read_matters_only_to_a_process_that_has_not_sealed_the_state(
    rig: Rig,
) -> None:
    rig.persist(seal(rig))
    forget(rig)
    rig.blobs.break_down("reader", errno.EIO)
    assert label(evacuate(rig)) == (False, True, (CAVEAT.message,))
    found = evacuate(rig, persister=Persister(rig.arena, rig.writer))
    assert (found.safe, found.error) == (True, None)
    consistent, whole, (reason,) = label(found)
    assert (consistent, whole) == (False, True)
    assert reason.startswith(UNKNOWN)


def test_nothing_is_read_once_the_time_is_up(rig: Rig) -> None:
    rig.persist(seal(rig, notes=Notes()))
    forget(rig)
    rig.blobs.break_down("reader", errno.EIO)
    found = evacuate(rig, 0.0, Persister(rig.arena, rig.writer))
    assert label(found) == (False, True, (f"{UNKNOWN}the time was up",))
    assert found.safe


def test_caveats_that_are_still_being_read_at_the_end_are_no_failure_to_save(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.persist(seal(rig, notes=Notes()))
    forget(rig)
    persister, goes_on = Persister(rig.arena, rig.writer), threading.Event()
    read = rig.store.read_extras

    def late(state: ShardState) -> Any:
        assert goes_on.wait(60)
        return read(state)

    monkeypatch.setattr(rig.writer.store, "read_extras", late)
    thread = PersisterThread(persister)
    found = thread.evacuate(0.5)
    goes_on.set()
    thread.close()
    assert (found.safe, found.sealed, found.error) == (True, True, None)
    assert label(found) == (False, True, (f"{UNKNOWN}the time was up",))


def test_a_saver_out_of_reach_knows_only_what_waits(rig: Rig) -> None:
    rig.persist(seal(rig, notes=Notes()))
    forget(rig)
    found = not_evacuated(rig.arena, Unavailable("no daemon"))
    assert label(found) == (False, True, (f"{UNKNOWN}no daemon",))
    seal(rig, 3)
    assert label(not_evacuated(rig.arena, Unavailable("no daemon")))[:2] == (False, False)


def test_a_part_that_was_saved_at_the_same_step_leaves_no_whole_state(rig: Rig) -> None:
    rig.persist(seal(rig, notes=Notes()))
    rig.save(rig.everything[:3], 2, value=9)
    found = evacuate(rig)
    assert (found.safe, found.sealed) == (True, False)
    consistent, whole, (reason,) = label(found)
    assert (consistent, whole) == (False, False)
    assert reason == NOWHERE


def test_a_second_seal_of_a_step_that_did_not_get_through_is_not_in_the_store(rig: Rig) -> None:
    """Only its extras differ, and there was no time for them."""
    rig.persist(seal(rig, notes=Notes()))
    rig.save(rig.everything[:0], 2, sealed=True)
    found = evacuate(rig, 0.0)
    assert (found.safe, found.sealed, found.extras_lost) == (False, False, True)
    assert label(found)[:2] == (False, False)


def ranks(*digests: dict[str, str]) -> list[Evacuated]:
    return [
        Evacuated(7, 1, 1, 1, 1, 0, 0, 0.0, True, commit_name="ab" * 16, common=found) for found in digests
    ]


ALL, PAIR = name_of([0, 1, 2]), name_of([1, 2])


@pytest.mark.parametrize(
    ("digests", "reasons"),
    [
        ([{}], []),
        ([{ALL: "a"}] * 3, []),
        ([{ALL: "a"}, {ALL: "a", PAIR: "b"}, {ALL: "a", PAIR: "b"}], []),
        ([{PAIR: "a"}, {PAIR: "b"}], [DIFFERED.message]),
        ([{ALL: "a"}] * 2, ["other ranks have copies of the same tensors"]),
        ([{ALL: "a"}, {ALL: "b"}], [DIFFERED.message, "other ranks have copies of the same tensors"]),
        ([{"a name of another version": "a"}], ["other ranks have copies of the same tensors"]),
    ],
)
def test_ranks_whose_digests_are_not_all_there_are_not_called_consistent(
    digests: list[dict[str, str]], reasons: list[str]
) -> None:
    found: Any = why_mixed_ranks(ranks(*digests))
    assert len(found) == len(reasons)
    assert all(one.startswith(text) for one, text in zip(found, reasons, strict=True))
