"""List every study of docs/paper.md, run its trials, and keep them."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from scarctl.simulate.intervals import Mean, mean_of
from scarctl.simulate.results import Results
from scarctl.simulate.study import Cell, Study
from scarctl.simulate.summary import Summary, summarise
from scarctl.simulate.trial import Known, run_trial
from scarctl.simulate.workload import Workload, load, source_digest

ONE, HALF, QUARTER, EIGHTH = (Fraction(1, n) for n in (1, 2, 4, 8))
INTERVAL = 8
INTERVALS = (8, 16, 32)
POLICIES = ("priority", "round", "random")
"""The policies of the paper's figure 8."""
PICTURE = "figure8"
"""The study of the paper's figure 8, of which only a picture is made: it gets a third of the trials."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A model and its data."""

    name: str
    title: str
    workload: str
    target: float | None = None
    """Criterion at which a run ends; None: the workload's."""
    smooth: int = 1
    """Iterations over which the metric is averaged, where single batches move it by more than failures do."""
    intervals: tuple[int, ...] = INTERVALS


PAIRS = (
    Pair("mlr", "MLR on MNIST", "examples.paper.mlr:build"),
    Pair("als", "MF on MovieLens", "examples.paper.als:build"),
    # After 12 iterations a longer interval leaves nothing but a restart to compare with.
    Pair("lda", "LDA on Reuters", "examples.paper.lda:build", intervals=INTERVALS[:1]),
    Pair("cnn-shard", "CNN by shard on MNIST", "examples.paper.cnn:by_shard", 0.4, 8),
    Pair("cnn-layer", "CNN by layer on MNIST", "examples.paper.cnn:by_layer", 0.4, 8),
)


def pairs(*, quick: bool) -> list[Pair]:
    """Return all pairs; `quick`: with criteria that are met after ten or twenty iterations."""
    if not quick:
        return list(PAIRS)
    targets = {"mlr": 6e4, "cnn-shard": 2.28, "cnn-layer": 2.28}
    return [replace(pair, target=targets.get(pair.name), intervals=INTERVALS[:1]) for pair in PAIRS]


def studies(pair: Pair, data: str, *, quick: bool) -> dict[str, Study]:
    """Return the measurements of a pair, by name."""
    short = 10 if quick and pair.target is None else None
    common: dict[str, Any] = {
        "workload": pair.workload,
        "data": data,
        "target": pair.target,
        "iterations": short,
        "interval": INTERVAL,
        "smooth": pair.smooth,
        "stratify": True,
    }
    best: dict[str, Any] = {**common, "fractions": (EIGHTH,), "policies": ("priority",)}
    both = {"fractions": (ONE, EIGHTH)}
    result = {
        "policies": Study(**{**common, **both, "policies": ("aged", *POLICIES)}),
        "lost": Study(**common, lost=(QUARTER, HALF, 1 - QUARTER), fractions=(ONE,)),
    }
    if pair.name == "als" or pair.name.startswith("cnn"):
        result["curved"] = Study(**{**best, "workload": f"{pair.workload}_curved"})
    if pair.name == "lda":
        result["resampled"] = Study(**{**best, "workload": "examples.paper.lda_resampled:build"})
    if pair.name == "als":
        result["only-r"] = Study(**{**best, "workload": "examples.paper.als:build_only_r"})
    for interval in pair.intervals:
        result[f"interval-{interval}"] = Study(**{**best, **both, "interval": interval})
    result[PICTURE] = Study(**common, policies=POLICIES, **(both if quick else {}))
    return result


class Runs:
    """Runs studies one after the other, and keeps every trial in a folder: a second run continues from there."""

    def __init__(self, folder: Path, trials: int | None) -> None:
        """`trials`: of every study that a table shows. None: run nothing, and take what is kept."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._trials = folder, trials
        self._known: dict[str, Known] = defaultdict(Known)
        """By the name of the pair, all of whose workloads train alike."""
        self._results: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._cells: dict[tuple[str, str], list[Cell]] = {}
        self.seconds = 0.0
        """Processor time of the trials that were run now."""

    def measure(self, pair: Pair, name: str, study: Study) -> Summary | None:
        """Summarise all trials of the study that are kept, if they are more. None without any."""
        trials = self._trials or 0
        trials = min(trials, max(2, trials // 3)) if name == PICTURE else trials
        path = self._folder / f"{pair.name}-{name}.jsonl"
        if not trials and not path.exists():
            return None
        kept = Results(path, {**study.to_json(), "source": source_digest(study.workload)})
        begun = time.process_time()
        try:
            for trial in range(trials):
                if trial not in kept.by_trial:
                    workload = _workload(study.workload, study.data)
                    kept.add(run_trial(study, workload, trial, self._known[pair.name]))
        finally:
            kept.close()
        taken = time.process_time() - begun
        self.seconds += taken
        if trials:
            print(
                f"{pair.name} {name}: {trials} trials, {taken:.0f} s of processor time now",
                file=sys.stderr,
                flush=True,
            )
        self._cells[pair.name, name] = study.cells()
        results = self._results[pair.name, name] = [kept.by_trial[trial] for trial in sorted(kept.by_trial)]
        return summarise(study, results) if results else None

    def results(self, pair: str, name: str) -> list[dict[str, Any]]:
        """Return the trials that study `name` was measured by."""
        return self._results.get((pair, name), [])

    def versus(self, pair: str, mine: tuple[str, Cell], usual: tuple[str, Cell]) -> Mean:
        """Return how much more a cell of a study costs than one of another, in the failures that both have."""
        reworks = []
        for name, cell in (mine, usual):
            k = self._cells[pair, name].index(cell)
            reworks.append(
                {(r["trial"], r["failed_after"]): r["rework"][k] for r in self.results(pair, name)}
            )
        both = sorted(reworks[0].keys() & reworks[1].keys())
        return mean_of(np.array([reworks[0][at] - reworks[1][at] for at in both], np.float64))


@cache
def _workload(name: str, data: str | None) -> Workload:
    return load(name, data)
