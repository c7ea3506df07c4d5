"""Describe a study: the ways of saving and recovering to compare on the same failures."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from scarctl.config import NORMS
from scarctl.errors import UsageError
from scarctl.simulate.workload import check_name
from scarctl.util.document import Document, json_of

POLICIES = ("aged", "priority", "round", "random")
Mode: TypeAlias = Literal["partial", "rollback"]
MODES: tuple[Mode, ...] = ("partial", "rollback")
_MAX_PARTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Cell(Document):
    """One way of saving and recovering, and the lost share."""

    mode: Mode
    """"partial": restore the lost share from the running checkpoint. "rollback": restore everything from the
    newest full checkpoint."""
    policy: str
    """The policy of partial checkpoints, or "full" if every checkpoint saves everything."""
    fraction: Fraction
    """Share of the state that one checkpoint saves. The interval is scaled by it, so that bytes per time are equal."""
    lost: Fraction | None
    """Lost share of the state. None: a rollback does not depend on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Everything that the result of a trial depends on. Raises UsageError for bad values and combinations."""

    workload: str
    """`module:factory`."""
    data: str | None = None
    """Folder passed to the factory."""
    lost: tuple[Fraction, ...] = (Fraction(1, 2),)
    fractions: tuple[Fraction, ...] = (Fraction(1), Fraction(1, 2), Fraction(1, 4), Fraction(1, 8))
    policies: tuple[str, ...] = POLICIES
    modes: tuple[str, ...] = MODES
    interval: int = 8
    """Iterations between two full checkpoints (the paper's C); a fraction r is saved every rC."""
    failure_rate: float | None = None
    """Probability of the failure in each iteration. None: every iteration before convergence is equally likely."""
    fail_after: int | None = None
    """Iteration after which every run fails, instead of a random one."""
    stratify: bool = False
    """Spread the failures of each `interval` trials evenly over the time since a full checkpoint, which decides what a
    failure costs. The failure of one trial has the same distribution as without."""
    smooth: int = 1
    """Iterations over which the metric is averaged before it is compared with the target."""
    iterations: int | None = None
    """Iterations of an undisturbed run; None: the workload's."""
    target: float | None = None
    """Metric to reach; None: the workload's."""
    norm: str | None = None
    """Norm of distances; None: the workload's."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_name(self.workload)
        _some("lost", self.lost)
        _some("fraction", self.fractions)
        _known("policy", self.policies, POLICIES)
        _known("mode", self.modes, MODES)
        if self.interval < 1:
            raise UsageError(f"the interval is {self.interval} iterations", hint="give 1 or more")
        for fraction in self.fractions if set(self.modes) - {"rollback"} else ():
            if (self.interval * fraction).denominator != 1:
                raise UsageError(
                    f"a fraction of {fraction}, with full checkpoints every {self.interval} iterations, would be saved "
                    f"every {self.interval * fraction} iterations, which is not a whole number",
                    hint=f"give an --interval that is a multiple of {fraction.denominator}",
                )
        if self.failure_rate is not None and not 0 < self.failure_rate < 1:
            raise UsageError(f"the failure rate is {self.failure_rate}, not between 0 and 1")
        if self.fail_after is not None and self.fail_after < 1:
            raise UsageError(f"a failure after iteration {self.fail_after}", hint="give 1 or more")
        if self.fail_after is not None and self.failure_rate is not None:
            raise UsageError(
                f"a failure after iteration {self.fail_after} and one at a random iteration exclude each other",
                hint="give one of --fail-after and --failure-rate",
            )
        if self.fail_after is not None and self.stratify:
            raise UsageError(f"a failure after iteration {self.fail_after} cannot be spread over iterations")
        if self.smooth < 1:
            raise UsageError(f"the metric is averaged over {self.smooth} iterations", hint="give 1 or more")
        if self.iterations is not None and self.iterations < 2:
            raise UsageError(f"iterations is {self.iterations}", hint="give 2 or more")
        if self.target is not None and not math.isfinite(self.target):
            raise UsageError(f"the target is {self.target}, not a number to reach")
        if self.norm is not None and self.norm not in NORMS:
            raise UsageError(f"unknown norm {self.norm!r}", hint=f"use one of {', '.join(NORMS)}")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"the seed is {self.seed}", hint="give a whole number, 0 or more")

    def cells(self) -> list[Cell]:
        """Return the cells of a trial, in the order of its results."""
        cells = [Cell("rollback", "full", Fraction(1), None)] if "rollback" in self.modes else []
        for lost in self.lost if "partial" in self.modes else ():
            for fraction in self.fractions:
                policies = ("full",) if fraction == 1 else self.policies
                cells += [Cell("partial", policy, fraction, lost) for policy in policies]
        return cells

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, which `from_json` reads."""
        shares = {"lost": map(str, self.lost), "fractions": map(str, self.fractions)}
        found: dict[str, Any] = json_of(asdict(self) | {name: list(of) for name, of in shares.items()})
        return found

    @staticmethod
    def from_json(obj: dict[str, Any]) -> Study:
        """Return the study of a `to_json`."""
        tuples = {name: tuple(obj[name]) for name in ("policies", "modes")}
        shares = {name: tuple(Fraction(text) for text in obj[name]) for name in ("lost", "fractions")}
        return Study(**{**obj, **tuples, **shares})


def parse_share(text: str) -> Fraction:
    """Parse a share such as `1/2`, `0.5` or `12.5%`. Raises UsageError unless it is above 0 and at most 1."""
    try:
        number = text.strip()
        share = Fraction(number[:-1].strip()) / 100 if number.endswith("%") else Fraction(number)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not (0 < share <= 1 and share.denominator <= _MAX_PARTS):
        raise UsageError(
            f"{text!r} is not a share", hint="give a number above 0 and up to 1, such as 1/8 or 12.5%"
        )
    return share


def _some(name: str, values: tuple[Any, ...]) -> None:
    if not values:
        raise UsageError(f"no {name} is given")
    if len(set(values)) < len(values):
        raise UsageError(f"a {name} is given twice: {', '.join(map(str, values))}")


def _known(name: str, values: tuple[str, ...], known: tuple[str, ...]) -> None:
    _some(name, values)
    for value in values:
        if value not in known:
            raise UsageError(f"unknown {name} {value!r}", hint=f"use some of {', '.join(known)}")
