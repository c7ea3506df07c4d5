"""Watch a failure, figure 9: LDA loses half of its documents after iteration 7.

The paper saves a quarter in every iteration, or everything in every fourth one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from examples.paper.lda import TopicModel
from examples.paper.studies import HALF, QUARTER
from scarctl.simulate.study import Study
from scarctl.simulate.trial import run_trial

FAILS_AFTER, INTERVAL = 7, 4
NAMES = ("rollback, all in every 4th", "SCAR, 1/4 in every")


@dataclass(frozen=True)
class Timeline:
    """The metric over iterations done."""

    undisturbed: list[float]
    ways: dict[str, list[tuple[float, float]]]
    """From the failure on."""
    rework: dict[str, int]


def timeline(folder: str, data: str) -> Timeline:
    """Watch one trial. `folder` is read, `data` only named."""
    study = Study(
        workload="examples.paper.lda:build",
        data=data,
        lost=(HALF,),
        fractions=(QUARTER,),
        policies=("priority",),
        interval=INTERVAL,
        fail_after=FAILS_AFTER,
    )
    watched = _Watched(folder)
    result = run_trial(study, watched, 0)
    # The first run is undisturbed, the second trains up to the failure, then comes one for each cell.
    undisturbed, _, *ways = filter(None, watched.runs)
    curves = {}
    for name, metrics in zip(NAMES, ways, strict=True):
        curves[name] = [(float(FAILS_AFTER + k), metric) for k, metric in enumerate(metrics, 1)]
    return Timeline(
        undisturbed[: result["undisturbed"]], curves, dict(zip(NAMES, result["rework"], strict=True))
    )


class _Watched(TopicModel):
    """Remembers its metrics, run by run."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.runs: list[list[float]] = []

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self.runs.append([])

    def recompute(self) -> None:
        """Called by `reset` and after each recovery, with which a run begins too."""
        super().recompute()
        if self.runs and self.runs[-1]:
            self.runs.append([])

    def metric(self) -> float:
        found: Any = super().metric()
        self.runs[-1].append(found)
        return float(found)
