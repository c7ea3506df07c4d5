"""Find the first difference between two runs, and its likeliest reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scarctl.rehearse.reasons import KINDS, alike, cause_after_restart, cause_undisturbed
from scarctl.rehearse.records import GENERATORS, Line

KEPT = dict.fromkeys(("parameters", "slots", "buffers", *GENERATORS), "same")
FIRST = {
    "a": [
        Line(step, KEPT, [{"input of a": "x"}, {"input of b": f"batch {step}"}], {"lr": "0.1"}, KEPT)
        for step in range(1, 9)
    ]
}
ALL = (*KINDS, *GENERATORS)


def restarted(step: int, **changes: object) -> dict[str, list[Line]]:
    """Return the lines after a restart that continues with step 5, and from `step` on with these fields."""
    lines = FIRST["a"][4:]
    return {"a": [replace(line, **changes) if line.step >= step else line for line in lines]}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"before": {**KEPT, "slots": "other"}}, "state", "the optimizer's state are not those of step 4"),
        ({"rates": {"lr": "0.2"}}, "rates", "with lr = 0.2, not 0.1"),
        (
            {"inputs": [{"input of a": "other"}, {"input of b": "batch 5"}]},
            "inputs",
            "the first batch after the restart is another one: that of step 5",
        ),
        (
            {"inputs": [{"input of a": "x"}, {"input of b": "other"}]},
            "inputs",
            "input of b is another one at step 5",
        ),
        (
            {"inputs": [{"input of b": "batch 5"}, {"input of a": "x"}]},
            "inputs",
            "in step 5 modules were called in another order",
        ),
        ({"before": {**KEPT, "torch": "other"}}, "random", "the random generator of torch"),
        ({"after": {**KEPT, "parameters": "other"}}, "result", "began with the same state, batch"),
        (
            {"after": {**KEPT, "parameters": "other"}, "inputs": []},
            "result",
            "the same state, learning rate and",
        ),
    ],
)
def test_each_kind_has_its_reason(changes: dict[str, object], kind: str, words: str) -> None:
    cause = cause_after_restart(FIRST, restarted(5, **changes), ALL)
    assert cause is not None
    assert (cause.kind, cause.step) == (kind, 5)
    assert words in cause.reason
    assert cause.remedy


def test_an_earlier_cause_explains_a_later_one() -> None:
    other = {**KEPT, "parameters": "other"}
    cause = cause_after_restart(FIRST, restarted(6, rates={"lr": "0.2"}, inputs=[], after=other), ALL)
    assert cause is not None
    assert (cause.kind, cause.step) == ("rates", 6)


def test_calls_before_the_restart_are_not_missed() -> None:
    """A call right after a step, such as an evaluation, is not made again by the restart."""
    again = restarted(9)
    again["a"][0] = replace(again["a"][0], inputs=[{"input of b": "batch 5"}])
    assert cause_after_restart(FIRST, again, ALL) is None
    again["a"][1] = replace(again["a"][1], inputs=[{"input of b": "batch 6"}])
    cause = cause_after_restart(FIRST, again, ALL)
    assert cause is not None
    assert (cause.kind, cause.step) == ("inputs", 6)


def test_only_what_undisturbed_runs_have_in_common_is_compared() -> None:
    second = {
        "a": [replace(line, after={**KEPT, "python": str(line.step), "buffers": "b"}) for line in FIRST["a"]]
    }
    comparable = alike(FIRST, second)
    assert set(comparable) == {"state", "rates", "inputs", "random", "torch", "cuda", "numpy"}
    again = restarted(5, after={**KEPT, "python": "other", "buffers": "c"})
    assert cause_after_restart(FIRST, again, comparable) is None


def test_undisturbed_runs_that_differ() -> None:
    def cause(**changes: object) -> tuple[str, int | None] | None:
        found = cause_undisturbed(FIRST, {"a": [replace(line, **changes) for line in FIRST["a"]]})  # type: ignore[arg-type]
        return None if found is None else (found.kind, found.step)

    assert cause() is None
    assert cause(after={**KEPT, "python": "other"}) is None  # which nobody seeds
    assert cause(inputs=[{"input of a": "x"}, {"input of b": "other"}]) == ("inputs", 1)
    assert cause(after={**KEPT, "torch": "other", "parameters": "other"}) == ("random", 1)
    assert cause(after={**KEPT, "parameters": "other"}) == ("result", 1)
