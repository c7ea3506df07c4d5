"""Use scarctl as a user's program does. `mypy` checks it together with the product; nothing runs it."""

from __future__ import annotations

from torch import nn, optim

import scarctl


def train(model: nn.Module, optimizer: optim.Optimizer) -> scarctl.Report:
    with scarctl.attach(
        model,
        optimizer,
        store="checkpoints",
        interval="auto",
        partitioning=scarctl.Partitioning(shards=8, rows={"embeddings.*": 1}),
        selection=scarctl.Selection(policy="round", norm="relative", tracker="exact"),
        extras={"average": scarctl.Extra(model, per_rank=True), "position": {"batch": 0}},
        ranks=scarctl.Ranks(replicated=["router.*"]),
        hooks="begin",
        settings=scarctl.Settings(on_error="raise", daemon=False, timeout=5),
    ) as session:
        resumed: scarctl.Resumed = session.resume("rollback")
        for _ in range(resumed.step, 100):
            session.step()
        try:
            return session.recover([2, 5], mode="auto")
        except scarctl.NoIntactCopy as error:
            raise SystemExit(error.message) from error


def wrong(model: nn.Module, session: scarctl.Session) -> None:
    """Make one mistake in each line, which a type checker has to find: an unneeded `ignore` is an error too."""
    scarctl.Selection(policy="best")  # type: ignore[arg-type]
    scarctl.Selection(norm="l3")  # type: ignore[arg-type]
    scarctl.Selection(tracker="guessed")  # type: ignore[arg-type]
    scarctl.Settings(on_error="ignore")  # type: ignore[arg-type]
    scarctl.Partitioning(8)  # type: ignore[call-arg]
    scarctl.attach(model, hooks=False)  # type: ignore[arg-type]
    scarctl.attach(model, partitioning={"shards": 8})  # type: ignore[arg-type]
    scarctl.attach(model, shards=8)  # type: ignore[call-arg]
    session.resume("forward")  # type: ignore[arg-type]
    session.recover("all", mode="forward")  # type: ignore[arg-type]
