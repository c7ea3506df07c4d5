"""Every study of docs/paper.md, and how its trials are run and kept."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from scarctl.simulate.intervals import Mean
from scarctl.simulate.results import Results
from scarctl.simulate.study import Study
from scarctl.simulate.summary import Summary, summarise
from scarctl.simulate.trial import run_trial
from scarctl.simulate.workload import Workload, load, source_digest

ONE, HALF, QUARTER, EIGHTH = (Fraction(1, n) for n in (1, 2, 4, 8))
INTERVAL = 8
INTERVALS = (8, 16, 32)
POLICIES = ("priority", "round", "random")
"""Those of the paper's figure 8."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A model and its data."""

    name: str
    title: str
    workload: str
    share: float
    """Trials, for each that was asked for: cheap models get more."""
    target: float | None = None
    """If not the workload's."""


PAIRS = (
    Pair("mlr", "MLR on MNIST", "examples.paper.mlr:build", 1),
    Pair("als", "MF on MovieLens", "examples.paper.als:build", 0.6),
    Pair("lda", "LDA on Reuters", "examples.paper.lda:build", 3),
    Pair("cnn-shard", "CNN by shard on MNIST", "examples.paper.cnn:by_shard", 0.4, 0.4),
    Pair("cnn-layer", "CNN by layer on MNIST", "examples.paper.cnn:by_layer", 0.4, 0.4),
)


def pairs(*, quick: bool) -> list[Pair]:
    """All of them; `quick`: with criteria that are met after ten or twenty iterations."""
    if not quick:
        return list(PAIRS)
    targets = {"mlr": 6e4, "cnn-shard": 2.28, "cnn-layer": 2.28}
    return [replace(pair, share=1, target=targets.get(pair.name)) for pair in PAIRS]


def studies(pair: Pair, data: str, *, quick: bool) -> dict[str, Study]:
    """What is measured of a pair, by name."""
    short = 10 if quick and pair.target is None else None
    common: dict[str, Any] = {
        "workload": pair.workload,
        "data": data,
        "target": pair.target,
        "iterations": short,
        "interval": INTERVAL,
    }
    best: dict[str, Any] = {**common, "fractions": (ONE, EIGHTH), "policies": ("priority",)}
    every = ("partial", "rollback", "extrapolate")
    result = {
        f"interval-{interval}": Study(**{**best, "interval": interval, "modes": every})
        for interval in (INTERVALS[:1] if quick else INTERVALS)
    }
    result["lost"] = Study(**common, lost=(QUARTER, HALF, 1 - QUARTER), fractions=(ONE,))
    some = {"fractions": (ONE, EIGHTH)} if quick else {}
    result["priority"] = Study(**common, policies=POLICIES, **some)
    if pair.name == "als" or pair.name.startswith("cnn"):
        result["curved"] = Study(**{**best, "workload": f"{pair.workload}_curved", "fractions": (EIGHTH,)})
    if pair.name == "lda":
        again = {"workload": "examples.paper.lda_resampled:build", "fractions": (ONE, EIGHTH)}
        result["resampled"] = Study(**{**best, **again})
    if pair.name == "als":
        result["only-r"] = Study(**{**best, "workload": "examples.paper.als:build_only_r"})
        # L is so small that all of it in every iteration is less than an eighth of both.
        alone = {
            "workload": "examples.paper.als:build_only_l",
            "interval": 1,
            "fractions": (ONE,),
            "modes": ("partial",),
        }
        result["only-l"] = Study(**{**best, **alone})
    return result


class Runs:
    """Runs studies one after the other, and keeps every trial in a folder: a second time it goes on from there."""

    def __init__(self, folder: Path, trials: int | None) -> None:
        """`trials`: for a pair whose share is 1. None: run nothing, and take what is kept."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._trials = folder, trials
        self._results: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.seconds = 0.0
        """Processor time of the trials that were run now."""

    def measure(self, pair: Pair, name: str, study: Study) -> Summary | None:
        """What the study shows: all trials that are kept, if they are more. None when there are none."""
        trials = max(2, round(pair.share * self._trials)) if self._trials else 0
        path = self._folder / f"{pair.name}-{name}.jsonl"
        if not trials and not path.exists():
            return None
        kept = Results(path, {**study.to_json(), "source": source_digest(study.workload)})
        begun = time.process_time()
        try:
            for trial in range(trials):
                if trial not in kept.by_trial:
                    kept.add(run_trial(study, _workload(study.workload, study.data), trial))
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
        results = self._results[pair.name, name] = [kept.by_trial[trial] for trial in sorted(kept.by_trial)]
        return summarise(study, results) if results else None

    def results(self, pair: str, name: str) -> list[dict[str, Any]]:
        """The trials that study `name` was measured by."""
        return self._results.get((pair, name), [])

    def beside(self, pair: str, name: str, usual: str) -> Mean | None:
        """How much less the first cell of study `name` costs than the first one of `usual`, in the same failures."""
        both = []
        for mine, theirs in zip(self._results[pair, name], self._results[pair, usual], strict=False):
            assert mine["failed_after"] == theirs["failed_after"], "same seed, same run"
            columns = {key: [theirs[key][0], mine[key][0]] for key in ("rework", "perturbation", "arrived")}
            both.append({**mine, **columns})
        return summarise(Study(workload="both:both", fractions=(ONE,)), both).cells[1].reduction


@cache
def _workload(name: str, data: str | None) -> Workload:
    return load(name, data)
