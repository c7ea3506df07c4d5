"""Define the small training that the author of an adapter implements for the suite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from scarctl.session.session import Session

Visit: TypeAlias = Callable[[Session], None]
"""Called by a training between two iterations. An exception from it ends the training."""


class Training(ABC):
    """A training that the suite runs, kills, resumes and inspects.

    Every new instance equals that of a new process: the same initial values, the same data, the same seeds of the
    global random generators. It is small: a few kB, and an iteration takes milliseconds. At least two groups have
    more than one row. Every trained value changes in every iteration, and every iteration draws from all of the
    suite's `generators`.

    Objects that an instance's attributes refer to must be freed with the instance; see `AdapterConformance`.
    """

    @abstractmethod
    def run(
        self, store: Path, until: int, visit: Visit, *, resume: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        """Attach, resume, train until iteration `until` is finished (counted over restarts), and close.

        store, options: for `scarctl.attach`, or the function that attaches in this framework.
        resume: arguments of `Session.resume`.
        visit: called with the session before the first iteration, once it has resumed, and after every iteration. That
            is once per optimizer's step (of several optimizers: the last one's), after schedulers have stepped, and
            before the next iteration begins.

        Closes the session and lets every exception through. Keeps no reference to the session.
        """

    @abstractmethod
    def values(self) -> Mapping[str, Any]:
        """Return the values that a partial recovery restores, by any names: parameters, persistent buffers, slots.

        Tensors or arrays, live or copied. May be called at any time; slots that do not exist yet are left out.
        """

    def extras(self) -> Mapping[str, Any]:
        """Return the values that only resume and rollback restore, by any names: step counts, schedules, data position.

        Plain values, tensors or arrays, also nested. May be called at any time. Default: none.
        """
        return {}
