"""Find the first step at which two runs of a program differ, and the likeliest reason. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from scarctl.rehearse.records import GENERATORS, Line
from scarctl.util.document import Document

STATE, RATES, INPUTS, RANDOM, RESULT = "state", "rates", "inputs", "random", "result"
_CALLS = "calls"
KINDS = (STATE, RATES, INPUTS, RANDOM, RESULT)
"""What may differ at a step. An earlier one explains a later one."""
_STATE = ("parameters", "slots", "buffers")
_NAMED = {"parameters": "the parameters", "slots": "the optimizer's state", "buffers": "the buffers"}


Steps: TypeAlias = Mapping[str, Sequence[Line]]
"""The steps of each session, by its name."""


class _Difference(NamedTuple):
    kind: str
    step: int
    what: str
    theirs: Line
    ours: Line
    resumed: bool
    """Whether the step is the first after a restart."""


@dataclass(frozen=True, slots=True)
class Cause(Document):
    """The likeliest reason for a difference."""

    kind: str
    """What differed first: "state", "rates", "inputs", "random", "result", or "extras": only the end differs."""
    step: int | None
    """The first step that differs; None: no step does."""
    reason: str
    remedy: str


def cause_after_restart(first: Steps, again: Steps, comparable: Collection[str]) -> Cause | None:
    """Return why a run that was interrupted differs from an undisturbed one; None if no step does.

    comparable: what two undisturbed runs have in common, by `alike`.
    """
    found = _first(first, again, comparable)
    if found is None:
        return None
    kind, step, name, theirs, ours, resumed = found
    if kind == STATE and resumed:
        reason = (
            f"step {step} began with another state: {_which(theirs, ours)} are not those of step {step - 1}"
        )
        remedy = (
            "load weights, reset or convert parameters before resume(), not after it; "
            "give every optimizer and model that trains to attach"
        )
    elif kind == STATE:
        reason = f"{_which(theirs, ours)} were changed otherwise between the steps {step - 1} and {step}"
        remedy = "what changes them counts steps by itself: pass it to attach, in schedulers= or extras="
    elif kind == RATES:
        value, other = _shown(ours.rates.get(name)), _shown(theirs.rates.get(name))
        what = "the learning rate fell back" if name.startswith("lr") else "a hyperparameter fell back"
        reason = f"{what}: step {step} was made with {name} = {value}, not {other}"
        remedy = "pass the object that counts the steps to attach, in schedulers= or extras="
    elif kind == INPUTS and name == _CALLS:
        reason = f"in step {step} modules were called in another order, or another number of times"
        remedy = (
            "a counter of the loop's own, such as enumerate(), begins anew: count by session.head_step, or pass what "
            "counts to attach, in extras="
        )
    elif kind == INPUTS and name:
        reason = f"{name} is another one at step {step}; what modules got before it in this step is the same"
        remedy = (
            "it comes from a variable or an object that was not restored, such as a hidden state or a pool of images: "
            "pass it to attach, in extras="
        )
    elif kind == INPUTS:
        reason = (
            f"the {'first ' if resumed else ''}batch after the restart is another one: that of step {step}"
        )
        remedy = (
            "read the data from session.batches(loader), with the loader itself, and wrap what that returns: "
            "zip(session.batches(loader), ...); pass a source of data with a state of its own, such as a replay "
            "buffer, to attach, in extras="
        )
    elif kind == RANDOM:
        reason = f"the random generator of {name} is in another state at step {step}"
        remedy = (
            "draw nothing between resume() and the loop that an undisturbed run does not draw there; pass "
            "generators of your own to attach, in extras="
        )
    else:
        known = (
            "learning rate and random numbers"
            if not ours.inputs
            else "batch, learning rate and random numbers"
        )
        reason = f"step {step} began with the same state, {known}, and ended with another state"
        remedy = (
            "a tensor or an object that nobody saves takes part in it: register it as a buffer, or pass it to attach, "
            "in extras="
        )
        if not ours.inputs:
            remedy = f"read the data from session.batches(); otherwise {remedy}"
    return Cause(kind, step, reason, remedy)


def cause_undisturbed(first: Steps, second: Steps) -> Cause | None:
    """Return why two undisturbed runs differ; None if no step does."""
    # Other generators differ in most programs, which do not use them.
    found = _first(first, second, (*KINDS, "torch", "cuda"))
    if found is None:
        return None
    kind, step = found.kind, found.step
    if kind == INPUTS:
        reason = f"the batch of step {step} is another one in each run"
        remedy = "seed the order of the data: torch.manual_seed, and a generator= for the loader; read it in one order"
    elif kind == RANDOM:
        reason = f"the random generator of {found.what} is in another state at step {step}"
        remedy = "seed it: torch.manual_seed"
    elif kind == RATES:
        reason, remedy = (
            f"the learning rate of step {step} is another one",
            "let it depend on steps, and not on time",
        )
    else:
        reason = f"step {step} has another result, from the same batch and random numbers"
        remedy = (
            "seed the initial weights, and all random generators; use torch.use_deterministic_algorithms(True), with "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )
    return Cause(kind, step, reason, remedy)


def alike(first: Steps, second: Steps) -> tuple[str, ...]:
    """Return the kinds, and the random generators, in which two runs do not differ at any step."""
    found = [kind for kind in (STATE, RATES, INPUTS, RESULT) if _first(first, second, (kind,)) is None]
    generators = [name for name in GENERATORS if _first(first, second, (RANDOM, name)) is None]
    return (*found, *([RANDOM] if generators else []), *generators)


def _first(first: Steps, again: Steps, among: Collection[str]) -> _Difference | None:
    """Return the difference of the lowest step, and there of the first kind. among: kinds and generators."""
    found, generators = [], [one for one in GENERATORS if one in among]
    for name, lines in again.items():
        theirs = {line.step: line for line in first.get(name, ())}
        for line in lines:
            other = theirs.get(line.step)
            if other is not None:
                found += [
                    _Difference(kind, line.step, what, other, line, line is lines[0])
                    for kind, what in _differences(other, line, generators, resumed=line is lines[0])
                    if kind in among
                ]
    return min(found, key=lambda one: (one.step, KINDS.index(one.kind)), default=None)


def _differences(
    theirs: Line, ours: Line, generators: Sequence[str], *, resumed: bool
) -> Iterator[tuple[str, str]]:
    """Yield the kinds in which a step differs, and the name of what does.

    resumed: it is the first after a restart, so that calls right after the step before may be missing.
    """
    before = [(theirs.before, ours.before)] if theirs.before is not None and ours.before is not None else []
    if any(one[kind] != other[kind] for one, other in before for kind in _STATE):
        yield STATE, ""
    for name in generators:
        if any(one[name] != other[name] for one, other in (*before, (theirs.after, ours.after))):
            yield RANDOM, name
            break
    for name in dict.fromkeys([*ours.rates, *theirs.rates]):
        if theirs.rates.get(name) != ours.rates.get(name):
            yield RATES, name
            break
    calls = min(len(theirs.inputs), len(ours.inputs)) if resumed else 0
    if (calls or not resumed) and theirs.inputs[-calls:] != ours.inputs[-calls:]:
        yield INPUTS, _argument(theirs.inputs[-calls:], ours.inputs[-calls:])
    if any(theirs.after[kind] != ours.after[kind] for kind in _STATE):
        yield RESULT, ""


def _argument(theirs: Sequence[Mapping[str, str]], ours: Sequence[Mapping[str, str]]) -> str:
    """Return the first arguments that differ; "" if they are all of the step's first call: it is the batch."""
    if [[*one] for one in theirs] != [[*one] for one in ours]:
        return _CALLS
    for number, (one, other) in enumerate(zip(theirs, ours, strict=False)):
        names = [name for name in other if other[name] != one.get(name)]
        if names:
            return "" if not number and len(names) == len(other) else " and ".join(names)
    return ""


def _which(theirs: Line, ours: Line) -> str:
    one, other = theirs.before or {}, ours.before or {}
    return " and ".join(_NAMED[kind] for kind in _STATE if one.get(kind) != other.get(kind))


def _shown(value: str | None) -> str:
    """Return a hyperparameter with six digits at most, as its text has it if it is no number."""
    try:
        return f"{float(value or ''):.6g}"
    except ValueError:
        return value or "missing"
