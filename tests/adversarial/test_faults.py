"""Run a few of the cases of `tests.adversarial.faults`."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.adversarial.faults import Attack, Case
from tests.support.proxy import Proxy

ONE_CALL = [
    Case(1, "local", "ENOSPC", "write", 3),
    Case(2, "local", "EMFILE", "writer", 5),
    Case(3, "local", "EIO", "create_exclusive", 3),
    Case(4, "local", "EIO", "created", 3),
    Case(5, "local", "EROFS", "commit", 5, mended=False),
    Case(6, "local", "EDQUOT", "delete", 1),
    Case(7, "local", "EMFILE", "files", 2),
    Case(8, "local", "ENOSPC", "write", 3),
    Case(9, "local", "EIO", "write", 5, encoding="bfloat16"),
]
OFTEN = [Case(20, "local", "EIO"), Case(21, "local", "mixed", rate=0.3, mended=False, encoding="bfloat16")]
REMOTE = [Case(30, "s3", "mixed", rate=0.3), Case(31, "s3", "no answer", mended=False, outage=True)]


def test_every_name_of_an_errno_is_one() -> None:
    assert {case.what for case in ONE_CALL} <= set(errno.errorcode.values())


def test_a_disk_that_fails(tmp_path: Path) -> None:
    with ExitStack() as stack:
        attack = Attack(0, tmp_path, stack)
        for case in ONE_CALL + OFTEN:
            attack.play(case)
    counts = attack.outcome.counts
    assert counts["not reached"] <= 3
    assert counts["faults"] > 10
    assert counts["partitions compared"] > 300


@pytest.mark.slow
@pytest.mark.parametrize("case", REMOTE, ids=lambda case: f"{case.what}, {case.number}")
def test_a_server_that_fails(tmp_path: Path, s3_place: object, wire: Proxy, case: Case) -> None:
    with ExitStack() as stack:
        attack = Attack(0, tmp_path, stack, wire)
        attack.play(case)
    assert attack.outcome.counts["faults"] > 0
    assert attack.outcome.counts["partitions compared"] > 30
