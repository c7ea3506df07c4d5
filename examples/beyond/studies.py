"""Every study of docs/beyond.md."""

from __future__ import annotations

from typing import Any

from examples.paper.studies import EIGHTH, ONE, POLICIES, Pair
from scarctl.simulate.study import Study

INTERVAL = 16
SLOTS = 3
"""Tensors of a row with Adam: the parameter and two moments. What they take is this many times the parameter alone."""
MOMENTS = ("kept", "zeroed", "stale")
SAMPLED = (8, 32)
"""One coordinate in so many."""

PAIRS = tuple(
    Pair(name, title, f"examples.beyond.workloads:{name}", share)
    for name, title, share in (
        ("embedding_adagrad", "Embedding, Adagrad", 1),
        ("embedding_adam", "Embedding, Adam", 1),
        ("experts", "Mixture of experts, AdamW", 0.6),
        ("transformer", "Transformer, AdamW", 0.6),
        ("lora", "LoRA on it, AdamW", 0.6),
    )
)


def studies(pair: Pair, *, quick: bool) -> dict[str, Study]:
    """What is measured of a model, by name."""
    common: dict[str, Any] = {"interval": INTERVAL, "iterations": 20 if quick else None}
    best: dict[str, Any] = {**common, "fractions": (EIGHTH,), "policies": ("priority",)}
    result = {"policies": Study(workload=pair.workload, **common, fractions=(ONE, EIGHTH), policies=POLICIES)}
    if pair.name in ("embedding_adam", "transformer"):
        result["rare"] = Study(workload=pair.workload, **{**best, "interval": SLOTS * INTERVAL})
        result |= {how: Study(workload=f"{pair.workload}_{how}", **best) for how in MOMENTS}
    if pair.name in ("embedding_adagrad", "transformer"):
        result |= {
            f"sampled-{every}": Study(workload=f"{pair.workload}_{every}", **best) for every in SAMPLED
        }
    return result
