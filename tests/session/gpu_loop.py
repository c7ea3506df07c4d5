"""Train on a GPU, as a program: `python -m tests.session.gpu_loop KIND STORE [--die-after N]`.

It prints one line of JSON: where it resumed, whether exactly, what was said, and a digest of the end.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import scarctl

STEPS = 24
EPOCHS = 3
KINDS = (
    "plain",
    "fused",
    "capturable",
    "scaled",
    "bfloat16",
    "compiled",
    "averaged",
    "own-stream",
    "moved-late",
    "pinned-batches",
    "two-models",
    "graphed-model",
)
CAPTURED = ("captured", "captured-by-hand")
DEVICE = os.environ.get("TEST_DEVICE", "cuda")


class Net(nn.Module):
    """Embedding, batch norm, dropout and a projection, deterministic on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 32)
        self.norm = nn.BatchNorm1d(32)
        self.inner = nn.Linear(32, 64)
        self.drop = nn.Dropout(0.25)
        self.out = nn.Linear(64, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(torch.relu(self.inner(self.norm(self.embed(ids))))))  # type: ignore[no-any-return]


class Said(logging.Handler):
    """Keeps scarctl's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=(*KINDS, *CAPTURED))
    parser.add_argument("store")
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--signal", default="SIGKILL")
    given = parser.parse_args()
    said = Said()
    logging.getLogger("scarctl").addHandler(said)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    with stream(given.kind):
        if given.kind in CAPTURED:
            found = captured(given.store, by_hand=given.kind == "captured-by-hand")
        else:
            found = train(given.kind, given.store, given.die_after, given.signal)
        sys.stdout.write(json.dumps(found | {"said": said.lines}) + "\n")


@contextlib.contextmanager
def stream(kind: str) -> Iterator[None]:
    if kind != "own-stream":
        yield
        return
    own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        yield


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"fused": {"fused": True}, "capturable": {"capturable": True}}.get(kind, {})
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def train(kind: str, store: str, die_after: int | None, how: str) -> dict[str, Any]:
    model: nn.Module = Net()
    if kind != "moved-late":
        model.to(DEVICE)
    optimizer = optimizer_of(kind, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**20, growth_interval=5) if kind == "scaled" else None
    average = AveragedModel(model) if kind == "averaged" else None
    second = nn.Linear(10, 10, device=DEVICE) if kind == "two-models" else None
    others = [] if second is None else [torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)]
    generator = torch.Generator().manual_seed(5)
    made = TensorDataset(
        torch.randint(0, 512, (STEPS // EPOCHS * 32,), generator=generator),
        torch.randint(0, 10, (STEPS // EPOCHS * 32,), generator=generator),
    )
    loader = DataLoader(made, 32, shuffle=True, pin_memory=kind == "pinned-batches")
    extras: dict[str, Any] = {} if average is None else {"average": average}
    session = scarctl.attach(
        model if second is None else nn.ModuleDict({"model": model, "second": second}),
        optimizer if second is None else [*others, optimizer],  # in the order in which they step
        store=store,
        interval=2,
        fraction=0.5,
        schedulers=schedule,
        scaler=scaler,
        extras=extras or None,
    )
    if kind == "moved-late":
        model.to(DEVICE)
    called: Callable[..., Any] = torch.compile(model) if kind == "compiled" else model
    if kind == "graphed-model":
        # Before resume(), because it runs the model to warm up, which changes batch norm's statistics.
        called = torch.cuda.make_graphed_callables(model, (torch.zeros(32, dtype=torch.long, device=DEVICE),))
    resumed = session.resume()
    step = session.head_step
    dtype = {"bfloat16": torch.bfloat16, "scaled": torch.float16}.get(kind)
    for _ in session.epochs(EPOCHS):
        for ids, labels in session.batches(loader):
            ids, labels = ids.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)
            with torch.autocast(DEVICE, dtype or torch.bfloat16, enabled=dtype is not None):
                out = called(ids)
                out = out if second is None else second(out)
                loss = nn.functional.cross_entropy(out.float(), labels)
            optimizer.zero_grad()
            for other in others:
                other.zero_grad()
            if scaler is None:
                loss.backward()
                for other in others:
                    other.step()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            schedule.step()
            if average is not None:
                average.update_parameters(model)
            step += 1
            if step == die_after:
                os.kill(os.getpid(), getattr(signal, how))
    session.close()
    digest = hashlib.sha256()
    for state in (model, optimizer, average, second):
        digest.update(digest_of(state.state_dict()).encode() if state is not None else b"")
    return {
        "step": resumed.step,
        "consistent": session.resumed.consistent,
        "reasons": list(session.resumed.reasons),
        "errors": session.stats.errors,
        "steps": step,
        "digest": digest.hexdigest(),
    }


def captured(store: str, *, by_hand: bool) -> dict[str, Any]:
    """Train with whole iterations as a CUDA graph that is replayed: no Python runs within one."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 1)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, capturable=True)
    x = torch.zeros(16, 32, device=DEVICE)
    session = scarctl.attach(model, optimizer, store=store, interval=2, hooks="off" if by_hand else "auto")
    resumed = session.resume()
    begun = digest_of(model.state_dict())

    def iteration() -> None:
        optimizer.zero_grad()
        (model(x).square().mean() + model[0].weight.square().sum()).backward()
        optimizer.step()

    if resumed.step == 0:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                iteration()
                if by_hand:
                    session.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            iteration()
        for _ in range(STEPS - 3):
            x.copy_(torch.randn(16, 32, device=DEVICE))
            graph.replay()
            if by_hand:
                session.step()
    steps = session.head_step
    session.close()
    return {
        "step": resumed.step,
        "resumed": begun,
        "steps": steps,
        "errors": session.stats.errors,
        "digest": digest_of(model.state_dict()),
    }


def digest_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        return hashlib.sha256(data.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return json.dumps({str(name): digest_of(part) for name, part in value.items()}, sort_keys=True)
    return json.dumps([digest_of(part) for part in value]) if isinstance(value, list | tuple) else repr(value)


if __name__ == "__main__":
    main()
