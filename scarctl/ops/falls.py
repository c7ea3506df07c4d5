"""Put the steps that were lost into the history of a run: its samples end at the checkpoint that was resumed from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scarctl.state.journal import Event, Sample
from scarctl.store.saved import parse


def with_falls(samples: Iterable[Sample], events: Iterable[Event]) -> list[Sample]:
    """Return the samples in the order of time, with three more for every resume that has lost steps.

    One is the newest step that was finished before, at about the time of the death: the run's pace until then gives
    that. The second is the step of the resume at the same time, and the third that at the time of the resume.
    """
    known = sorted(samples)
    found = list(known)
    begun = float("-inf")
    for event in events:
        moment, reached = parse(event.at), event.facts.get("reached")
        if event.kind != "resumed" or moment is None:
            continue
        resumed = moment.timestamp()
        earlier = [one for one in known if begun <= one.seconds <= resumed and one.head <= event.step]
        begun = resumed
        if type(reached) is not int or reached <= event.step or not earlier:
            continue
        last, died = earlier[-1], _death(earlier, reached, resumed)
        back = last._replace(
            head=event.step, copied=min(last.copied, event.step), durable=min(last.durable, event.step)
        )
        found += [
            last._replace(seconds=died, head=reached),
            back._replace(seconds=died),
            back._replace(seconds=resumed),
        ]
        found.sort(key=lambda one: one.seconds)  # stable: a fall stays a fall
    return found


def _death(earlier: Sequence[Sample], reached: int, resumed: float) -> float:
    """Return about when step `reached` ended, as Unix time; the resume's if the pace is unknown."""
    first, last = earlier[0], earlier[-1]
    if last.head <= first.head:
        return resumed
    pace = (last.seconds - first.seconds) / (last.head - first.head)
    return min(resumed, last.seconds + pace * (reached - last.head))
