"""Loops with one defect each, as a framework's adapter would be one. The conformance suite has to find them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import scarctl
import scarctl.api
from scarctl.testing import Visit
from tests.adapters.torch.test_conformance import TorchTraining


class Loop(TorchTraining):
    """The loop of the torch suite in its parts."""

    def run(
        self,
        store: Path,
        until: int,
        visit: Visit,
        *,
        resume: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        extras = {"position": self.position}
        session = scarctl.attach(
            self.model,
            self.optimizers,
            store=store,
            schedulers=self.schedulers,
            extras=extras,
            **options,
        )
        try:
            self.begin(session, resume)
            visit(session)
            while session.head_step < until:
                self.step()
                self.step_done(session)
                visit(session)
        except BaseException as error:
            if not self.failed(error):
                raise
        finally:
            self.end(session)

    def begin(self, session: scarctl.Session, resume: Mapping[str, Any]) -> None:
        session.resume(**resume)

    def step_done(self, session: scarctl.Session) -> None: ...

    def failed(self, error: BaseException) -> bool:
        return False

    def end(self, session: scarctl.Session) -> None:
        session.close()


class NeverCloses(Loop):
    """The session is left to the end of the process."""

    left: ClassVar[list[scarctl.Session]] = []

    def end(self, session: scarctl.Session) -> None:
        self.left.append(session)


class KeepsSession(Loop):
    """The loop remembers its session."""

    def end(self, session: scarctl.Session) -> None:
        session.close()
        self.session = session


class NeverSeals(Loop):
    """What is not saved yet when the loop ends is not saved."""

    def step_done(self, session: scarctl.Session) -> None:
        session._finish()
        assert session._started().saver.drain(60)  # else it is up to the store what the last step may save

    def end(self, session: scarctl.Session) -> None:
        session.close(seal=False)


class SwallowsExceptions(Loop):
    """What a callback raises ends the loop, and nobody hears of it."""

    def failed(self, error: BaseException) -> bool:
        return True


class IgnoresSnapshot(Loop):
    """Resumes always from the newest state."""

    def begin(self, session: scarctl.Session, resume: Mapping[str, Any]) -> None:
        session.resume()


class WaitsForStore(Loop):
    """Every iteration has to be durable."""

    def step_done(self, session: scarctl.Session) -> None:
        session.checkpoint(wait=True)


class CountsItself(Loop):
    """The loop counts iterations beside the hooks."""

    def step_done(self, session: scarctl.Session) -> None:
        session.step()
