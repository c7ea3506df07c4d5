"""What the author of an adapter describes: one small training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from scarctl.session import Session

Visit: TypeAlias = Callable[[Session], None]
"""What a training calls between two iterations. It may raise: then the training ends with that exception."""


class Training(ABC):
    """A training that is run, killed, resumed and looked at.

    Every new one is as a new process would make it: the same initial values, the same data, the same seeds of the
    global random generators. It is small: a few kB, and an iteration takes milliseconds. At least two groups have
    more than one row, every value that is trained changes in every iteration, and every iteration draws from all of
    the suite's `generators`.

    What the attributes of an instance refer to must be free when the instance is; see `AdapterConformance`.
    """

    @abstractmethod
    def run(
        self,
        store: Path,
        until: int,
        visit: Visit,
        *,
        resume: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Attach, resume, train until iteration `until` is finished (counted over restarts), and close.

        store, options: for `scarctl.attach`, or for whatever attaches in this framework. resume: arguments of
        `Session.resume`.
        visit: called with the session once it has resumed, before the first iteration, and then after every
            iteration: once per optimizer's step (of several optimizers: the last one's), when schedulers have stepped
            too, and nothing of the next iteration has happened yet.

        Lets every exception through, and has closed the session then, too. Keeps no reference to the session.
        """

    @abstractmethod
    def values(self) -> Mapping[str, Any]:
        """What a partial recovery restores: parameters, persistent buffers, optimizer's slots, by any names.

        Tensors or arrays, live or copied. Can be called at any time; slots that do not exist yet are left out.
        """

    def extras(self) -> Mapping[str, Any]:
        """What only resuming and rolling back restore: step counts, schedules, data position, by any names.

        Plain values, tensors or arrays, also nested. Can be called at any time. Without it there are none.
        """
        return {}
