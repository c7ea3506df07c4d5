"""Name the scenarios of the model of terms, and for each rule that is left out the one that shows the consequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scenario:
    """`cast`: one actor each, "[host] [path] [late ...] [stale ...] [clone]: words".

    Actors of one host and path are lives, one after the other, with one memory; path 1 is a second target, or a copied
    store. "late": an answer may be lost; "stale": a listing may hide newer terms; "clone": of the actor before.
    `beside`: steps that the first host makes at any moment. `plain`, `gap`: see `Rules`.
    """

    name: str
    cast: tuple[str, ...]
    plain: bool = False
    gap: str = "wait"
    beside: int = 0


SHORT = (
    Scenario("two openings, a lost answer", ("late: open commit", ": open commit")),
    Scenario("three openings", (": open commit", ": open open")),
    Scenario("an opening whose answers are lost", (": open commit", "late: open commit")),
    Scenario("a collector and its successor", (": open seal commit open collect", ": open commit collect")),
    Scenario("a late record, and a collector", ("late: open commit open collect", ": open commit")),
    Scenario("stale lists of an opening", (": open commit", "stale stale: open commit")),
    Scenario("stale looks", ("stale stale: open seal commit", "stale: open collect")),
    Scenario("a stale collector", ("stale stale: open commit open collect", ": open commit collect")),
    Scenario("a roll-back", (": open seal commit", "late: back")),
    Scenario("a reader beside a collector", (": open seal commit open collect", ": read")),
    Scenario("a reader beside two openings", (": open commit", ": open", ": read")),
    Scenario("a snapshot beside a collector", (": open seal commit seal open collect", ": snap")),
    Scenario("a clone", (": open commit commit", "clone: commit seal")),
    Scenario("put back under a writer", (": open commit commit full", ": backup restore")),
    Scenario("removed under a writer", (": open commit", ": remove", ": open commit")),
    Scenario("three lives here", ("a: open step commit", "a: open step commit", "a: open")),
    Scenario("rolled back elsewhere", ("a: open seal", "b: back", "a: open")),
    Scenario("gone on elsewhere", ("a: open step", "b: open commit", "a: open")),
    Scenario("rolled back here", ("a: open seal commit", "a: back commit", "a: open")),
    Scenario("killed before the first record", ("a: open commit", "a: open", "a: open"), beside=1),
    Scenario("put back between lives", ("a: open commit step commit", ": backup restore", "a: open")),
    Scenario("two targets", ("a: open commit commit", "a 1: open commit"), beside=1),
    Scenario("plain: two openings", ("late: open commit", ": open"), plain=True),
    Scenario("plain: a reader waits", (": open commit", ": open", ": read"), plain=True),
    Scenario("plain: a reader helps", (": open commit", ": open", ": read"), plain=True, gap="help"),
    Scenario("plain: a reader labels", (": open commit", ": open", ": read"), plain=True, gap="label"),
)
LONG = (
    Scenario("two openings, more lost answers", ("late: open commit commit", "late: open commit")),
    Scenario("three openings, a late record", ("late: open commit", ": open", ": open commit")),
    Scenario("three openings at once", (": open", ": open", ": open")),
    Scenario("three openings that commit", (": open commit", ": open", ": open commit")),
    Scenario("a roll-back and an opening", (": open seal commit", ": back", ": open")),
    Scenario("a roll-back, and a late record", ("late: open seal commit", ": back", ": open")),
    Scenario("both collect", ("late: open seal commit open collect", ": open collect commit")),
    Scenario("a collector and a roll-back", (": open seal commit open collect", ": back commit collect")),
    Scenario("a zombie and two successors", (": open commit", ": open collect", ": open collect")),
    Scenario(
        "two stale writers and a successor",
        ("stale stale: open commit", "stale: open commit", ": open collect"),
    ),
    Scenario(
        "a stale collector and a roll-back",
        ("stale stale: open seal commit open collect", ": back commit collect"),
    ),
    Scenario(
        "a reader beside a collector and a successor",
        (": open commit open collect", ": open collect", ": read"),
    ),
    Scenario("a reader beside a take-over", ("late: open commit", ": open collect commit", ": read")),
    Scenario("a reader and a roll-back", (": open seal", "late: back", ": read")),
    Scenario(
        "two snapshots beside a collector", (": open seal commit seal open collect", ": snap", ": snap")
    ),
    Scenario("a snapshot beside a take-over", ("late: open seal", ": open seal collect", ": snap")),
    Scenario("put back under an opening", (": open commit commit full", ": backup restore", ": open")),
    Scenario(
        "put back under a writer, read, and opened",
        (": open commit commit full", ": backup restore", ": open", ": read"),
    ),
    Scenario(
        "removed under a late writer", ("late: open commit commit", ": remove", ": open commit", ": open")
    ),
    Scenario("removed under an opening", (": open open", ": remove", ": open commit")),
    Scenario(
        "rolled back elsewhere, and gone on",
        ("a: open seal commit step", "b: back step commit", "a: open commit"),
    ),
    Scenario("gone on elsewhere, more steps", ("a: open commit step", "b: open commit", "a: open")),
    Scenario("two hosts in turn", ("a: open step commit", "b: open commit step", "a: open", "b: open")),
    Scenario(
        "put back, gone on elsewhere",
        ("a: open step commit step", ": backup restore", "b: open commit", "a: open"),
    ),
    Scenario(
        "put back, more lives", ("a: open commit commit", ": backup restore", "a: open step", "a: open")
    ),
    Scenario("copied", ("a: open commit commit", ": copy", "b 1: open commit", "a: open")),
    Scenario(
        "removed, and the old saver goes on",
        ("a: open commit collect", ": remove", "a: open commit", "a: open"),
    ),
    Scenario(
        "two targets, two lives", ("a: open commit", "a 1: open commit", "a: open", "a 1: open"), beside=1
    ),
    Scenario(
        "two targets, gone on elsewhere",
        ("a: open", "a 1: open", "b: open", "a: open", "a 1: open"),
    ),
    Scenario("plain: three openings", ("late: open commit", ": open", ": open commit"), plain=True),
    Scenario("plain: both collect", (": open seal commit open collect", ": open collect commit"), plain=True),
    Scenario(
        "plain: a snapshot beside a take-over",
        ("late: open seal", ": open seal collect", ": snap"),
        plain=True,
    ),
)
_BACK = Scenario("", (": open commit commit commit", ": backup restore"))
_TWO = Scenario("", (": open commit", ": open"), plain=True)
_GAP = Scenario("", (": open commit", ": open", ": read"), plain=True)
_REMOVED = Scenario("", (": open commit commit", ": remove", ": open commit"))
_STALE = Scenario("", ("stale: open seal commit", ": open collect"))
_STALE_COLLECTOR = Scenario("", ("stale: open commit open collect", ": open commit collect"))
_SEALS = Scenario("", (": open seal seal", ": open collect", ": snap"))
_TURNS = Scenario("", ("a: open commit", "b: open", "a: open"), beside=1)
MUTANTS = {
    # Terms and the base.
    "an opening closes nothing": _STALE,
    "a term without records is not closed": Scenario("", (": open commit", "stale: open", ": open")),
    "the base is the highest number": _BACK,
    "what closes a log is deleted": _STALE,
    "the look asks for the next number alone, and terms are deleted": Scenario(
        "", (": open", ": open open open collect")
    ),
    "a claim that is not seen is passed over": Scenario("", (": open commit", "stale: open")),
    "records are listed before the claim": _TWO,
    # Records and the look.
    "records are not exclusive": _STALE,
    "records are not exclusive, and the process is cloned": Scenario("", (": open commit", "clone: commit")),
    "a record that exists is taken for its own": Scenario("", (": open commit", "clone: commit")),
    "another record under a number in doubt": Scenario("", ("late: open commit",), plain=True),
    "the record is put before its segment": Scenario("", (": open commit",)),
    "the look does not see newer terms": _TWO,
    "the look does not read the own claim": _REMOVED,
    "the look does not see the record": _BACK,
    "the look does not see the record before": _BACK,
    "the look does not see the segment": _BACK,
    "the first look does not see the base": Scenario("", (": open commit", ": backup restore", ": open")),
    "records are named by the number alone": _REMOVED,
    "what closes a log has the number alone": Scenario(
        "", (": open open", ": remove", ": open commit"), plain=True
    ),
    # Collection, snapshots.
    "a collector takes what it needs from a list": _STALE_COLLECTOR,
    "segments of later terms are deleted": _STALE_COLLECTOR,
    "a collector does not look": Scenario("", (": open open collect", ": remove", ": open commit")),
    "a collector deletes records of its own term": Scenario("", (": open full collect",)),
    "a collector does not wait for its first record": Scenario("", (": open commit open",)),
    "the newest consistent state is not kept": Scenario("", (": open seal commit open collect",)),
    "snapshots are listed before the first record": _SEALS,
    "a snapshot does not look": Scenario("", (": open seal seal open collect", ": snap")),
    # Readers.
    "readers do not begin again": Scenario("", (": open commit open collect", ": read")),
    "readers take what is left of a closed log": Scenario("", (": open commit open collect", ": read")),
    "a reader does not look": _GAP,
    "a reader takes what is not settled": _GAP,
    "readers ignore what closes a log": _GAP,
    # Memory and targets.
    "memory is believed whatever the store says": Scenario("", ("a: open seal commit", "b: back", "a: open")),
    "memory notes no number of a record": Scenario(
        "", ("a: open commit commit", ": backup restore", "a: open")
    ),
    "memory notes the number of the term": Scenario("", ("a: open", ": remove", "b: open", "a: open")),
    "the newest term counts, changed or not": _TURNS,
    "the line before is not kept": Scenario("", ("a: open commit", "a: open", "a: open")),
    "a full record begins a line": Scenario("", ("a: open commit", "b: open full", "a: open")),
    "memory of a store without records is believed": Scenario("", ("a: open", ": remove", "a: open")),
    "a roll-back notes its term before its memory": Scenario(
        "", ("a: open seal commit", "a: back", "a: open")
    ),
    "memory notes a record before it is acknowledged": Scenario("", ("a: open commit", "a: open")),
    "the caller is told before memory notes it": Scenario(
        "", ("a: open commit", ": backup restore", "a: open")
    ),
    "a saver notes what is no longer its own": Scenario("", ("a: open commit", "a: open commit", "a: open")),
    "what memory has now is called durable": Scenario("", (": open commit commit",), beside=2),
    "what is durable is not asked": Scenario("", ("a: open step", "a: open commit")),
    "one word says what is durable in both targets": Scenario("", ("a: open commit", "a 1: open seal")),
    "versions are compared across lines": Scenario(
        "", ("a: open", "a 1: open seal", "b: open commit", "a: open", "a 1: open seal")
    ),
    "memory that is set aside keeps its words of other targets": Scenario(
        "", ("a: open", "a 1: open", "b: open", "a: open", "a 1: open")
    ),
    "a roll-back keeps the words of other targets": Scenario(
        "", ("a: open seal", "a 1: open commit", "a: back", "a 1: open"), beside=1
    ),
}
"""Rules left out, and the scenario that shows the consequence."""
SLOW = (
    "a collector does not look",
    "versions are compared across lines",
    "memory that is set aside keeps its words of other targets",
    "a roll-back keeps the words of other targets",
)
"""Mutants that are caught late."""
