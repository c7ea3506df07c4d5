"""No optimizer of torch's is resumed otherwise than said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.optimizers.sweep import EXACT, Case, deterministic, outcome
from tests.optimizers.torchs import cases


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_configuration_is_exact(case: Case, tmp_path: Path) -> None:
    with deterministic():
        assert outcome(case, tmp_path) == (EXACT, "")
