"""Provide loops with one defect each, as a framework's adapter might have. The conformance suite has to find them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import scarctl
import scarctl.api
from scarctl.testing import Visit
from tests.adapters.torch.test_conformance import TorchTraining


class Loop(TorchTraining):
    """The loop of the torch suite, split into its parts."""

    def run(
        self, store: Path, until: int, visit: Visit, *, resume: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        extras = {"position": self.position}
        session = scarctl.attach(
            self.model, self.optimizers, store=store, schedulers=self.schedulers, extras=extras, **options
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


class NeverSeals(Loop):
    """State that is not saved when the loop ends is never saved, and memory is gone."""

    def step_done(self, session: scarctl.Session) -> None:
        session._saving.finish()
        assert session._started().saver.drain(60)  # else it is up to the store what the last step may save

    def end(self, session: scarctl.Session) -> None:
        memory = session._started().arena.folder
        session.close(seal=False)
        shutil.rmtree(memory, ignore_errors=True)


class SwallowsExceptions(Loop):
    """An exception from a callback ends the loop without being reported."""

    def failed(self, error: BaseException) -> bool:
        return True


class IgnoresSnapshot(Loop):
    """The loop always resumes from the newest state."""

    def begin(self, session: scarctl.Session, resume: Mapping[str, Any]) -> None:
        session.resume()


class WaitsForStore(Loop):
    """The loop requires every iteration to be durable."""

    def step_done(self, session: scarctl.Session) -> None:
        session.checkpoint(wait=True)


class CountsItself(Loop):
    """The loop counts iterations without the hooks."""

    def step_done(self, session: scarctl.Session) -> None:
        session.step()
