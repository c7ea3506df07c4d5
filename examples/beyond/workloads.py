"""Define models that the paper lacks, as workloads of `scarctl simulate`; one row of a parameter is one partition.

scarctl simulate examples.beyond.workloads:embedding_adagrad --interval 16

All learn Python's own standard library, which is on every machine: its words, or its bytes.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from examples.embedding.model import Batches, SkipGram
from examples.embedding.words import load
from examples.fsdp_transformer.model import BYTES, Transformer
from scarctl.checkpoint.distance import Norm, curvature

WORDS = 5000
LENGTH, WIDTH = 32, 32
TEXTS = WATCHED = 32
"""Texts of LENGTH bytes that an iteration sees, and that the metric looks at."""
EXPERTS = 8
RANK = 4
"""Rank of LoRA's matrices."""
BASE = 200
"""Iterations that LoRA's frozen base has learnt for."""
STALE = 16
"""Iterations between two copies of moments, where these are saved apart from parameters."""


class Trained:
    """A model, an optimizer and batches by number."""

    rows = {"*": 1}  # noqa: RUF012
    norm: Norm = "l2"
    moments = "restored"
    """The optimizer's moments of a lost row after a partial recovery. "restored": as saved with the row.
    "kept": unchanged, as if only parameters were lost. "zeroed". "stale": from a copy of their own, made every
    STALE iterations."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self._position = {"done": 0}
        self.extras = {"position": self._position}

    def reset(self, seed: int) -> None:
        """Start with new weights and other batches."""
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._model, self._optimizer = self._make()
        self._draw = self._batches(seed)
        self._done = self._position["done"] = 0
        self._failed = False

    def state(self) -> Any:
        """Return the saved state."""
        return self._model, self._optimizer

    def step(self, iteration: int) -> None:
        """Train on one batch."""
        self._optimizer.zero_grad()
        self._loss(self._draw(iteration)).backward()
        self._optimizer.step()
        self._position["done"] = iteration
        if self.moments == "restored" or self._failed:
            return
        self._done = iteration
        self._before = {p: p.detach().clone() for p in self._parameters()}
        if self.moments == "kept" or iteration == 1 or iteration % STALE == 0:
            self._stale = {p: [slot.clone() for slot in self._slots(p)] for p in self._parameters()}

    def recompute(self) -> None:
        """After a recovery: treat the moments of the rows that were lost as `moments` says."""
        self._failed = True  # the rest continues from here, once for every way
        if self.moments == "restored" or self._position["done"] != self._done:
            return  # a rollback brings back everything as it was
        for p in self._parameters():
            # Rows that are as they were may have been lost too, but then their copies are of the same iteration.
            lost = (p.detach() != self._before[p]).flatten(1).any(1) if p.dim() > 1 else p != self._before[p]
            for k, slot in enumerate(self._slots(p)):
                slot[lost] = 0 if self.moments == "zeroed" else self._stale[p][k][lost]

    @torch.no_grad()
    def metric(self) -> float:
        """Loss of what is always the same."""
        return float(self._loss(self._watched))

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    def _slots(self, p: nn.Parameter) -> list[torch.Tensor]:
        return [slot for slot in self._optimizer.state[p].values() if slot.shape == p.shape]

    _watched: Any
    _make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    _batches: Callable[[int], Callable[[int], Any]]
    _loss: Callable[[Any], torch.Tensor]


class Embedding(Trained):
    """Skip-gram, see examples/embedding."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], rate: float) -> None:
        super().__init__(160)
        self._words, self._optimizer_of = load(WORDS), (optimizer, rate)
        self._watched = Batches(self._words, 0).watched

    def _make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        kind, rate = self._optimizer_of
        model = SkipGram(len(self._words.counts), sparse=False)
        return model, kind(model.parameters(), lr=rate)  # type: ignore[call-arg]

    def _batches(self, seed: int) -> Callable[[int], Any]:
        return Batches(self._words, seed).__getitem__

    def _loss(self, batch: Any) -> torch.Tensor:
        found: torch.Tensor = self._model(batch)
        return found


class Bytes(Trained):
    """A model that foretells the next byte, with AdamW."""

    def __init__(self, model: Callable[[], nn.Module], pattern: str = "*.py", iterations: int = 80) -> None:
        super().__init__(iterations)
        self._text, self._model_of = text(pattern), model
        self._watched = self._some(np.random.default_rng(0), WATCHED)

    def _make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self._model_of()
        learnt = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(learnt, lr=2e-3)

    def _batches(self, seed: int) -> Callable[[int], Any]:
        return lambda iteration: self._some(np.random.default_rng([seed, iteration]), TEXTS)

    def _some(self, random: np.random.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.from_numpy(random.integers(0, len(self._text) - LENGTH - 1, count))
        found = self._text[starts[:, None] + torch.arange(LENGTH + 1)].to(torch.int64)
        return found[:, :-1], found[:, 1:]

    def _loss(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self._model(batch[0]), batch[1].flatten())


class Mixture(nn.Module):
    """Four bytes are mixed, one of several experts works on them: the one that the router likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.mix = nn.Embedding(BYTES, 24), nn.Linear(4 * 24, WIDTH)
        self.router, self.logits = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, BYTES)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits, float32 of shape (batch * length, 256), for bytes, int64 of shape (batch, length)."""
        read = functional.pad(text, (3, 0)).unfold(1, 4, 1).flatten(0, 1)
        x = self.mix(self.bytes(read).flatten(1)).relu()
        liking, chosen = self.router(x).softmax(1).max(1)
        found = torch.empty_like(x)
        for expert in range(EXPERTS):
            mine = chosen == expert
            found[mine] = functional.gelu(x[mine] @ self.up[expert].T) @ self.down[expert].T
        logits: torch.Tensor = self.logits(x + liking[:, None] * found)
        return logits


class Adapted(nn.Module):
    """A frozen linear layer and what LoRA adds to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute as the layer in whose place this is."""
        found: torch.Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return found


class LoRA(Bytes):
    """The transformer, which has learnt one text, learns another by LoRA: only that is saved."""

    def state(self) -> Any:
        """Return the saved state: LoRA's matrices, and their moments."""
        layers = {name: module for name, module in self._model.named_modules() if isinstance(module, Adapted)}
        learnt = {f"{name}.{part}": getattr(of, part) for name, of in layers.items() for part in "ab"}
        return nn.ParameterDict({name.replace(".", "_"): p for name, p in learnt.items()}), self._optimizer


@cache
def text(pattern: str) -> torch.Tensor:
    """Return bytes of the library's files, uint8: the first ones by name, a million bytes at most."""
    found = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob(pattern)):
        found += path.read_bytes()
        if len(found) > 1_000_000:
            break
    return torch.from_numpy(np.frombuffer(found, dtype=np.uint8).copy())


@cache
def _base() -> dict[str, torch.Tensor]:
    """Return the text that LoRA's base has learnt."""
    of = transformer()
    of.reset(0)
    for iteration in range(1, BASE + 1):
        of.step(iteration)
    found: dict[str, torch.Tensor] = of.state()[0].state_dict()
    return found


def _adapted() -> nn.Module:
    model = Transformer(LENGTH, WIDTH)
    model.load_state_dict(_base())
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))
    return model


class Sampled:
    """The l2 norm of one in `every` coordinates, others at every look."""

    def __init__(self, every: int) -> None:
        self._every, self._look = every, 0

    def __call__(self, live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self._look += 1
        first = self._look % min(self._every, live[""].shape[1])
        return (live[""][:, first :: self._every] - saved[""][:, first :: self._every]).norm(dim=1)


def embedding_adagrad() -> Trained:
    """Skip-gram with Adagrad."""
    return Embedding(torch.optim.Adagrad, 0.2)


def embedding_adam() -> Trained:
    """Skip-gram with Adam, where rows without a gradient move too."""
    return Embedding(torch.optim.Adam, 0.01)


def experts() -> Trained:
    """Return a mixture of eight experts."""
    return Bytes(Mixture)


def transformer() -> Trained:
    """Two layers of attention."""
    return Bytes(lambda: Transformer(LENGTH, WIDTH))


def lora() -> Trained:
    """LoRA of rank 4 on that transformer, for another text."""
    _base()  # before a seed is set
    return LoRA(_adapted, "encodings/*.py")


def _with(make: Callable[[], Trained], **changes: Any) -> Callable[[], Trained]:
    def build() -> Trained:
        made = make()
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    return build


embedding_adam_kept, embedding_adam_zeroed, embedding_adam_stale = (
    _with(embedding_adam, moments=how) for how in ("kept", "zeroed", "stale")
)
transformer_kept, transformer_zeroed, transformer_stale = (
    _with(transformer, moments=how) for how in ("kept", "zeroed", "stale")
)
embedding_adagrad_8, embedding_adagrad_32 = (
    _with(embedding_adagrad, norm=Sampled(every)) for every in (8, 32)
)
transformer_8, transformer_32 = (_with(transformer, norm=Sampled(every)) for every in (8, 32))
embedding_adagrad_curved, embedding_adam_curved, experts_curved, transformer_curved = (
    _with(make, norm=curvature) for make in (embedding_adagrad, embedding_adam, experts, transformer)
)
