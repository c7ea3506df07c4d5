"""Test `scarctl simulate` through its processes: results, continuing after a kill, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from scarctl.simulate import workers
from scarctl.simulate.study import Study
from tests.cli.conftest import Done, Run
from tests.support.forkserver import Program

pytestmark = pytest.mark.usefixtures("forked")

WORKLOADS = "tests.simulate.workloads"
ROOT = Path(__file__).parents[2]
QUICK = ("--interval", 8, "--fraction", "1,1/8", "--policy", "priority", "--trials", 4)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the workloads of these tests importable in the processes of trials."""
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), path])))


class Forked(Program):
    """A process of a study with the interface of `subprocess.Popen`, which need not import torch for seconds."""

    def __init__(self, study: Study) -> None:
        given, stdin = os.pipe()
        stdout, told = os.pipe()
        try:
            super().__init__(
                ["-m", "scarctl.simulate.worker"],
                env={**os.environ, **workers._ONE_THREAD},
                cwd=Path.cwd(),
                stdin=given,
                stdout=told,
            )
        finally:
            os.close(given)
            os.close(told)
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
        self.stdin.write(json.dumps(study.to_json()) + "\n")
        self.stdin.flush()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run trials in forks. `test_a_killed_study_goes_on_where_it_was` starts real processes."""
    monkeypatch.setattr(workers.Workers, "_start", lambda self: Forked(self._study))


def simulate(run: Run, workload: str, *arguments: object, code: int = 0) -> Done:
    return run("simulate", f"{WORKLOADS}:{workload}", *QUICK, *arguments, code=code)


def test_the_document_is_the_same_however_many_processes_run_it(run: Run, tmp_path: Path) -> None:
    done = simulate(run, "quadratic", "--json", "--jobs", 1, "--plot", "study.svg")
    document = done.document
    assert document["command"] == "simulate"
    assert "predictions" not in document
    assert document["trials"] == 4
    assert [(cell["mode"], cell["policy"], cell["fraction"], cell["lost"]) for cell in document["cells"]] == [
        ("rollback", "full", 1.0, None),
        ("partial", "full", 1.0, 0.5),
        ("partial", "priority", 0.125, 0.5),
    ]
    for cell in document["cells"]:
        assert (cell["rework"]["low"], cell["rework"]["high"]) == (None, None), "of four trials"
    again = simulate(run, "quadratic", "--json", "--jobs", 3, "--plot", "study.svg").document
    assert again == document
    picture = xml.etree.ElementTree.parse(tmp_path / "study.svg")
    assert picture.getroot().tag.endswith("svg")
    texts = {element.text for element in picture.iter() if element.tag.endswith("text")}
    assert {"1", "1/8", "priority", "rollback"} <= texts
    assert len([e for e in picture.iter() if e.tag.endswith("circle")]) >= 2


def test_more_trials_go_on_from_the_same_file(run: Run, tmp_path: Path) -> None:
    simulate(run, "quadratic", "--results", "r.jsonl", "--jobs", 1)
    before = (tmp_path / "r.jsonl").read_bytes()
    done = simulate(run, "quadratic", "--results", "r.jsonl", "--trials", 6, "--jobs", 1, "--json")
    assert done.document["trials"] == 6
    assert (tmp_path / "r.jsonl").read_bytes().startswith(before)
    assert (tmp_path / "r.jsonl").read_bytes().count(b"\n") == 7
    refused = simulate(run, "quadratic", "--results", "r.jsonl", "--seed", 5, "--json", "--jobs", 1, code=2)
    assert refused.error["kind"] == "other-study"


def test_settings_of_runs_are_not_those_of_a_study(run: Run, tmp_path: Path) -> None:
    (tmp_path / "scarctl.toml").write_text(
        'interval = "auto"\nfraction = "1/3"\nmode = "rollback"\n[simulate]\nseed = 4\n'
    )
    given = ("--fraction", 1, "--trials", 1, "--jobs", 1, "--json")
    study = run("simulate", f"{WORKLOADS}:quadratic", *given).document["study"]
    assert (study["interval"], study["modes"], study["seed"]) == (8, ["partial", "rollback"], 4)


def test_predictions_beside_what_failures_cost(run: Run) -> None:
    given = ("--interval", 16, "--trials", 6, "--fail-after", 50, "--jobs", 1, "--predictions")
    found = simulate(run, "quadratic", *given, "--json").document["predictions"]
    by = {(row["basis"], row["cell"] and row["cell"]["policy"]): row for row in found["rows"]}
    assert set(by) == {(basis, p) for basis in ("distances", "ages") for p in ("full", "priority", None)}
    row = by["distances", "priority"]
    assert (row["failures"], row["estimates"]) == (6, 6)
    assert 0.5 < row["predicted"] / row["simulated"] < 2
    assert row["within_bound"] == 1
    assert [way["cell"]["policy"] for way in found["ways"]] == ["full", "priority"]
    assert all(min(w["partial"], w["rollback"]) <= w["auto"] for w in found["ways"])
    assert all(w["auto"] <= max(w["partial"], w["rollback"]) for w in found["ways"])
    text = simulate(run, "quadratic", *given).stdout
    assert re.search(r"^distances +priority 1/8 +1/2 +0 +6 of 6 ", text, re.MULTILINE)
    refused = simulate(run, "quadratic", *given, "--mode", "rollback", "--json", code=2)
    assert "only partial recoveries have predictions" in refused.error["message"]


def test_data_goes_to_the_factory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "iterations").write_text("30")
    done = simulate(run, "NeedsData", "--data", tmp_path, "--json", "--jobs", 1)
    assert done.document["undisturbed"] == 30


@pytest.mark.parametrize(
    ("workload", "arguments", "code", "kind", "says"),
    [
        ("quadratic", ["--interval", "4"], 2, "usage", "every 1/2 iterations"),
        ("quadratic", ["--plot", "nowhere/study.svg"], 2, "usage", "its folder does not exist"),
        ("quadratic", ["--target", "-1"], 2, "usage", "does not reach"),
        ("nothing_there", [], 2, "no-workload", "no function"),
        ("Raising", [], 1, "workload-failed", "ZeroDivisionError: seven"),
        ("Dying", [], 1, "worker-died", "by signal 9"),
    ],
)
def test_what_cannot_be_is_said(
    run: Run, workload: str, arguments: list[str], code: int, kind: str, says: str
) -> None:
    error = simulate(run, workload, *arguments, "--jobs", 1, "--json", code=code).error
    assert (error["kind"], says in error["message"]) == (kind, True), error
