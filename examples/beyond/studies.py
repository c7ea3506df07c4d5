"""List every study of docs/beyond.md."""

from __future__ import annotations

from typing import Any

from examples.paper.studies import EIGHTH, ONE, POLICIES, Pair
from scarctl.simulate.study import Study

INTERVAL = 16
DEFAULT = "aged"
"""The policy of sessions that name none."""
SMOOTH = 8
"""Iterations over which the metric is averaged, so that no lucky batch ends a run."""
SLOTS = 3
"""Tensors of a row with Adam: the parameter and two moments. What they take is this many times the parameter alone."""
MOMENTS = ("kept", "zeroed", "stale")
SAMPLED = (8, 32)
"""One coordinate in so many."""

PAIRS = tuple(
    Pair(name, title, f"examples.beyond.workloads:{name}")
    for name, title in (
        ("embedding_adagrad", "Embedding, Adagrad"),
        ("embedding_adam", "Embedding, Adam"),
        ("experts", "Mixture of experts, AdamW"),
        ("transformer", "Transformer, AdamW"),
        ("lora", "LoRA on it, AdamW"),
    )
)


def studies(pair: Pair, *, quick: bool) -> dict[str, Study]:
    """Return the measurements of a model, by name."""
    length = 20 if quick else None
    common: dict[str, Any] = {"interval": INTERVAL, "iterations": length, "smooth": SMOOTH, "stratify": True}
    best: dict[str, Any] = {**common, "fractions": (EIGHTH,), "policies": (DEFAULT,)}
    every = {"fractions": (ONE, EIGHTH), "policies": (DEFAULT, *POLICIES)}
    result = {"policies": Study(workload=pair.workload, **common, **every)}
    if pair.name != "lora":
        result["curved"] = Study(workload=f"{pair.workload}_curved", **best)
    if pair.name in ("embedding_adam", "transformer"):
        result["rare"] = Study(workload=pair.workload, **{**best, "interval": SLOTS * INTERVAL})
        result |= {how: Study(workload=f"{pair.workload}_{how}", **best) for how in MOMENTS}
    if pair.name in ("embedding_adagrad", "transformer"):
        result |= {
            f"sampled-{every}": Study(workload=f"{pair.workload}_{every}", **best) for every in SAMPLED
        }
    return result
