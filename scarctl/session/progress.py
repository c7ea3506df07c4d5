"""Determine when a loop is done with a step, capture that moment for a checkpoint, and check a resumed position.

A loop that reads `Session.batches` is done when it requests the next batch. Any other loop counts as done when the next
forward pass in training mode begins, or, without one, the next optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from scarctl.adapter import Adapter, loop_known
from scarctl.checkpoint.randomness import Raw
from scarctl.checkpoint.step_end import Moment
from scarctl.session.gate import SETTLE, Gate
from scarctl.session.loader import OtherLoaders
from scarctl.session.loop import Loop
from scarctl.session.origin import Origin
from scarctl.session.witness import Witness
from scarctl.state.caveats import Caveats
from scarctl.state.codec import encode
from scarctl.state.extras import Extras
from scarctl.state.torch_dtypes import plain, private

_ASKS = 8.0
"""Seconds after a step that a flush waits for a loop with `batches` to request the next one."""
_COMES = 1.0
"""Seconds that it waits for the next forward pass."""
_REPLACED = "weights-replaced"
_WITHIN = "within-iteration"
_AFTERWARDS = "changed-afterwards"
_OUTSIDE = "outside-iteration"
_OUTSIDE_BLOCKS = (
    "step {step} was saved after the state had changed outside of session.iteration(), perhaps not completely. Put all "
    "that changes the state into such a block"
)
_FAILED = "iteration-failed"
_LATE = "end-not-kept"
_CHECKED = 3
"""Number of steps after which extras are checked for later changes."""
PASSING = ("resumed", "not-settled", _REPLACED, _WITHIN, _AFTERWARDS, _OUTSIDE, _FAILED, _LATE)
"""Kinds of caveats that do not outlast a step."""


class Progress:
    """The progress of one session's loop, which is the `Host` of `Loop`."""

    def __init__(
        self,
        adapter: Adapter,
        gate: Gate,
        caveats: Caveats,
        rank: int,
        origin: Origin,
        fault: Callable[[Exception], None],
        *,
        hooked: bool,
        framework: bool,
    ) -> None:
        """Begin before the first step.

        fault: called with the error of an object that cannot be read. hooked: whether hooks report the beginning and
        end of steps. framework: whether a framework owns the loop and restores its position. An attribute `owns_loop`
        of extras says so, too.

        origin: receives the reasons why the loop does not continue as the earlier run would have.
        """
        self.head_step = 0
        """Iterations finished."""
        self._adapter = adapter
        self._known = loop_known(adapter)
        self._light: Callable[[], Any] = lambda: None
        """Returns the late extras that the loop changes after a step: called twice in each."""
        if self._known is not None and hooked:
            self._light = self._known.capture_light
        self._scaled = self._known is not None and "scaler" in self._known.late_extras()
        """Whether steps may be skipped."""
        self._gate = gate
        self._held = gate.held()
        self.caveats = caveats
        self._origin = origin
        self._fault = fault
        self._hooked = hooked
        self.framework = framework or any(getattr(item, "owns_loop", False) for item in self._objects())
        self.loop = Loop(self, rank)
        modules = self._known.modules if self._known is not None else None
        self.witness = Witness(modules, rank, framework=self.framework)
        self._others = OtherLoaders()
        self._newest: Moment | None = None
        self._ended: Any = None
        """Light extras at the end of the newest step."""
        self._restored: Any = None
        """Light extras right after a resume."""
        self._usual: list[bool] | None = None
        """Whether the loop usually changes each of them after a step."""
        self._checks = _CHECKED
        self.end_copy: Callable[[], None] = lambda: None
        self.renew: Callable[[Moment], object] = lambda moment: None
        """Copies the buffers of a moment again, if the loop has changed them since."""
        self.keep: Callable[[], None] = lambda: None
        self.put_back: Callable[[], str | None] = lambda: None
        """See `scarctl.session.beginning`."""

    # -- events of the loop -------------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        """Seconds after a step in which the loop may still change state that belongs to the step."""
        if self.loop.used:
            return _ASKS
        if self._gate.blocks:
            return 0.0
        return _COMES if self._hooked and self.witness.looks else SETTLE

    def step_ended(self, step: int, moment: Moment | None) -> None:
        """Note that `step` has ended. moment: moment of its end, if it was captured."""
        self._newest = moment
        if moment is not None:
            moment.settled = not self.loop.used and not self._hooked
            try:
                self._ended = self._light()
            except Exception as error:
                self._ended = None
                self._fault(error)
        kept = moment.early if moment is not None else None
        rng = kept.get("rng") if isinstance(kept, dict) else None
        self.witness.first = self._before_forward if moment is not None and moment.buffers else None
        self.witness.begin(step, self._forward_begins, rng if isinstance(rng, Raw) else None)

    def step_begins(self) -> None:
        """Note that the next step is about to change parameters."""
        self.witness.step_begins()
        if self.loop.used and not self.framework:
            self._look_for_others()
        moment = self._newest
        if moment is not None and not self.loop.used:
            moment.settled = True
            if self._scaled:
                try:
                    self._look_for_skipped(moment)
                except Exception as error:
                    self._fault(error)

    def _look_for_others(self) -> None:
        """Detect that the loop reads another loader than those in `batches`, and that its position is not saved."""
        mine = self.loop.iterators()
        if mine is not None and self._others.advance(mine, self.head_step):
            text = "a DataLoader is read next to session.batches(), and which of its batches comes next is not saved"
            self.caveats.say("other-loader", f"{text}: read it from session.batches(), too")
            self.doubt(text)

    def _look_for_skipped(self, moment: Moment) -> None:
        """Detect that a gradient scaler skipped a step: it was updated, but no step was taken."""
        if self._known is None or moment.light is None:
            return
        scales = [state for name, state in moment.light if name == "scaler" and state]
        if not scales or self._known.early_extras():
            return
        if not _equal(plain(scales), plain([s for n, s in self._light() if n == "scaler"])):
            self.caveats.say(
                "step-skipped",
                "the gradient scaler has skipped a step: session.head_step does not count it, and no extras say which "
                "batch comes next. Count the batches in extras, or read them from session.batches()",
            )

    def settled(self) -> None:
        if not self.witness.trains(self.head_step):
            self.witness.restart(
                self.head_step
            )  # passes without gradients since the step measured statistics
        else:
            self.caveats.say(
                "fetched-ahead",
                "the loop requests a batch while it still has one to use, or runs the model with gradients after the "
                "step: batches requested ahead are lost when it stops. Request each batch right before it is used. "
                "Pass several optimizers to attach in the order in which they step",
            )
        with self._gate.held():
            moment = self._newest
            if moment is not None and moment.step == self.head_step:
                try:
                    self._settle(moment)
                except Exception as error:
                    self._fault(error)
        self._gate.settled(_COMES if self.witness.looks else 0.0)

    def _settle(self, moment: Moment) -> None:
        early, light = private(self._adapter.capture_early()), self._light()
        late = plain(self._adapter.capture_late()) if self.loop.between_passes else moment.late
        moment.begun = None
        # The moment is changed completely, or not at all.
        if moment.buffers:
            self.renew(moment)
        moment.weights.note()
        moment.early, moment.light, moment.late = early, light, late
        moment.position = self.loop.position(moment.step)
        moment.settled = True

    def handed_out(self) -> None:
        self.witness.given(self.head_step)

    def continues(self) -> None:
        moment = self._newest
        if moment is not None and moment.weights.replaced():
            self.doubt("weights were changed between resume() and the loop")
        if moment is not None and any(_changed(self._restored, self._light()) or ()):
            self.doubt("a schedule, a learning rate or an average was changed between resume() and the loop")

    def begins(self) -> None:
        self.end_copy()

    def repeating(self) -> None:
        try:
            self.keep()
        except Exception as error:
            self._fault(error)
            self.doubt(f"what the loop repeats before the first batch of an epoch is not undone: {error}")

    def repeated(self) -> None:
        if why := self.put_back():
            self.doubt(why)

    def doubt(self, reason: str) -> None:
        self._origin.doubt((reason,))

    def _before_forward(self) -> None:
        """Keep buffers that the loop has changed since the step, before a forward pass changes them."""
        moment = self._newest
        if moment is None or self.loop.used or not self._hooked:
            return
        with self._gate.held():
            try:
                self.renew(moment)
            except Exception as error:
                self._fault(error)

    def _forward_begins(self, trains: bool) -> None:
        with self._held:
            moment = self._newest
            # After a pass without gradients the loop may still write weights.
            if moment is not None and trains:
                moment.begun = moment.streams.mark()
            if moment is not None and not self.loop.used and self._hooked:
                try:
                    moment.weights.note()
                    moment.light = self._light()
                    moment.settled = True
                    if self._checks > 0:
                        self._compare(moment)
                except Exception as error:
                    self._fault(error)
        if not self.loop.used or self.witness.trains(self.head_step):
            self._gate.settled()
        if not self.witness.expecting:
            return
        positioned = self._known is not None and bool(self._known.early_extras())
        found = self.witness.differences(by_hand=not self.loop.used, positioned=positioned)
        if found:
            self._origin.doubt(tuple(found))

    def _compare(self, moment: Moment) -> None:
        """Compare extras, to find those that the loop changes after a step."""
        if self._known is None or self.framework:
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
                    f"the loop changes extras[{name!r}] after the optimizer's step, but its value from before "
                    "that is saved: pass scarctl.Extra(..., after_step=True), or read the data from session.batches()",
                )

    # -- checkpoints --------------------------------------------------------------------------------------------

    def settled_moment(self) -> Moment | None:
        """Return the moment at which the loop was done with the newest step. None: that moment is unknown."""
        newest = self._newest
        if newest is None or not self.loop.used or newest.step != self.head_step:
            return None
        return None if newest.position is None else newest

    def flushed(self, moment: Moment, *, changed: bool = False) -> None:
        """Check whether the live parameters, which are about to be saved, are those of the step of `moment`.

        changed: they are known not to be.
        """
        changed = changed or (moment is self._newest and moment.weights.replaced())
        if self._gate.torn or not changed:
            return
        if self._gate.blocks:
            self.caveats.say(_OUTSIDE, _OUTSIDE_BLOCKS.format(step=moment.step))
        else:
            self.caveats.say(
                _REPLACED,
                f"step {moment.step} was saved while other values were in place of its parameters, as when an average "
                "is evaluated. Those values are saved",
            )

    def afterwards(self, moment: Moment) -> None:
        """Note that the loop has changed the model of `moment` since its last batch."""
        self.caveats.say(
            _AFTERWARDS,
            f"the loop has changed the model after the last batch of step {moment.step}, as when it loads the best "
            "weights or measures statistics. It is saved so: a loop that resumes there continues from those values",
        )

    def torn(self, moment: Moment) -> None:
        """Note that a copy of the step of `moment` has what a block that raised has changed."""
        self.caveats.say(
            _FAILED,
            f"an iteration after step {moment.step} has raised an exception, and what it had changed by then is saved: "
            "check requests before session.iteration(), or finish each block",
        )

    def within(self, moment: Moment) -> None:
        """Note that `moment` was taken after the next iteration's forward pass had begun."""
        self.caveats.say(
            _WITHIN,
            f"step {moment.step} was saved after the next forward pass had begun. Random numbers, the position in the "
            "data and buffers are saved as that pass left them: save before it, or attach with flush_on_signal=True",
        )

    @property
    def between(self) -> bool:
        """Whether nothing shows that the loop has begun the next iteration."""
        return not (self.witness.seen(self.head_step) or (self.loop.in_use and not self.loop.usual))

    def late(self, moment: Moment) -> None:
        """Note that `moment` was taken at an unknown time after its step."""
        self.caveats.say(
            _LATE,
            f"the end of step {moment.step} was not kept, and the loop may have begun the next iteration: random "
            "numbers, the position in the data and buffers are saved as they were later, so a batch may be left out. "
            "With flush_on_signal=True each step's end is kept",
        )

    def extras(self, moment: Moment) -> Extras:
        """Return the extras of the adapter and the loop for the step of `moment`."""
        if self._is_settled(moment):
            self.caveats.withdraw("not-settled")
        else:
            self.caveats.say(
                "not-settled",
                f"step {moment.step} was saved before the loop was done with it: a schedule or an average that it "
                "changes after the step may be one step behind, or another step with the same batch is left out",
                once=True,
            )
        early = plain(moment.early if moment.early is not None else self._adapter.capture_early())
        late = moment.late if moment.late is not None else plain(self._adapter.capture_late())
        if moment.light is not None and self._known is not None:
            late = plain(self._known.with_light(late, moment.light))
        position: Any = plain(moment.position or self.loop.position(moment.step)) if self.loop.used else None
        with moment.alongside():
            following = self.witness.following(moment.step)
        return Extras(early, late, following=following, loop=position)

    def _is_settled(self, moment: Moment) -> bool:
        if moment.settled or self._known is None or self.framework:
            return True
        if self.loop.used:
            return False
        if self._usual is None:
            return not self._known.late_extras()
        # The loop is done with the step if everything has changed that usually does.
        return _changed(self._ended, self._light()) == self._usual

    # -- resuming -----------------------------------------------------------------------------------------------

    def restore(self, extras: Extras | None, step: int, *, exact: bool) -> None:
        """Continue after `step`, with these extras. None: nothing was saved."""
        self.head_step = step
        self.loop.restore(None if extras is None else extras.loop, step)
        if exact:
            self.witness.expect(None if extras is None else extras.following, step)

    def misfits(self) -> tuple[str, ...]:
        """Return why extras do not continue from their restored states: the attributes `misfit` of adapters' extras."""
        found = (getattr(item, "misfit", None) for item in self._objects())
        return tuple(reason for reason in found if isinstance(reason, str))

    def _objects(self) -> list[Any]:
        known = self._known
        return [] if known is None else [*known.early_extras().values(), *known.late_extras().values()]

    def resumed(self, step: int, moment: Moment | None) -> None:
        """Note that the loop may continue after `step`. moment: the current moment, if captured."""
        self._newest = moment
        self._restored = self._light() if moment is not None else None
        if moment is not None and self.loop.resumed:
            moment.position = self.loop.position(step)
        self.witness.begin(step, self._forward_begins)

    def close(self) -> None:
        """Stop observing the loop."""
        self.witness.stop()


def _changed(before: Any, after: Any) -> list[bool] | None:
    if before is None or after is None:
        return None
    return [not _equal(plain(first), plain(last)) for first, last in zip(before, after, strict=True)]


def _equal(first: Any, last: Any) -> bool:
    (text, tensors), (other, others) = encode(first), encode(last)
    return text == other and all(bytes(tensors[name].data) == bytes(others[name].data) for name in tensors)
