"""Test that a resume is inexact if extras of an adapter cannot continue from their restored state."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support import stepper


class Position:
    """A position among `parts` of the data."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.misfit: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["parts"] != self.parts:
            self.misfit = f"the data had {state['parts']} parts"


@pytest.mark.parametrize("parts", [2, 3])
def test_a_position_that_does_not_fit_is_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parts: int
) -> None:
    model, optimizer = stepper.build()
    with stepper.attach(model, optimizer, tmp_path / "store", extras={"position": Position(2)}) as session:
        optimizer.step()
        session.checkpoint(full=True, wait=True)
    model, optimizer = stepper.build()
    with (
        caplog.at_level(logging.WARNING, "scarctl"),
        stepper.attach(model, optimizer, tmp_path / "store", extras={"position": Position(parts)}) as session,
    ):
        resumed = session.resume()
        assert (resumed.step, resumed.exact) == (1, parts == 2)
        assert resumed.reasons == (() if parts == 2 else ("the data had 2 parts",))
        assert [caveat.kind for caveat in session.caveats] == ([] if parts == 2 else ["resumed"])
    assert ("not exact: the data had 2 parts" in caplog.text) == (parts == 3)
