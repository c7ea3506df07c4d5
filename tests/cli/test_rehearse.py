"""`scarctl rehearse`: what it prints, and where it keeps the verdict. Whole rehearsals are in tests/rehearse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import scarctl
from scarctl.cli.main import cli
from scarctl.rehearse.reasons import Cause
from scarctl.rehearse.records import Attached, Difference
from scarctl.rehearse.rehearsal import Rehearsal, Rehearsed, RehearsedRun

CAUSE = Cause("rates", 21, "the learning rate fell back", "pass the object")
SAME = (
    RehearsedRun("undisturbed", None, (), None),
    RehearsedRun("SIGTERM", 20, (), None),
    RehearsedRun("kill -9", 16, (), None),
)
OTHER = tuple(Difference(f"layer{n}.weight", "1 of 2 values") for n in range(7))


def result(verdict: str, runs: tuple[RehearsedRun, ...], root: Path | None = None) -> Rehearsed:
    attached = Attached("a.0", "ckpt", "a", None if root is None else str(root), 1)
    at = "2026-11-22T10:00:00+00:00"
    return Rehearsed(verdict, 40, at, "python train.py", 20, 12, (), runs, (attached,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verdict", "runs", "code", "lines"),
    [
        (
            "identical",
            SAME,
            0,
            [
                "identical after 40 steps: 12 tensors and all extras; undisturbed twice, SIGTERM (continued after 20) "
                "and kill -9 (continued after 16), sent after step 20"
            ],
        ),
        (
            "different",
            (
                SAME[0],
                RehearsedRun("SIGTERM", 20, OTHER, CAUSE),
                RehearsedRun("kill -9", 16, OTHER[:1], CAUSE),
            ),
            4,
            [
                "different after 40 steps, of SIGTERM and kill -9 after step 20",
                "SIGTERM, continued after step 20:",
                *(f"  layer{n}.weight: 1 of 2 values" for n in range(5)),
                "  and 2 more",
                "  likeliest reason: the learning rate fell back",
                "  remedy: pass the object",
                "kill -9, continued after step 16:",
                "  layer0.weight: 1 of 2 values",
                "  likeliest reason: the learning rate fell back",
            ],
        ),
        (
            "not-deterministic",
            (
                RehearsedRun("undisturbed", None, OTHER[:1], CAUSE),
                RehearsedRun("SIGTERM", 20, OTHER, None),
                SAME[2],
            ),
            5,
            [
                "not deterministic: two undisturbed runs differ after 40 steps",
                "undisturbed:",
                "  layer0.weight: 1 of 2 values",
                "  likeliest reason: the learning rate fell back",
                "  remedy: pass the object",
            ],
        ),
    ],
)
def test_verdicts_and_exit_codes(
    verdict: str,
    runs: tuple[RehearsedRun, ...],
    code: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(Rehearsal, "run", lambda _, steps: result(verdict, runs))
    with pytest.raises(SystemExit) as end:
        cli.main(["rehearse", "--", "true"])
    assert end.value.code == code
    assert capsys.readouterr().out.splitlines() == lines


def test_status_and_resume_show_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    store = tmp_path / "ckpt"
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scarctl.attach(model, optimizer, store=store) as session:
        assert "rehearsed" not in str(session.resume())
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    monkeypatch.setattr(Rehearsal, "run", lambda _, steps: result("identical", SAME, store))
    with pytest.raises(SystemExit):
        cli.main(["rehearse", "--", "true"])
    assert not (tmp_path / "state").exists()  # it is in the store
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main(["status", str(store), "--json"])
    found = json.loads(capsys.readouterr().out)["stores"][0]["findings"]
    assert [one["message"] for one in found if one["kind"] == "rehearsed"] == [
        "rehearsed on 2026-11-22: identical after 40 steps"
    ]
    assert end.value.code == 0
    with scarctl.attach(model, optimizer, store=store) as session:
        assert str(session.resume()).endswith("; rehearsed on 2026-11-22: identical after 40 steps")


def test_a_verdict_that_cannot_be_kept_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("a file in place of the folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(Rehearsal, "run", lambda _, steps: result("identical", SAME, tmp_path / "none"))
    with pytest.raises(SystemExit) as end:
        cli.main(["rehearse", "--", "true"])
    assert end.value.code == 0
    assert "the verdict is not kept for ckpt" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
