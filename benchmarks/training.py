"""Build a GPT-2-small state with AdamW that the benchmarks train, and two stand-ins for a forward and backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from states import gpt2_small_shapes
from torch import nn


class Model(nn.Module):
    """Parameters with the names and shapes of GPT-2 small."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in gpt2_small_shapes().items():
            shape = (max(1, shape[0] // scale), *shape[1:])
            parameter = nn.Parameter(0.02 * torch.randn(shape, generator=generator))
            # Made once: AdamW moves every value with the same gradient at every step.
            parameter.grad = torch.randn(shape, generator=generator)
            self.register_parameter(name.replace(".", "_"), parameter)


def build(scale: int = 1) -> tuple[Model, torch.optim.AdamW]:
    """Return the model and its optimizer: 1.49 GB of float32 after the first step (parameters, exp_avg, exp_avg_sq)."""
    model = Model(scale)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def whole_state(model: Model, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """Return the state of a full checkpoint: it shares memory with the live state."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def tensors(model: Model, optimizer: torch.optim.AdamW) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the state by a flat name."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        for slot in ("exp_avg", "exp_avg_sq"):
            yield f"{name}/{slot}", optimizer.state[parameter][slot]


def work(kind: str, seconds: float) -> Callable[[], None]:
    """Do what a training loop does between two optimizer steps.

    sleep: the accelerator works, this thread waits. compute: the host's own cores work for about `seconds`.
    """
    if kind == "sleep":
        return lambda: time.sleep(seconds)
    a = torch.randn(1024, 1024)

    def once() -> float:
        start = time.perf_counter()
        for _ in range(4):
            a @ a
        return (time.perf_counter() - start) / 4

    # The fastest of several: on a machine with neighbours the others say how busy those were.
    count = max(1, round(seconds / min(once() for _ in range(8))))

    def compute() -> None:
        for _ in range(count):
            a @ a

    return compute


def wait_durable(session: Any, step: int, timeout: float = 300.0) -> None:
    """Wait until the store has a checkpoint of `step`: nothing of it is left to disturb what is measured next.

    The checkpoint of a step is queued at the beginning of the next optimizer step, which must have been taken.
    """
    end = time.perf_counter() + timeout
    while max(session.store.state(shard).step for shard in session.store.shards()) < step:
        if time.perf_counter() > end:
            raise TimeoutError(f"step {step} is not durable after {timeout} s: {session.stats}")
        time.sleep(0.05)
