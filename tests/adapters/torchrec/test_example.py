"""Test the example on MovieLens: only the killed rank's tables are restored from older copies."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed here: `make frameworks`")

ROOT = Path(__file__).parents[3]
DATA = ROOT.parent / "shared" / "data" / "movielens-small"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("usual_saver")
@pytest.mark.skipif(not DATA.exists(), reason=f"no MovieLens data in {DATA}")
def test_a_rank_of_the_example_is_killed() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "lost_rank.py"), "torchrec_movielens"]
    command += ["--kill", "--quick", "--ranks", "2", "--steps", "64", "--data", str(DATA)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(
        r"^lost 1 of 2 ranks \(1\); all ranks continue after step (\d+)$", done.stdout, re.MULTILINE
    )
    assert found is not None, done.stdout
    step = int(found[1])
    assert 40 <= step < 64
    assert re.search(rf"^0 +[1-9]\d* +0 +[\d.]+  {step}$", done.stdout, re.MULTILINE), done.stdout
