"""Keep an actor's state over restarts, and answer each of its calls once.

    class Table:
        def __init__(self):
            self.rows = {"rows": numpy.zeros((1000, 16))}
            self.kept = Kept(self.rows, store="/shared/actors/table")

        @once
        def add(self, row, values):
            self.rows["rows"][row] += values

    table.add(3, values, call=("worker-7", 12))

A call is answered when the state after it, and its answer, are durable as one sealed checkpoint. A restarted actor
continues from the newest sealed checkpoint. If that includes a repeated call, the call gets its kept answer; otherwise
it is executed. In both cases it has changed the state once.

Actors of Ray: `scarctl_adapters.ray`. Everything here works without a framework.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import scarctl
from scarctl.errors import Contention, NoIntactCopy, UsageError
from scarctl.session.resumed import Resumed
from scarctl.state.codec import encode
from scarctl.state.torch_dtypes import plain
from scarctl.store import complete_sets

Call: TypeAlias = "tuple[str, int] | str"
"""Identity of a call: (caller, number), with numbers ascending by caller, or a string that no other call has."""

P = ParamSpec("P")
T = TypeVar("T")

ANSWERS = 1024
"""Number of kept answers to calls that have a string as identity."""
_PAUSE = 0.1


class Calls:
    """The answers to calls: the last one of every caller, and the newest ones of calls with a string as identity."""

    def __init__(self, limit: int = ANSWERS) -> None:
        """Keep the answers to `limit` calls with a string as identity."""
        self._limit = limit
        self._last: dict[str, tuple[int, Any]] = {}
        self._single: OrderedDict[str, Any] = OrderedDict()

    def find(self, call: Call) -> tuple[Any] | None:
        """Return the answer to a call in a tuple; None for a new call.

        Raises UsageError for a call older than its caller's last one: its answer is no longer kept.
        """
        if isinstance(call, str):
            return (self._single[call],) if call in self._single else None
        caller, number = call
        last, answer = self._last.get(caller, (-1, None))
        if number < last:
            raise UsageError(
                f"call {number} of {caller!r} comes after its call {last}: only the last answer is kept",
                hint="number the calls of a caller upwards, and repeat only the last one",
                kind="old-call",
            )
        return (answer,) if number == last else None

    def note(self, call: Call, answer: Any) -> None:
        """Keep the answer to a new call."""
        if isinstance(call, str):
            self._single[call] = answer
            while len(self._single) > self._limit:
                self._single.popitem(last=False)
        else:
            self._last[call[0]] = (call[1], answer)

    def state_dict(self) -> dict[str, Any]:
        """Return all answers."""
        return {"last": dict(self._last), "single": list(self._single.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the answers of `state_dict`."""
        self._last = {caller: (number, answer) for caller, (number, answer) in state["last"].items()}
        self._single = OrderedDict((call, answer) for call, answer in state["single"])


class Kept:
    """An actor's state in a store. Make it in the constructor, as the attribute `kept`, when the state is complete."""

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        store: str,
        every: int = 1,
        patience: float = 60.0,
        **options: Any,
    ) -> None:
        """Attach, and restore the state after the last call that is durable.

        model, optimizer: as for `scarctl.attach`.
        store: address of the store. With `member` in the options, members share it.
        every: calls from one sealed checkpoint to the next. With 1, each answer is durable. With n, a kill can lose
        n - 1 answered calls. No call is ever applied twice.
        patience: seconds to wait for an earlier process of this actor that holds the store.
        options: options of `scarctl.attach`, except hooks. An iteration is a call.

        Raises UsageError, and the errors of `scarctl.attach` and `Session.resume`.
        """
        if type(every) is not int or every < 1:
            raise UsageError(f"every is {every!r}", hint="give a number of calls, 1 or more")
        self._every, self._unsealed = every, 0
        self._calls = Calls()
        self._lock = threading.Lock()
        options["extras"] = {**(options.get("extras") or {}), "calls": self._calls}
        options["hooks"] = "off"
        deadline = time.monotonic() + patience
        while True:
            try:
                self.session = scarctl.attach(model, optimizer, store=store, **options)
                break
            except Contention:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)
        try:
            self.resumed = self._resume()
        except BaseException:
            self.session.close(seal=False)
            raise

    def _resume(self) -> Resumed:
        try:
            # Not the newest copy of every partition, because these can belong to several calls.
            return self.session.resume(mode="rollback")
        except NoIntactCopy as error:
            part = self.session.store.part
            of = None if part is None else part.shard
            if error.kind != "no-sealed-state" or complete_sets(self.session.store, of=of):
                raise
        # The process died before its first call was sealed. So no call was answered.
        self.session.supersede()
        return Resumed()

    @property
    def fencing_token(self) -> int:
        """See `Session.fencing_token`. A newer process of this actor has a larger one; 0 before the first call."""
        return self.session.fencing_token

    def run(self, call: Call, work: Callable[[], T]) -> T:
        """Return the answer to a call: the kept one if it was executed before, otherwise the result of `work`.

        Concurrent calls are executed one after the other.

        Raises the exception of `work`: then no answer is kept, but the changes of `work` until then remain. Raises
        UsageError for an answer that cannot be saved, and ScarError ("not-sealed") if the state is not finite. Raises
        Fenced if a newer process has taken over the store. Raises Unavailable if the answer is not durable yet: repeat
        the call.
        """
        _check(call)
        with self._lock:
            found = self._calls.find(call)
            if found is None:
                with self.session.iteration():
                    answer = work()
                    encode(plain(answer))
                    self._calls.note(call, answer)
                self._unsealed += 1
                found = (answer,)
                if self._unsealed < self._every:
                    return answer
            if self._unsealed >= self._every:
                if self.session.stepping:  # a later call has raised, and its changes remain
                    with self.session.iteration():
                        pass
                self.session.checkpoint(full=True, wait=True)
                self._unsealed = 0
            result: T = found[0]
            return result

    def close(self) -> None:
        """Seal the state, and release the store."""
        self.session.close()


def once(method: Callable[P, T]) -> Callable[P, T]:
    """Let a method of an object with a `Kept` as `self.kept` take `call=`, and execute each call once."""
    return answered_once(method, _required)


def answered_once(method: Callable[P, T], identify: Callable[[], Call]) -> Callable[P, T]:
    """Implement `once`. identify: returns an identity for a call without one."""

    @functools.wraps(method)
    def answer(*args: P.args, **kwargs: P.kwargs) -> T:
        call: Any = kwargs.pop("call", None)
        actor: Any = args[0]
        kept: Kept = actor.kept
        return kept.run(identify() if call is None else call, lambda: method(*args, **kwargs))

    return answer


def _required() -> Call:
    raise UsageError("this call has no identity", hint='add call=("caller", number)')


def _check(call: object) -> None:
    if isinstance(call, str) and call:
        return
    if (
        isinstance(call, tuple | list)
        and len(call) == 2
        and isinstance(call[0], str)
        and type(call[1]) is int
    ):
        return
    raise UsageError(
        f"call is {call!r:.80}", hint='give ("caller", number), or a string that no other call has'
    )
