"""When a loop is done with a step, what a checkpoint gets of that moment, and whether a resumed loop continues there.

A loop that reads `Session.batches` is done when it asks for the next batch. Any other is taken to be done when the next
forward pass in training begins, or the next optimizer's step where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from scarctl.adapter import Adapter, loop_known
from scarctl.caveats import Caveats
from scarctl.dtypes import plain, torched
from scarctl.extras import encode
from scarctl.gate import SETTLE, Gate
from scarctl.loop import Loop
from scarctl.moment import Moment
from scarctl.witness import Witness

LOOP = "loop"
"""The position's field of a checkpoint's extras."""
_ASKS = 8.0
"""Seconds after a step that a flush waits for a loop with `batches` to ask for the next one."""
_COMES = 1.0
"""Seconds that it waits for the next forward."""
_CHECKED = 3
"""Steps at whose ends extras are looked at for what changes after them."""


class Progress:
    """One session's."""

    def __init__(
        self,
        adapter: Adapter,
        gate: Gate,
        caveats: Caveats,
        rank: int,
        head_step: Callable[[], int],
        doubt: Callable[[Iterable[str]], None],
        *,
        hooked: bool,
        framework: bool,
    ) -> None:
        """hooked: steps are seen to begin and to end. framework: one owns the loop, and says where it is; so
        do extras that have an attribute `owns_loop`.

        doubt: called with the reasons why the loop did not continue."""
        self._adapter = adapter
        self._known = loop_known(adapter)
        self._gate = gate
        self.caveats = caveats
        self._head_step = head_step
        self._doubt = doubt
        self._hooked = hooked
        if self._known is not None:
            mine = (*self._known.early_extras().values(), *self._known.late_extras().values())
            framework = framework or any(getattr(item, "owns_loop", False) for item in mine)
        self.framework = framework
        self.loop = Loop(self, rank)
        self.witness = Witness(
            self._known.modules if self._known is not None else None, rank, framework=framework
        )
        self._newest: Moment | None = None
        self._ended: Any = None
        """Light extras at the newest step's end."""
        self._usual: list[bool] | None = None
        """Which of them the loop changed after a step."""
        self._checks = _CHECKED

    @property
    def head_step(self) -> int:
        """Iterations finished."""
        return self._head_step()

    # -- what happens in the loop -------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        """Seconds after a step in which the loop may still be changing what belongs to it."""
        if self.loop.used:
            return _ASKS
        return _COMES if self._hooked and self.witness.looks else SETTLE

    @property
    def reads_early(self) -> bool:
        """Whether the extras of a step's end are to be read right then."""
        return not self.loop.used

    def step_ended(self, step: int, moment: Moment | None) -> None:
        """Step `step` is over; moment: of its end, if it was taken."""
        self._newest = moment
        if moment is not None:
            moment.settled = not self.loop.used and not self._hooked
            self._ended = self._light()
        self.caveats.withdraw("not-settled")
        self.witness.begin(step, self._forward_begins)

    def step_begins(self) -> None:
        """The next step is about to change parameters."""
        self.witness.step_begins()
        moment = self._newest
        if moment is not None and not self.loop.used:
            moment.settled = True
            self._look_for_skipped(moment)

    def _look_for_skipped(self, moment: Moment) -> None:
        """Has a gradient scaler been updated since the loop was done with the step, and no step was taken?"""
        if self._known is None or moment.light is None or self._known.early_extras():
            return
        scales = [state for name, state in moment.light if name == "scaler" and state]
        if scales and not _equal(plain(scales), plain([s for n, s in self._light() if n == "scaler"])):
            self.caveats.say(
                "step-skipped",
                "the gradient scaler has skipped a step: session.head_step does not count it, and no extras say which "
                "batch comes next. Count the batches in extras, or read them from session.batches()",
            )

    def settled(self) -> None:
        """See `Host`."""
        if self.witness.seen(self.head_step):
            self.caveats.say(
                "fetched-ahead",
                "the loop asks for a batch while it still has one to use, or runs the model in training mode after the "
                "step: what it has at hand then is lost when it stops. Ask for each batch right before it is used",
            )
        with self._gate.held():
            moment = self._newest
            if moment is not None and moment.step == self.head_step:
                moment.early = plain(self._adapter.capture_early())
                moment.light = self._light()
                moment.position = self.loop.position(moment.step)
                moment.settled = True
                if self.loop.between_passes:
                    moment.late = plain(self._adapter.capture_late())
        self._gate.settled(_COMES if self.witness.looks else 0.0)

    def handed_out(self) -> None:
        """See `Host`."""
        self.witness.given(self.head_step)

    def _forward_begins(self) -> None:
        with self._gate.held():
            moment = self._newest
            if moment is not None and not self.loop.used and self._hooked:
                moment.light = self._light()
                moment.settled = True
                self._compare(moment)
        self._gate.settled()
        positioned = self._known is not None and bool(self._known.early_extras())
        found = self.witness.differences(by_hand=not self.loop.used, positioned=positioned)
        if found:
            self._doubt(found)

    def _compare(self, moment: Moment) -> None:
        """What does the loop change after a step?"""
        if self._checks <= 0 or self._known is None or self.framework:
            return
        self._checks -= 1
        self._usual = _changed(self._ended, moment.light)
        before = moment.early["extras"] if moment.early is not None else {}
        now = self._adapter.capture_early()["extras"]
        for name, item in self._known.early_extras().items():
            if isinstance(item, dict | np.random.Generator | torch.Generator) or hasattr(item, "__iter__"):
                continue  # a position, which the next batch changes
            if name in before and not _equal(before[name], plain(now[name])):
                self.caveats.say(
                    f"changes-late:{name}",
                    f"the loop changes extras[{name!r}] after the optimizer's step, and what is saved of it is of "
                    "before that: pass it in after_step, or read the data from session.batches()",
                )

    # -- checkpoints --------------------------------------------------------------------------------------------

    def as_it_is(self, moment: Callable[..., Moment | None]) -> Moment | None:
        """The moment that a checkpoint of now is of. moment: takes one."""
        newest = self._newest
        if (
            newest is not None
            and self.loop.used
            and newest.step == self.head_step
            and newest.position is not None
        ):
            return newest
        return moment()

    def extras(self, moment: Moment) -> dict[str, Any]:
        """Fields of a checkpoint's extras, of the step of `moment`."""
        if self._is_settled(moment):
            self.caveats.withdraw("not-settled")
        else:
            self.caveats.say(
                "not-settled",
                f"step {moment.step} was saved before the loop was done with it: a schedule or an average that it "
                "changes after the step may be one step behind",
            )
        early = moment.early if moment.early is not None else plain(self._adapter.capture_early())
        late = moment.late if moment.late is not None else plain(self._adapter.capture_late())
        if moment.light is not None and self._known is not None:
            late = plain(self._known.with_light(late, moment.light))
        found = {"early": early, "late": late, **self.witness.to_extras(moment.step)}
        if self.loop.used:
            found[LOOP] = plain(moment.position or self.loop.position(moment.step))
        return found

    def _is_settled(self, moment: Moment) -> bool:
        if moment.settled or self._known is None or self.framework:
            return True
        if self.loop.used:
            return False
        if self._usual is None:
            return not self._known.late_extras()
        # It is done with the step if all has changed that usually does.
        return _changed(self._ended, self._light()) == self._usual

    def _light(self) -> Any:
        return self._known.capture_light() if self._known is not None and self._hooked else None

    # -- resuming -----------------------------------------------------------------------------------------------

    def restore(self, extras: Any, step: int, *, exact: bool) -> None:
        """The state is that of `step`, with these extras."""
        position: Any = torched(extras.get(LOOP)) if isinstance(extras, Mapping) else None
        self.loop.restore(position, step)
        if exact:
            self.witness.expect(extras, step)

    def resumed(self, step: int, moment: Moment | None) -> None:
        """The loop may continue after `step`; moment: of now."""
        self._newest = moment
        if moment is not None and self.loop.resumed:
            moment.position = self.loop.position(step)
        self.witness.begin(step, self._forward_begins)

    def close(self) -> None:
        """Look no more."""
        self.witness.stop()


def _changed(before: Any, after: Any) -> list[bool] | None:
    if before is None or after is None:
        return None
    return [not _equal(plain(first), plain(last)) for first, last in zip(before, after, strict=True)]


def _equal(first: Any, last: Any) -> bool:
    (text, tensors), (other, others) = encode(first), encode(last)
    return text == other and all(bytes(tensors[name].data) == bytes(others[name].data) for name in tensors)
