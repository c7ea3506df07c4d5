"""Test the example on MovieLens: only the killed rank's tables are restored from older copies."""

from __future__ import annotations

import re

import pytest

from tests.adapters.rank_checks import lost_rank
from tests.distributed.launch import ROOT

pytest.importorskip("torchrec", reason="TorchRec is not installed here: `make frameworks`")

DATA = ROOT.parent / "shared" / "data" / "movielens-small"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("usual_saver")
@pytest.mark.skipif(not DATA.exists(), reason=f"no MovieLens data in {DATA}")
def test_a_rank_of_the_example_is_killed() -> None:
    step, output = lost_rank("torchrec_movielens", 64, "--data", str(DATA))
    assert 40 <= step < 64
    assert re.search(rf"^0 +[1-9]\d* +0 +[\d.]+  {step}$", output, re.MULTILINE), output
